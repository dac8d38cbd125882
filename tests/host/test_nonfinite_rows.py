"""NaN and infinities in row values: as in PyTorch, on LLVM and in the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from interpreted_kernels import BASE, PINGPONG
from tvm import relax, te
from tvm.relax import op

import tvm_comfuse
from tvm_comfuse.fusion import fuse
from tvm_comfuse.row_reducers import REDUCERS, reduction_of
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.normal_form import is_load
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster, lower
from tvm_comfuse.verify.interpreter import Program

M, N, K = 128, 256, 64
#: slots enough for a deferred tail
DEEP_K = 512
DEFERRED = replace(BASE, operands=("global",), store=("global",), defer=True)
#: tile_n 128: a row of N = 256 columns has two parts, in two CTAs; deferred_warp has it in one
PLANS = {
    "cooperative": BASE,
    "pingpong": PINGPONG,
    "deferred": DEFERRED,
    "deferred_warp": replace(DEFERRED, tile_n=256, exchange="warp", ctas=1),
    "packed": replace(DEFERRED, packed_tail=True),
}
#: what packed arithmetic has
PACKED = ("norm", "max_of_all_columns")


def _maximum(v: Any) -> Any:
    return op.max(v, -1, keepdims=True)


def _minimum(v: Any) -> Any:
    return op.min(v, -1, keepdims=True)


def _norm(v: Any) -> Any:
    d = op.subtract(v, op.mean(v, -1, keepdims=True))
    variance = op.mean(op.multiply(d, d), -1, keepdims=True)
    return op.multiply(d, op.rsqrt(op.add(variance, relax.const(np.asarray(1e-5, "float32").astype("bfloat16")))))


def _torch_norm(v: torch.Tensor) -> torch.Tensor:
    d = v - v.mean(-1, keepdim=True)
    return d / (d * d).mean(-1, keepdim=True).add(1e-5).sqrt()


OPS: dict[str, tuple[Any, Any]] = {
    "max": (_maximum, lambda v: v.amax(-1, keepdim=True)),
    "min": (_minimum, lambda v: v.amin(-1, keepdim=True)),
    "max_of_all_columns": (lambda v: op.add(v, _maximum(v)), lambda v: v + v.amax(-1, keepdim=True)),
    "softmax": (lambda v: op.nn.softmax(v, -1), lambda v: v.softmax(-1)),
    "norm": (_norm, _torch_norm),
}


def _module(name: str, k: int = K) -> tvm.IRModule:
    """OPS[name](x w + r), the sum in bfloat16 in the model and in float32 in the cluster."""
    tensors = {"x": (M, k), "w": (k, N), "r": (M, N)}
    x, w, r = (relax.Var(each, relax.TensorType(shape, "bfloat16")) for each, shape in tensors.items())
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, r]):
        with builder.dataflow():
            value = builder.emit(op.add(builder.emit(op.matmul(x, w)), r))
            out = builder.emit_output(OPS[name][0](value))
        builder.emit_func_output(out)
    return builder.finalize()


def _inputs(k: int = K) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, r = (torch.randn(shape, generator=generator) for shape in ((M, k), (k, N), (M, N)))
    x, w, r = (value.to(torch.bfloat16) for value in (x, w * (K / k) ** 0.5, r))
    inf = torch.inf
    # in the first column, the last, and both parts of the row; NaN before and behind larger numbers
    for row, column in ((0, 0), (1, N - 1), (2, 5), (65, 130)):
        r[row, column] = torch.nan
    r[2, 7] = inf
    r[3, 9], r[4, 9], r[66, 200] = inf, -inf, inf
    r[5] = -inf
    r[6] = inf
    r[7, : N // 2] = -inf
    r[8, N // 2 :] = -inf
    r[9] = -inf
    r[9, 3] = torch.nan
    r[10, : N // 2] = -inf
    r[10, N // 2 + 1] = torch.nan
    return [x, w, r]


def _check(name: str, out: torch.Tensor, inputs: list[torch.Tensor], parked: bool = False) -> None:
    """parked: v waits for row values in bfloat16, off by 2**-9 of it or of its distance from an offset, and |v| < 16; an
    exponential is off by as much of itself.  Packed sums are rounded as well."""
    x, w, r = (value.double() for value in inputs)
    expected = OPS[name][1](x @ w + r).to(torch.bfloat16)
    assert expected.isnan().any()
    rtol, atol = (0.1, 1 / 8) if parked else (1e-2, 1e-2)
    atol = 1e-6 if name in ("softmax", "max", "min") else atol
    torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", OPS)
def test_on_the_cpu(name: str) -> None:
    inputs = _inputs()
    compiled = tvm_comfuse.compile(_module(name), "llvm", form="fused")
    assert compiled.explanation is not None
    assert compiled.explanation.matmuls[0].ops[1:] == fuse(_module(name), parse_target("h200"))[1].matmuls[0].ops[1:]
    _check(name, compiled.run(*inputs), inputs)


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in OPS for layout in PLANS if layout != "packed" or name in PACKED]
)
def test_in_the_kernel(name: str, layout: str) -> None:
    values = PLANS[layout].to_dict()
    if name in ("max", "min"):
        values["store"] = []  # row values are no tiles
    deferred = values["defer"]
    k = DEEP_K if deferred else K
    fused, explanation = fuse(_module(name, k), parse_target("h200"), {"lv": Plan.from_dict(values)})
    assert explanation.matmuls[0].fused
    (func,) = [func for _, func in fused.functions_items() if is_cluster(func)]
    inputs = _inputs(k)
    arrays = [value.view(torch.int16).numpy().view("bfloat16") for value in inputs]
    result = Program(lower(func, "kernel")).run(arrays)
    assert not result.findings, result.findings[0]
    (out,) = result.outputs.values()
    _check(name, torch.from_numpy(out.astype(np.float32)), inputs, deferred)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_reducers_are_known_again(kind: str) -> None:
    fused, _ = fuse(_module(kind), parse_target("h200"))
    (func,) = [func for _, func in fused.functions_items() if is_cluster(func)]
    assert [reduction.op for reduction in analyze(func).reductions] == [kind]


def test_reducers_that_lose_nan_are_none_of_ours() -> None:
    x, j = te.placeholder((4, 8), "float32"), te.reduce_axis((0, 8))

    def stored(reducer: Any) -> Any:
        made = te.create_prim_func([x, te.compute((4,), lambda i: reducer(x[i, j], axis=j), name="out")])
        found: list[Any] = []
        tvm_ffi.structural_walk(made.body, [(tvm.s_tir.SBlock, lambda block: found.append(block.body))])
        store = next(each for each in found if isinstance(each, tvm.tirx.BufferStore))
        return reduction_of(store.value, lambda expr: is_load(expr, store.buffer, store.indices))

    assert stored(te.max) is None
    assert [stored(REDUCERS[name])[0] for name in REDUCERS] == list(REDUCERS)
