"""Hand-made canonical functions with their float64 references, independent of relay_patterns.

Each example is made for any M (an int, or None for a symbolic M), N, K, half dtype and layout of w.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import te, tirx

from tvm_comfuse.row_reducers import REDUCERS

F32 = "float32"


class Maker:
    """Collects the parameters of one function and offers the TE of the canonical blocks."""

    def __init__(self, m: int | None, n: int, k: int, dtype: str, layout: str):
        self.m = tirx.Var("m", "int64") if m is None else m
        self.n, self.k, self.dtype = n, k, dtype
        self.params: list[Any] = []
        x = self.operand("x", (self.m, k))
        w = self.operand("w", (n, k) if layout == "NK" else (k, n))
        r = te.reduce_axis((0, k), "k")
        at = (lambda j, r: (j, r)) if layout == "NK" else (lambda j, r: (r, j))
        self.gemm = te.compute(
            (self.m, n), lambda i, j: te.sum(x[i, r].astype(F32) * w[at(j, r)].astype(F32), axis=r), name="gemm"
        )

    def operand(self, name: str, shape: tuple, dtype: str | None = None) -> Any:
        self.params.append(te.placeholder(shape, dtype or self.dtype, name))
        return self.params[-1]

    def tile(self, name: str, dtype: str | None = None) -> Any:
        return self.operand(name, (self.m, self.n), dtype)

    def col(self, name: str) -> Any:
        return self.operand(name, (self.n,))

    def stage(self, level: int, value: Callable) -> Any:
        return te.compute((self.m, self.n), value, name=f"stage_{level}")

    def out(self, level: int, value: Callable, number: int = 0, dtype: str | None = None) -> Any:
        as_type = dtype or self.dtype
        return te.compute((self.m, self.n), lambda i, j: value(i, j).astype(as_type), name=f"stage_{level}_out{number}")

    def row_out(self, level: int, value: Callable, number: int) -> Any:
        return te.compute((self.m, 1), lambda i, _: value(i), name=f"stage_{level}_out{number}")

    def reduce(self, name: str, op: Callable, value: Callable, merge: str | None = None, first: str = "") -> Any:
        j = te.reduce_axis((0, self.n), "j")
        attrs = {"comfuse.merge": merge, "comfuse.merge_with": first} if merge else None
        return te.compute((self.m,), lambda i: op(value(i, j), axis=j), name=name, attrs=attrs)

    def func(self, outputs: list[Any], kind: str, stages: list[tuple]) -> tirx.PrimFunc:
        table = [
            {"stage": n, "carried": carried, "reductions": reductions, "outputs": outs}
            for n, (carried, reductions, outs) in enumerate(stages)
        ]
        attrs = {
            "comfuse.kind": kind,
            "op_pattern": 8,
            "tirx.is_scheduled": True,
            "tirx.noalias": True,
            "comfuse.stages": json.dumps(table),
            "global_symbol": "main",
        }
        return te.create_prim_func([*self.params, *outputs]).with_attrs(attrs)


def const(value: float) -> Any:
    return tirx.const(value, F32)


def _centred(v: Any, total: Any, n: int) -> Callable:
    return lambda i, j: v(i, j) - total[i] * const(1.0 / n)


def _moments(mk: Maker, v: Callable, level: int = 0) -> tuple[Any, Any, Callable]:
    total = mk.reduce(f"reduce_{level}", te.sum, v)
    d = _centred(v, total, mk.n)
    squares = mk.reduce(
        f"reduce_{level + 1}", te.sum, lambda i, j: d(i, j) * d(i, j), merge="moments", first=f"reduce_{level}"
    )
    return total, squares, d


def layer_norm(mk: Maker) -> tirx.PrimFunc:
    """LayerNorm(residual + x W + b) * g + e."""
    b, r = mk.col("b"), mk.tile("r")
    s0 = mk.stage(0, lambda i, j: mk.gemm[i, j] + b[j].astype(F32) + r[i, j].astype(F32))
    _, squares, d = _moments(mk, lambda i, j: s0[i, j])
    g, e = mk.col("g"), mk.col("e")
    out = mk.out(
        2,
        lambda i, j: (
            d(i, j) * te.rsqrt(squares[i] * const(1.0 / mk.n) + const(1e-5)) * g[j].astype(F32) + e[j].astype(F32)
        ),
    )
    return mk.func(
        [out],
        "gemm_reduce",
        [("stage_0", ["reduce_0"], []), (None, ["reduce_1"], []), (None, [], ["stage_2_out0"])],
    )


def _layer_norm_reference(x, w, b, r, g, e):
    v = x @ w + b + r
    d = v - v.mean(-1, keepdims=True)
    return [d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * g + e]


def softmax_cap(mk: Maker) -> tirx.PrimFunc:
    """softmax(30 tanh(x W / 30)), one exchange for maximum and sum."""
    s0 = mk.stage(0, lambda i, j: const(30.0) * te.tanh(mk.gemm[i, j] * const(1 / 30.0)))
    top = mk.reduce("reduce_0", REDUCERS["max"], lambda i, j: s0[i, j])
    total = mk.reduce("reduce_1", te.sum, lambda i, j: te.exp(s0[i, j] - top[i]), merge="softmax", first="reduce_0")
    out = mk.out(2, lambda i, j: te.exp(s0[i, j] - top[i]) / total[i])
    return mk.func(
        [out],
        "gemm_reduce",
        [("stage_0", ["reduce_0"], []), (None, ["reduce_1"], []), (None, [], ["stage_2_out0"])],
    )


def _softmax(v):
    p = np.exp(v - v.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def rms_residual(mk: Maker) -> tirx.PrimFunc:
    """r + RMSNorm(x W) * g: the product itself is carried."""
    squares = mk.reduce("reduce_0", te.sum, lambda i, j: mk.gemm[i, j] * mk.gemm[i, j])
    g, r = mk.col("g"), mk.tile("r")
    out = mk.out(
        1,
        lambda i, j: (
            r[i, j].astype(F32)
            + mk.gemm[i, j] * te.rsqrt(squares[i] * const(1.0 / mk.n) + const(1e-6)) * g[j].astype(F32)
        ),
    )
    return mk.func([out], "gemm_reduce", [(None, ["reduce_0"], []), (None, [], ["stage_1_out0"])])


def _rms_reference(x, w, g, r):
    v = x @ w
    return [r + v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * g]


def bias_gelu(mk: Maker) -> tirx.PrimFunc:
    """gelu(x W + b), no reduction."""
    b = mk.col("b")

    def gelu(i, j):
        v = mk.gemm[i, j] + b[j].astype(F32)
        return const(0.5) * v * (const(1.0) + te.erf(v * const(math.sqrt(0.5))))

    return mk.func([mk.out(0, gelu)], "gemm_elementwise", [(None, [], ["stage_0_out0"])])


def _gelu_reference(x, w, b):
    v = x @ w + b
    return [0.5 * v * (1.0 + np.vectorize(math.erf)(v * math.sqrt(0.5)))]


def gate_two_outputs(mk: Maker) -> tirx.PrimFunc:
    """u = gate * (x W) * row * scale; outputs RMSNorm(u), u (float32, from stage 0) and the row's sum of squares."""
    gate, row = mk.tile("gate", F32), mk.operand("row", (mk.m, 1), F32)
    scale = mk.operand("scale", (1,), F32)
    s0 = mk.stage(0, lambda i, j: mk.gemm[i, j] * gate[i, j] * row[i, 0] * scale[0])
    wide = mk.out(0, lambda i, j: s0[i, j], dtype=F32)
    squares = mk.reduce("reduce_0", te.sum, lambda i, j: s0[i, j] * s0[i, j])
    norm = mk.out(1, lambda i, j: s0[i, j] * te.rsqrt(squares[i] * const(1.0 / mk.n) + const(1e-6)))
    stat = mk.row_out(1, lambda i: squares[i], 1)
    return mk.func(
        [norm, wide, stat],
        "gemm_reduce",
        [("stage_0", ["reduce_0"], ["stage_0_out0"]), (None, [], ["stage_1_out0", "stage_1_out1"])],
    )


