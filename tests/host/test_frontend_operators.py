"""Operators that TVM's importer or its legalization has wrong: numbers against PyTorch, and what is said instead."""

import numpy as np
import pytest
import torch
from test_frontend_legalize import HALVES, ROUNDING, build
from test_frontend_torch import Function, assert_as_exact_as_eager, check_function, ops, random
from torch import nn
from torch.nn import functional
from tvm import relax

import tvm_comfuse
from tvm_comfuse.errors import BuildError, ModelError
from tvm_comfuse.frontend import from_torch, run_module
from tvm_comfuse.frontend.messages import telling_line
from tvm_comfuse.verify.numeric import relative_error

op = relax.op


def outputs(function, *inputs):
    """The outputs of the imported function, and PyTorch's."""
    expected = torch.utils._pytree.tree_leaves(tuple(function(*inputs)))
    return run_module(from_torch(Function(function), inputs), inputs), expected


def distinct(*shape, dtype):
    """Different numbers in random order, exact in every dtype: no ties, so that an index is right or wrong."""
    count = int(np.prod(shape))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return (order.reshape(shape) - count // 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.topk(x, 5),
        lambda x: torch.topk(x, 2, dim=0, largest=False),
        lambda x: torch.sort(x, -1),
        lambda x: torch.sort(x, 0, descending=True),
        lambda x: x.max(-1),
        lambda x: x.min(0, keepdim=True),
        lambda x: x.median(-1),
        lambda x: (x.argmax(-1), x.argmin(0, keepdim=True), x.argmax(), torch.argsort(x, 0)),
        lambda x: (x.amax(-1), x.amin((0, 1), keepdim=True), x.amax(), x.max(), x.amin(0)),
        lambda x: (x.isnan(), x.isinf(), (1 / x).isfinite()),
    ],
)
def test_what_is_chosen_is_exact(function, dtype):
    actual, expected = outputs(function, distinct(4, 32, dtype=dtype))
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", HALVES)
def test_values_of_ties_are_sorted(dtype):
    x = (distinct(4, 32, dtype=torch.float32) / 7).round().to(dtype)
    (values, indices), expected = outputs(lambda x: torch.sort(x, -1), x)
    assert torch.equal(values, expected[0])
    assert torch.equal(x.gather(-1, indices), values)
    assert all(row.unique().numel() == 32 for row in indices)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda x: op.cumsum(x, 1), lambda x: x.cumsum(1)),
        (lambda x: op.cumsum(x, 1, exclusive=True), lambda x: x.cumsum(1) - x),
        (lambda x: op.cumprod(x, 1), lambda x: x.cumprod(1)),
        (lambda x: op.sort(x, 1), lambda x: x.sort(1).values),
        (lambda x: op.topk(x, 3, 1, "values"), lambda x: x.topk(3).values),
        (lambda x: op.log_add_exp(x, op.negative(x)), lambda x: torch.logaddexp(x, -x)),
        (lambda x: op.mod(x, op.full((4, 96), relax.const(0.75, x.ty.dtype))), lambda x: torch.fmod(x, 0.75)),
        (
            lambda x: op.nn.conv1d(op.reshape(x, [1, 96, 4]), op.reshape(x, [4, 96, 1])),
            lambda x: functional.conv1d(x.reshape(1, 96, 4), x.reshape(4, 96, 1)),
        ),
        (
            lambda x: op.nn.conv2d_transpose(op.reshape(x, [1, 24, 4, 4]), op.reshape(x, [24, 16, 1, 1])),
            lambda x: functional.conv_transpose2d(x.reshape(1, 24, 4, 4), x.reshape(24, 16, 1, 1)),
        ),
    ],
)
def test_relax_operators_round_once(function, reference, dtype):
    x = random(4, 96, dtype=dtype)
    (out,) = run_module(build(function, [x]), [x])
    assert out.dtype == dtype
    assert relative_error(out, reference(x.double())) < ROUNDING[dtype]


