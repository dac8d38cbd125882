"""Legalization of what stays unfused: float32 inside, one rounding at the end."""

import math

import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax

from tvm_comfuse.frontend import expand_attention, legalize, run_module
from tvm_comfuse.verify.numeric import relative_error

op = relax.op
HALVES = [torch.bfloat16, torch.float16]
# Worst case of one rounding to nearest, relative to the value; the norm of many roundings stays below it.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def build(function, inputs):
    """A module whose main is the Relax expression ``function(*params)``."""
    params = [relax.Var(f"p{i}", relax.TensorType(list(x.shape), name_of(x.dtype))) for i, x in enumerate(inputs)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(function(*params))
        builder.emit_func_output(out)
    return builder.finalize()


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(function, reference, *inputs):
    """The result of ``function`` is the float64 ``reference``, rounded once (or little more) to the dtype."""
    (out,) = run_module(build(function, inputs), inputs)
    assert out.dtype == inputs[0].dtype
    assert relative_error(out, reference(*(x.double() for x in inputs))) < ROUNDING[out.dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_normalisations_round_once(dtype):
    x, gamma, beta = random(8, 64, dtype=dtype) + 4, random(64, dtype=dtype, seed=1), random(64, dtype=dtype, seed=2)
    check(
        lambda x, g, b: op.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5),
        lambda x, g, b: functional.layer_norm(x, (64,), g, b),
        x, gamma, beta,
    )  # fmt: skip
    check(
        lambda x, g: op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5),
        lambda x, g: functional.rms_norm(x, (64,), g, 1e-5),
        x, gamma,
    )  # fmt: skip
    if dtype == torch.bfloat16:  # Relax has no group norm of it; the importer makes one of float32
        return
    check(
        lambda x, g, b: op.nn.group_norm(x, g, b, num_groups=4, channel_axis=1, axes=[], epsilon=1e-5),
        lambda x, g, b: functional.group_norm(x, 4, g, b),
        x, gamma, beta,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (lambda x: op.nn.softmax(x, -1), lambda x: functional.softmax(x, -1)),
        (lambda x: op.nn.log_softmax(x, -1), lambda x: functional.log_softmax(x, -1)),
        (op.nn.gelu, functional.gelu),
        (op.nn.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
        (op.nn.silu, functional.silu),
        (op.exp, torch.exp),
        (op.erf, torch.erf),
        (op.sigmoid, torch.sigmoid),
        (lambda x: op.mean(x, -1, keepdims=True), lambda x: x.mean(-1, keepdim=True)),
        (lambda x: op.variance(x, -1), lambda x: x.var(-1, correction=0)),
        (lambda x: op.sum(op.multiply(x, x), -1), lambda x: (x * x).sum(-1)),
    ],
)
def test_functions_and_reductions_round_once(function, reference, dtype):
    check(function, reference, random(4, 2048, dtype=dtype) + 1)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_accumulate_in_float32(dtype):
    x, w = random(4, 2048, dtype=dtype) + 1, random(2048, 8, dtype=dtype, seed=1)
    check(op.matmul, torch.matmul, x, w)
    check(lambda x, w: op.einsum((x, w), "ik,kj->ij"), torch.matmul, x, w)
    check(op.matmul, torch.matmul, x.reshape(2, 2, 2048), w)


def attention(q, k, v, bias=None, causal=None):
    """relax.nn.attention in float64: q [B, S, H, D], k and v [B, T, H, D]."""
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if causal is not None:
        rows, columns = scores.shape[-2:]
        diagonal = 1 + (columns - rows if causal == "BottomRight" else 0)
        scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(diagonal), -math.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("causal", [None, "TopLeft", "BottomRight"])
def test_attention(dtype, causal):
    q, k, v = (random(2, length, 3, 16, dtype=dtype, seed=i) for i, length in enumerate((6, 9, 9)))
    mod = build(lambda q, k, v: op.nn.attention(q, k, v, causal_mask=causal), (q, k, v))
    (out,) = run_module(mod, (q, k, v))
    # the probabilities are rounded to the dtype of the values too, hence two roundings
    limit = 2 * ROUNDING.get(dtype, 1e-6)
    assert relative_error(out, attention(q.double(), k.double(), v.double(), causal=causal)) < limit


def test_attention_with_a_bias_and_a_scale():
    q, k, v = (random(2, 8, 3, 16, seed=i) for i in range(3))
    bias = random(2, 3, 8, 8, seed=4)
    bias[..., 0] = -math.inf
    mod = build(lambda q, k, v, b: op.nn.attention(q, k, v, b), (q, k, v, bias))
    (out,) = run_module(mod, (q, k, v, bias))
    wide = [x.double() for x in (q, k, v, bias)]
    assert relative_error(out, attention(*wide)) < 2 * ROUNDING[torch.bfloat16]
    mod = build(lambda q, k, v: op.nn.attention(q, k, v, scale=0.5), (q, k, v))
    (out,) = run_module(mod, (q, k, v))
    assert relative_error(out, attention(2.0 * wide[0], *wide[1:3])) < 2 * ROUNDING[torch.bfloat16]


def test_attention_becomes_two_products_and_a_softmax():
    inputs = tuple(random(2, 8, 3, 16) for _ in range(3))
    mod = build(op.nn.attention, inputs)
    before = mod.script()
    script = expand_attention()(mod).script()
    assert mod.script() == before
    assert script.count("R.matmul") == 2
    assert script.count("R.nn.softmax") == 1
    assert "nn.attention" not in script


def test_the_product_of_a_half_model_has_a_float32_output_before_the_cast():
    script = legalize()(build(op.matmul, (random(4, 64), random(64, 8)))).script()
    assert 'R.Tensor((4, 8), dtype="float32")' in script
    assert 'R.Tensor((4, 8), dtype="bfloat16")' in script


def test_float32_is_legalized_as_always():
    x, w, g = (random(*shape, dtype=torch.float32) for shape in [(4, 64), (64, 64), (64,)])
    mod = build(lambda x, w, g: op.nn.gelu(op.nn.rms_norm(op.matmul(x, w), g, axes=[-1])), (x, w, g))
    tvm.ir.assert_structural_equal(legalize()(mod), relax.transform.LegalizeOps()(mod))


def test_nan_survives_softmax_and_layer_norm():
    x = random(4, 64)
    x[1, 3] = math.nan
    (out,) = run_module(build(lambda x: op.nn.softmax(x, -1), (x,)), (x,))
    assert out[1].isnan().all()
    assert not out[[0, 2, 3]].isnan().any()


def test_the_legalized_module_builds_for_cuda_with_the_stock_schedules():
    """Source only: no GPU is needed."""
    x, w, b = random(256, 256), random(256, 256, seed=1), random(256, seed=2)

    def model(x, w, b):
        return op.nn.layer_norm(op.nn.gelu(op.add(op.matmul(x, w), b)), b, b, axes=[-1])

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
    with target:
        executable = tvm.compile(legalize()(build(model, (x, w, b))), target=target)
    cuda = [module for module in _modules(executable.mod) if module.kind == "cuda"]
    assert cuda, "no CUDA module was built"


def _modules(module):
    return [module, *(nested for child in module.imports for nested in _modules(child))]