def _gate_reference(x, w, gate, row, scale):
    u = (x @ w) * gate * row * scale
    squares = (u * u).sum(-1, keepdims=True)
    return [u / np.sqrt(squares / u.shape[1] + 1e-6), u, squares]


def norm_of_softmax(mk: Maker) -> tirx.PrimFunc:
    """LayerNorm(softmax(x W)): an exponential carried in stage 1, three levels of dependent reductions, one pair."""
    top = mk.reduce("reduce_0", REDUCERS["max"], lambda i, j: mk.gemm[i, j])
    s1 = mk.stage(1, lambda i, j: te.exp(mk.gemm[i, j] - top[i]))
    total = mk.reduce("reduce_1", te.sum, lambda i, j: s1[i, j])
    _, squares, d = _moments(mk, lambda i, j: s1[i, j] / total[i], level=2)
    out = mk.out(4, lambda i, j: d(i, j) * te.rsqrt(squares[i] * const(1.0 / mk.n) + const(1e-5)))
    return mk.func(
        [out],
        "gemm_reduce",
        [
            (None, ["reduce_0"], []),
            ("stage_1", ["reduce_1"], []),
            (None, ["reduce_2"], []),
            (None, ["reduce_3"], []),
            (None, [], ["stage_4_out0"]),
        ],
    )