def test_a_running_sum_has_the_dtype_that_is_asked_for():
    x = random(4, 512)
    (out,) = run_module(build(lambda x: op.cumsum(x, 1, "float32"), [x]), [x])
    assert out.dtype == torch.float32
    assert relative_error(out, x.double().cumsum(1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan(dtype):
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    y = torch.tensor([torch.inf, torch.inf, -torch.inf, 0.0], dtype=dtype)
    (finite,) = run_module(build(op.isfinite, [x]), [x])
    assert torch.equal(finite, x.isfinite())
    (both,) = run_module(build(op.log_add_exp, [x, y]), [x, y])
    assert torch.equal(both.nan_to_num(9), torch.logaddexp(x, y).nan_to_num(9))
    rows = torch.stack([y, torch.full_like(y, -torch.inf), torch.zeros_like(y)])
    (total,) = run_module(from_torch(Function(lambda x: x.logsumexp(-1)), (rows,)), [rows])
    assert torch.allclose(total, rows.logsumexp(-1), rtol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(8, 16, 3, padding=1), (2, 8, 20)),
        (lambda: nn.Conv1d(8, 16, 3, bias=False), (8, 20)),
        (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 9, 9)),
        (lambda: nn.Conv2d(8, 8, 3, groups=8, padding="same"), (2, 8, 9, 9)),
        (lambda: nn.Conv2d(8, 16, 3, dilation=2, bias=False), (2, 8, 9, 9)),
        (lambda: nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5)),
        (lambda: nn.ConvTranspose1d(8, 4, 3, stride=2), (2, 8, 9)),
        (lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1), (2, 8, 5, 5)),
        (lambda: nn.GroupNorm(4, 8), (2, 8, 9, 9)),
        (lambda: nn.GroupNorm(2, 8, affine=False), (4, 8)),
        (lambda: nn.BatchNorm2d(8), (2, 8, 5, 5)),
    ],
)
def test_layers_over_channels(layer, shape, dtype):
    torch.manual_seed(0)
    module, x = layer().to(dtype), random(*shape, dtype=dtype)
    assert_as_exact_as_eager(module, [x], from_torch(module, (x,)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.selu(x),
        lambda x: functional.celu(x, 2.0),
        lambda x: functional.elu(x, 0.5),
        lambda x: x.logsumexp(-1),
        lambda x: x.logsumexp((0, 1), keepdim=True),
        lambda x: x.abs().log2(),
        lambda x: x.abs().log1p(),
        lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: x // 0.7,
        lambda x: functional.cosine_similarity(x, x.flip(0)),
        lambda x: x.cumprod(-1),
    ],
)
def test_functions_are_as_exact_as_eager(function):
    check_function(function, random(4, 96))


def test_scales_of_activations_are_not_dropped_in_float32():
    x = random(4, 96, dtype=torch.float32)
    for function in (functional.selu, lambda x: functional.celu(x, 2.0)):
        (out,) = run_module(from_torch(Function(function), (x,)), [x])
        assert relative_error(out, function(x.double())) < 1e-6


class Head(nn.Module):
    """A function of a linear layer's result."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(64, 128), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x: x - x.amax(-1, keepdim=True), ["max", "subtract"]),
        (lambda x: x.min(-1).values, ["min"]),
        (lambda x: x.max(-1, keepdim=True).values * x, ["max", "multiply"]),
    ],
)
def test_a_row_extremum_is_one_reduction_and_is_fused(function, operators):
    model, x = Head(function).bfloat16().eval(), random(32, 64)
    mod = from_torch(model, (x,))
    assert ops(mod)[-len(operators) :] == operators
    assert not {"topk", "argmax", "argmin"} & set(ops(mod))
    (report,) = tvm_comfuse.explain(model, "h200", example_args=(x,)).matmuls
    assert report.fused
    assert_as_exact_as_eager(model, [x], mod)


def test_training_mode_is_imported_as_eval_and_left():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    x = random(4, 8, dtype=torch.float32)
    mod = from_torch(model.train(), (x,))
    assert all(module.training for module in model.modules())
    (out,) = run_module(mod, [x])
    assert torch.allclose(out, model.eval()(x), atol=1e-5)


def refused(function, *inputs):
    with pytest.raises(ModelError) as caught:
        from_torch(Function(function), inputs)
    return str(caught.value)


def test_a_refusal_names_the_operator_and_leaves_no_warning(capfd):
    message = refused(lambda x: x.index_put((torch.tensor([1, 2]),), x[:2]), random(4, 8))
    assert "aten.index_put(bfloat16 [4, 8]" in message
    assert "try: write it with other operators" in message
    assert "aten.cummax" in refused(lambda x: x.cummax(-1).values, random(4, 8))
    assert "Warning" not in capfd.readouterr().err


def test_the_fast_path_of_attention_is_said():
    def attention(x, w, b, v, c):
        return torch._native_multi_head_attention(x, x, x, 16, 2, w, b, v, c, need_weights=False)[0]

    message = refused(attention, *(torch.zeros(*shape) for shape in ((2, 4, 16), (48, 16), (48,), (16, 16), (16,))))
    assert "try: export the model after torch.backends.mha.set_fastpath_enabled(False)" in message


@pytest.mark.parametrize(
    ("message", "first", "last"),
    [
        ("Check failed: (n) is false:\nthe reason\n# Metadata omitted. Use show_meta", "the reason", "the reason"),
        ("Check failed: (n.defined()) is false: a null\n", "a null", "a null"),
        ('TypeError: ir.Op(span=None, ty=1, name="relax.nn.x", arguments=(), support_level=10) refuses bfloat16',
         "TypeError: relax.nn.x refuses bfloat16", "TypeError: relax.nn.x refuses bfloat16"),
        ("one\ntwo\n---\n", "one", "two"),
        ("# only this", "# only this", "# only this"),
        ("", "no message", "no message"),
    ],
)  # fmt: skip
def test_the_line_of_a_message_that_says_something(message, first, last):
    assert telling_line(RuntimeError(message)) == first
    assert telling_line(RuntimeError(message), last=True) == last


def test_a_build_error_is_not_a_comment():
    with pytest.raises(BuildError) as caught, tvm_comfuse.build._build_errors():
        raise RuntimeError("a pass failed\nthe cause\n# Metadata omitted. Use show_meta_data=True")
    assert "found the cause (RuntimeError)" in str(caught.value)
