"""Import from PyTorch: structure of the Relax module, and its numbers against PyTorch."""

import copy
import logging
import sys

import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional
from tvm import relax

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend import from_torch, load_exported_program, run_module
from tvm_comfuse.verify.numeric import relative_error


def assert_as_exact_as_eager(module, inputs, mod, run_inputs=None):
    """At most twice the error of PyTorch in the same dtype, both against the module in float64."""
    module = module.eval()
    reference_module = copy.deepcopy(module).double()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        eager, reference = module(*inputs), reference_module(*wide)
    (out,) = run_module(mod, run_inputs or inputs)
    assert out.dtype == eager.dtype
    assert out.shape == eager.shape
    assert relative_error(out, reference) <= 2 * relative_error(eager, reference)


def ops(mod):
    """The Relax operator names of main, in order, without the prefix."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, tvm.ir.Call) and isinstance(binding.value.op, tvm.ir.Op):
                names.append(binding.value.op.name.removeprefix("relax."))
    return names


def matmuls(mod):
    return [
        binding.value
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call) and getattr(binding.value.op, "name", "") == "relax.matmul"
    ]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def check_function(function, *inputs):
    module = Function(function)
    assert_as_exact_as_eager(module, inputs, from_torch(module, inputs))


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer_is_as_exact_as_eager(dtype, batch_first):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first).to(dtype)
    x = random(8, 16, 64, dtype=dtype)
    assert_as_exact_as_eager(layer, [x], from_torch(layer, (x,)))


def test_pre_norm_encoder_layer_with_gelu_is_as_exact_as_eager():
    layer = nn.TransformerEncoderLayer(64, 4, 128, norm_first=True, activation="gelu", batch_first=True).bfloat16()
    x = random(4, 16, 64)
    mod = from_torch(layer, (x,))
    assert "nn.gelu" in ops(mod)
    assert_as_exact_as_eager(layer, [x], mod)


@pytest.mark.parametrize("batch_first", [True, False])
def test_dynamic_batch_survives(batch_first):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=batch_first)
    axis = 0 if batch_first else 1
    batch = torch.export.Dim("batch", min=2, max=64)
    mod = from_torch(layer, (random(4, 8, 32, dtype=torch.float32),), dynamic_shapes=({axis: batch},))
    extent = mod["main"].params[0].ty.shape.values[axis]
    assert isinstance(extent, tvm.ir.Var)
    relax.analysis.well_formed(mod)
    shape = [6, 8, 32] if batch_first else [4, 6, 32]
    assert_as_exact_as_eager(layer, [random(*shape, dtype=torch.float32)], mod)


def test_bert_base_layer_has_four_products_with_plain_weights():
    layer = nn.TransformerEncoderLayer(768, 12, 3072, norm_first=False).bfloat16()
    mod = from_torch(layer, (torch.zeros(512, 32, 768, dtype=torch.bfloat16),))
    shapes = [(call.ty.shape.values[-1].value, len(call.args[1].ty.shape)) for call in matmuls(mod)]
    assert shapes == [(2304, 2), (768, 2), (3072, 2), (768, 2)]
    assert all(str(call.ty.dtype) == "bfloat16" for call in matmuls(mod))


def test_the_module_is_left_as_it_was():
    layer = nn.TransformerEncoderLayer(32, 2, 64).train()
    layer.norm1.eval()
    before = torch.backends.mha.get_fastpath_enabled()
    from_torch(layer, (random(4, 8, 32, dtype=torch.float32),))
    assert (layer.training, layer.linear1.training, layer.norm1.training) == (True, True, False)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_parameters_are_constants_or_arguments():
    layer = nn.Linear(16, 8).half()
    x = random(4, 16, dtype=torch.float16)
    assert len(from_torch(layer, (x,))["main"].params) == 1
    kept = from_torch(layer, (x,), keep_params=True)
    assert [param.name for param in kept["main"].params] == ["input", "p_weight", "p_bias"]
    assert_as_exact_as_eager(layer, [x], kept, [x, layer.weight, layer.bias])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_layers(dtype):
    for layer, shape in [(nn.Linear(40, 24), (5, 40)), (nn.Linear(40, 24, bias=False), (2, 3, 40))]:
        layer, x = layer.to(dtype), random(*shape, dtype=dtype)
        mod = from_torch(layer, (x,))
        assert ops(mod)[:2] == ["permute_dims", "matmul"]
        assert_as_exact_as_eager(layer, [x], mod)


def test_long_products_accumulate_in_float32():
    """4096 ones and a float16 accumulator would be stuck at 2048."""
    x, w = torch.ones(2, 4096, dtype=torch.float16), torch.ones(4096, 8, dtype=torch.float16)
    module = Function(torch.matmul)
    (out,) = run_module(from_torch(module, (x, w)), [x, w])
    assert torch.equal(out, torch.full((2, 8), 4096.0, dtype=torch.float16))


def test_products():
    a, b, c = random(3, 4, 8), random(3, 8, 6, seed=1), random(3, 4, 6, seed=2)
    check_function(torch.bmm, a, b)
    check_function(lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), a, b, c)
    check_function(lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0], alpha=0.5), a, b, c)
    check_function(lambda a, b: torch.einsum("bik,kj->bij", a, b[0]), a, b)
    check_function(lambda a, b: functional.linear(a.transpose(0, 1), b[0].transpose(0, 1)), a, b)
    check_function(lambda a, b: a[0] @ b[0, :, 0], a, b)


@pytest.mark.parametrize("equation", ["bsk,nk->bsn", "bsk,kn->bsn"])
def test_an_einsum_with_a_weight_is_a_linear_layer(equation):
    class Einsum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 12))

        def forward(self, x):
            return torch.einsum(equation, x, self.weight)

    module, x = Einsum().bfloat16(), random(2, 5, 12)
    mod = from_torch(module, (x,))
    assert [len(call.args[1].ty.shape) for call in matmuls(mod)] == [2]
    assert set(ops(mod)) <= {"permute_dims", "matmul"}
    assert_as_exact_as_eager(module, [x], mod)


def test_addmm_does_not_read_what_is_multiplied_by_zero():
    nan = torch.full((4, 6), float("nan"))
    a, b = random(4, 8, dtype=torch.float32), random(8, 6, dtype=torch.float32, seed=1)
    check_function(lambda c, a, b: torch.addmm(c, a, b, beta=0), nan, a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalisations(dtype):
    x = random(6, 48, dtype=dtype) * 3 + 1
    for module in (
        nn.LayerNorm(48),
        nn.LayerNorm(48, elementwise_affine=False),
        nn.LayerNorm(48, bias=False),
        nn.RMSNorm(48),
        nn.RMSNorm(48, eps=1e-3, elementwise_affine=False),
    ):
        module = module.to(dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        assert_as_exact_as_eager(module, [x], from_torch(module, (x,)))


@pytest.mark.parametrize(
    "function",
    [functional.gelu, functional.silu, torch.sigmoid, torch.tanh, lambda x: functional.softmax(x, -1)],
)
def test_elementwise_and_softmax_in_bfloat16(function):
    check_function(function, random(4, 96) * 2)


def test_tanh_gelu():
    check_function(lambda x: functional.gelu(x, approximate="tanh"), random(4, 96))


def test_softmax_with_a_dtype():
    x = random(4, 96)
    mod = from_torch(Function(lambda x: functional.softmax(x, -1, dtype=torch.float32)), (x,))
    (out,) = run_module(mod, [x])
    assert out.dtype == torch.float32
    assert relative_error(out, functional.softmax(x.double(), -1)) < 8 * 2.0**-24


def test_select_takes_negative_indices():
    check_function(lambda x: x[:, -1] + x[:, 0], random(4, 5, 8))


def attention_inputs(rank=4, dtype=torch.bfloat16):
    shape = {4: (2, 3, 10, 16), 3: (3, 10, 16), 2: (10, 16)}[rank]
    return [random(*shape, dtype=dtype, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_attention_of_any_rank(rank):
    check_function(functional.scaled_dot_product_attention, *attention_inputs(rank))


def test_attention_causal_scaled_and_masked():
    q, k, v = attention_inputs()
    check_function(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    check_function(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.7), q, k, v)
    seen = torch.rand(10, 10) < 0.7
    seen.fill_diagonal_(True)
    check_function(lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m), q, k, v, seen)
    bias = random(2, 1, 1, 10, seed=5)
    check_function(lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m), q, k, v, bias)
    q3, k3, v3 = attention_inputs(3)
    check_function(lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m), q3, k3, v3, seen)


def test_causal_attention_of_a_dynamic_length():
    length = torch.export.Dim("length", min=2, max=64)
    module = Function(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    mod = from_torch(module, tuple(attention_inputs()), dynamic_shapes=(({2: length},) * 3,))  # one variadic argument
    longer = [random(2, 3, 17, 16, seed=seed) for seed in range(3)]
    assert_as_exact_as_eager(module, longer, mod)


def test_attention_with_grouped_queries():
    q, k, v = random(2, 4, 10, 16), random(2, 2, 10, 16, seed=1), random(2, 2, 10, 16, seed=2)
    check_function(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)


def test_an_exported_program_and_its_file_give_the_same_module(tmp_path):
    layer = nn.Linear(16, 8).bfloat16().eval()
    x = random(4, 16)
    program = torch.export.export(layer, (x,))
    path = tmp_path / "layer.pt2"
    torch.export.save(program, path)
    expected = from_torch(layer, (x,))
    tvm.ir.assert_structural_equal(from_torch(program), expected)
    tvm.ir.assert_structural_equal(from_torch(path), expected)
    assert_as_exact_as_eager(layer, [x], from_torch(str(path)))


def test_what_cannot_be_imported_is_said():
    layer, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with pytest.raises(ModelError, match="example_args"):
        from_torch(layer)
    with pytest.raises(ModelError, match="exported already"):
        from_torch(torch.export.export(layer, (x,)), (x,))
    with pytest.raises(ModelError, match="found int"):
        from_torch(3)
    with pytest.raises(ModelError, match="can trace"):
        from_torch(Function(lambda x: x + 1 if x.sum() > 0 else x), (x,))
    with pytest.raises(ModelError, match=r"importer knows; found aten\.\w*svd"):
        from_torch(Function(torch.linalg.svdvals), (x,))


def test_no_log_of_pytorch_stands_in_front_of_the_error(capsys):
    class Wrong(nn.Module):
        def forward(self, x):
            seen.append(logging.root.manager.disable)
            sys.stderr.write("on the way")
            raise ValueError("wrong")

    seen, before = [], logging.root.manager.disable
    with pytest.raises(ModelError, match="can trace; found ValueError: wrong"):
        from_torch(Wrong(), (torch.zeros(2, 4),))
    assert set(seen) == {logging.CRITICAL}
    assert logging.root.manager.disable == before
    assert capsys.readouterr().err == ""


def test_a_corrupt_file_is_said(tmp_path):
    path = tmp_path / "model.pt2"
    with pytest.raises(ModelError, match="nothing at"):
        load_exported_program(path)
    for content in (b"", b"not a zip file", b"PK\x03\x04" + b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"torch\.export\.save"):
            load_exported_program(path)