def _norm_of_softmax_reference(x, w):
    p = _softmax(x @ w)
    d = p - p.mean(-1, keepdims=True)
    return [d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)]


def min_max_scale(mk: Maker) -> tirx.PrimFunc:
    """(v - min v) / (max v - min v + 1): two reductions in one stage."""
    b = mk.col("b")
    s0 = mk.stage(0, lambda i, j: mk.gemm[i, j] + b[j].astype(F32))
    low = mk.reduce("reduce_0", REDUCERS["min"], lambda i, j: s0[i, j])
    high = mk.reduce("reduce_0_1", REDUCERS["max"], lambda i, j: s0[i, j])
    out = mk.out(1, lambda i, j: (s0[i, j] - low[i]) / (high[i] - low[i] + const(1.0)))
    return mk.func([out], "gemm_reduce", [("stage_0", ["reduce_0", "reduce_0_1"], []), (None, [], ["stage_1_out0"])])


def _min_max_reference(x, w, b):
    v = x @ w + b
    low, high = v.min(-1, keepdims=True), v.max(-1, keepdims=True)
    return [(v - low) / (high - low + 1.0)]


@dataclass(frozen=True)
class Example:
    """A canonical function and its float64 reference; the reference takes x [M, K], w [K, N], then the operands."""

    make: Callable[[Maker], tirx.PrimFunc]
    reference: Callable[..., list[Any]]

    def build(
        self, m: int | None = 100, n: int = 96, k: int = 72, dtype: str = "float16", layout: str = "NK"
    ) -> tirx.PrimFunc:
        return self.make(Maker(m, n, k, dtype, layout))


EXAMPLES = {
    "layer_norm": Example(layer_norm, _layer_norm_reference),
    "softmax_cap": Example(softmax_cap, lambda x, w: [_softmax(30 * np.tanh(x @ w / 30))]),
    "rms_residual": Example(rms_residual, _rms_reference),
    "bias_gelu": Example(bias_gelu, _gelu_reference),
    "gate_two_outputs": Example(gate_two_outputs, _gate_reference),
    "norm_of_softmax": Example(norm_of_softmax, _norm_of_softmax_reference),
    "min_max_scale": Example(min_max_scale, _min_max_reference),
}


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def inputs(func: tirx.PrimFunc, n_outputs: int, rows: int = 100, seed: int = 0) -> list[np.ndarray]:
    """Random arrays for the parameters before the outputs; weights are scaled so that products stay near 1."""
    rng = np.random.default_rng(seed)
    arrays = []
    for position, param in enumerate(list(func.params)[: len(func.params) - n_outputs]):
        shape = [int(e) if isinstance(e, tirx.IntImm) else rows for e in param.shape]
        scale = shape[-1] ** -0.5 if position == 1 else 1.0
        arrays.append((rng.standard_normal(shape) * scale).astype(numpy_dtype(str(param.dtype))))
    return arrays


def run_on_cpu(func: tirx.PrimFunc, arrays: list[np.ndarray], n_outputs: int) -> list[np.ndarray]:
    """Compiles for LLVM and returns the outputs."""
    rows = arrays[0].shape[0]
    executable = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")
    results = []
    for param in list(func.params)[len(func.params) - n_outputs :]:
        shape = [int(e) if isinstance(e, tirx.IntImm) else rows for e in param.shape]
        results.append(tvm.runtime.tensor(np.full(shape, np.nan, numpy_dtype(str(param.dtype)))))
    executable["main"](*[tvm.runtime.tensor(a) for a in arrays], *results)
    return [result.numpy() for result in results]


def references(example: Example, arrays: list[np.ndarray], layout: str) -> list[np.ndarray]:
    """The float64 results."""
    wide = [a.astype("float64") for a in arrays]
    if layout == "NK":
        wide[1] = wide[1].T
    return example.reference(*wide)
