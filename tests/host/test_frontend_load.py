"""Models from files and functions, and what is said when there is none."""

import textwrap

import pytest
import torch
import tvm
from tvm import relax

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend import from_relax, load_model, run_module, to_torch, to_tvm

MODEL = """
    import torch
    from tvm import relax
    from helper_beside_it import WIDTH

    def linear():
        return torch.nn.Linear(WIDTH, 4), torch.ones(2, WIDTH)

    def dynamic():
        return torch.nn.Linear(WIDTH, 4), (torch.ones(2, WIDTH),), ({0: torch.export.Dim("rows", min=2, max=64)},)

    def exported():
        return torch.export.export(torch.nn.Linear(WIDTH, 4), (torch.ones(2, WIDTH),))

    def alone():
        return torch.nn.Linear(WIDTH, 4)

    def nothing():
        return None

    def wrong_inputs():
        return torch.nn.Linear(WIDTH, 4), ["x"]

    def raising():
        raise KeyError("weights")

    not_callable = 3
"""


def relax_module(name="main"):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2, 8], "float16"))
    weight = relax.const(torch.ones(8, 4).half().numpy(), "float16")
    with builder.function(name, [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(x, weight))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.fixture
def model_file(tmp_path):
    (tmp_path / "helper_beside_it.py").write_text("WIDTH = 8\n")
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def test_exported_program_file(tmp_path):
    layer, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
    path = tmp_path / "layer.pt2"
    torch.export.save(torch.export.export(layer, (x,)), path)
    model = load_model(str(path))
    assert model.name == "layer"
    assert torch.equal(model.example_inputs[0], x)
    (out,) = run_module(model.mod, model.example_inputs)
    torch.testing.assert_close(out, layer(x))


def test_relax_json_file(tmp_path):
    path = tmp_path / "product.json"
    path.write_text(tvm.ir.save_json(relax_module()))
    model = load_model(str(path))
    assert model.name == "product"
    assert model.example_inputs is None
    (out,) = run_module(model.mod, [torch.ones(2, 8).half()])
    assert torch.equal(out, torch.full((2, 4), 8.0).half())


@pytest.mark.parametrize("function", ["linear", "dynamic", "exported"])
def test_function_in_a_file(model_file, function):
    model = load_model(f"{model_file}:{function}")
    assert model.name == function
    assert [tuple(x.shape) for x in model.example_inputs] == [(2, 8)]
    assert isinstance(model.mod["main"].params[0].ty.shape.values[0], tvm.ir.Var) == (function == "dynamic")
    (out,) = run_module(model.mod, model.example_inputs)
    assert out.shape == (2, 4)


def test_function_in_a_module_that_returns_relax(tmp_path, monkeypatch):
    package = tmp_path / "made_for_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    path = tmp_path / "product.json"
    path.write_text(tvm.ir.save_json(relax_module()))
    (package / "models.py").write_text(
        f"import tvm\ndef product():\n    return tvm.ir.load_json(open({str(path)!r}).read())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = load_model("made_for_this_test.models:product")
    assert model.example_inputs is None
    tvm.ir.assert_structural_equal(model.mod, from_relax(relax_module()))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", r"needed a function absent .*found only .*linear"),
        ("not_callable", "not callable"),
        ("raising", r"needed .*raising to return a model; found KeyError: 'weights'"),
        ("nothing", "found NoneType"),
        ("alone", "a module alone"),
        ("wrong_inputs", "to be tensors; found str"),
    ],
)
def test_functions_that_give_no_model(model_file, function, message):
    with pytest.raises(ModelError, match=message):
        load_model(f"{model_file}:{function}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("absent.pt2", r"needed an existing \.pt2 file"),
        ("absent.json", r"needed an existing \.json file"),
        ("absent.py:f", "needed an existing Python file"),
        ("no_such_package.models:f", "needed a module no_such_package.models"),
        ("model.bin", r"found 'model\.bin'"),
        ("", "found ''"),
        ("model.py:", "file.py:function"),
        ("model.py:a-b", "file.py:function"),
    ],
)
def test_specs_that_name_nothing(spec, message):
    with pytest.raises(ModelError, match=message):
        load_model(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [("def f(:", "SyntaxError"), ("import absent_package_x", "ModuleNotFoundError"), ("exit(3)", "SystemExit")],
)
def test_a_file_that_cannot_run(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ModelError, match=f"needed .*broken.py to run; found {message}"):
        load_model(f"{path}:f")


@pytest.mark.parametrize("change", [
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: "[1, 2]",
    lambda text: '{"nodes": []}',
    lambda text: text.replace("ir.IRModule", "ir.NoSuchType"),
])  # fmt: skip
def test_a_corrupt_json_file(tmp_path, change):
    path = tmp_path / "model.json"
    path.write_text(change(tvm.ir.save_json(relax_module())))
    with pytest.raises(ModelError, match=r"written by tvm\.ir\.save_json"):
        load_model(str(path))


def test_json_of_something_else(tmp_path):
    path = tmp_path / "value.json"
    path.write_text(tvm.ir.save_json(tvm.runtime.convert([1, 2])))
    with pytest.raises(ModelError, match=r"needed a tvm\.IRModule"):
        load_model(str(path))


def test_relax_modules_that_are_refused():
    with pytest.raises(ModelError, match="found int"):
        from_relax(3)
    with pytest.raises(ModelError, match="found no function"):
        from_relax(tvm.IRModule({}))
    with pytest.raises(ModelError, match="found other"):
        from_relax(relax_module("other"))
    source = tvm.te.placeholder((4,), name="source")
    doubled = tvm.te.create_prim_func([source, tvm.te.compute((4,), lambda i: source[i] * 2)])
    with pytest.raises(ModelError, match="main to be a Relax function; found PrimFunc"):
        from_relax(tvm.IRModule({"main": doubled}))
    x, y = (relax.Var(name, relax.TensorType([2], "float32")) for name in "xy")
    body = relax.SeqExpr([], y)
    with pytest.raises(ModelError, match="well-formed"):
        from_relax(tvm.IRModule({"main": relax.Function([x], body, relax.TensorType([2], "float32"))}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_tensors_go_to_tvm_and_back(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    there = to_tvm(tensor)
    assert str(there.dtype) == str(dtype).removeprefix("torch.")
    assert tuple(there.shape) == shape
    back = to_torch(there)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_tensors_are_copied_and_made_compact():
    tensor = torch.arange(12.0).reshape(3, 4).t()
    there = to_tvm(tensor)
    tensor.zero_()
    back = to_torch(there)
    assert back.tolist() == torch.arange(12.0).reshape(3, 4).t().tolist()
    back.zero_()
    assert to_torch(there).sum() == 66
    assert to_torch(to_tvm(torch.arange(3.0).requires_grad_().detach().numpy())).tolist() == [0, 1, 2]
    with pytest.raises(ModelError, match="found list"):
        to_tvm([1, 2])
