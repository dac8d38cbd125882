"""Random chains of elementwise operators and row reductions: one cluster, one live tile value, right numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import s_tir, tirx
from tvm.relax import op

from tests.host.relax_models import PATTERNS, Model, build, inputs, run_module, symbolic
from tests.host.relax_reference import evaluate
from tvm_comfuse.relay_patterns import canonicalize, discover, fuse_clusters

F32 = "float32"


@dataclass(frozen=True)
class Step:
    """One operator: what it does, which earlier value it uses again, which operand it reads."""

    name: str
    back: int
    operand: str


UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": op.nn.relu,
    "tanh": op.tanh,
    "silu": op.nn.silu,
    "gelu": op.nn.gelu,
    "square": lambda v: op.square(op.tanh(v)),
    "softmax": lambda v: op.nn.softmax(v, axis=-1),
}
ROWS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda v: op.mean(v, -1, keepdims=True),
    "max": lambda v: op.max(v, -1, keepdims=True),
    "std": lambda v: op.std(v, -1, keepdims=True),
    "sum": lambda v: op.sum(op.tanh(v), -1, keepdims=True),
}
NAMES = [*UNARY, *ROWS, "operand", "earlier", "layer_norm", "rms_norm"]
steps = st.builds(Step, st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(["col", "row", "tile", "scalar"]))


def operand_of(m: Model, kind: str, number: int) -> Any:
    if kind == "scalar":
        return m.const(0.5, F32)
    return getattr(m, kind)(f"p{number}", F32)


def emit_step(m: Model, tiles: list[Any], number: int, step: Step) -> None:
    value = tiles[-1]
    if step.name in UNARY:
        result = m.emit(UNARY[step.name](value))
    elif step.name in ROWS:
        row = m.emit(ROWS[step.name](value))
        result = m.emit(op.subtract(value, m.emit(op.tanh(row))))
    elif step.name == "operand":
        other = operand_of(m, step.operand, number)
        result = m.emit(op.multiply(value, other) if step.back % 2 else op.add(value, other))
    elif step.name == "earlier":
        result = m.emit(op.add(value, m.emit(op.tanh(tiles[-1 - min(step.back, len(tiles) - 1)]))))
    elif step.name == "layer_norm":
        result = m.emit(
            op.nn.layer_norm(value, m.col(f"g{number}", F32), m.col(f"b{number}", F32), axes=[-1], epsilon=1.0)
        )
    else:
        result = m.emit(op.nn.rms_norm(value, m.col(f"g{number}", F32), axes=[-1], epsilon=1.0))
    tiles.append(result)


def check_one_live_tile(func: tirx.PrimFunc) -> None:
    """Every block reads the latest carried tile value at most, and row values of earlier stages only."""
    stages = json.loads(str(func.attrs["comfuse.stages"]))
    sch = s_tir.Schedule(func)
    carried, rows = "gemm", set()
    assert len(stages) == 1 + max([entry["stage"] + 1 for entry in stages if entry["reductions"]], default=0)
    for entry in stages:
        blocks = [entry["carried"]] if entry["carried"] else []
        blocks += entry["outputs"] + entry["reductions"]
        for name in blocks:
            read = intermediate_reads(sch.get(sch.get_sblock(name)))
            assert read <= {carried} | rows, name
            if name == entry["carried"]:
                carried = name
        rows |= set(entry["reductions"])


def intermediate_reads(block: Any) -> set[str]:
    """Names of the intermediate buffers that a block loads."""
    names = {str(region.source.name) for region in block.reads}
    return {name for name in names if name.startswith(("gemm", "stage_", "reduce_"))}


@pytest.mark.parametrize("name", list(PATTERNS))
def test_patterns_keep_one_live_tile(name: str) -> None:
    (cluster,) = discover(build(PATTERNS[name], "float16", symbolic())).clusters
    check_one_live_tile(canonicalize(cluster).func)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=1, max_size=7), st.integers(0, 7), st.sampled_from(["float16", "bfloat16"]))
def test_random_chains(chain: list[Step], extra: int, dtype: str) -> None:
    def body(m: Model) -> Any:
        tiles = [m.matmul(out_dtype=F32)]
        for number, step in enumerate(chain):
            emit_step(m, tiles, number, step)
        early = tiles[extra % len(tiles)]
        return tiles[-1] if early is tiles[-1] else [early, tiles[-1]]

    mod = build(body, dtype, symbolic())
    fused, reports = fuse_clusters(mod)
    (report,) = reports["main"].matmuls
    assert report.cluster is not None
    # a chain that recomputes itself too often is cut in two; nothing else may stop it
    assert {refusal.code for refusal in report.refusals} <= {"expression-size", "not-convex"}
    check_one_live_tile(canonicalize(report.cluster).func)
    values = inputs(mod, seed=len(chain))
    for got, want in zip(run_module(fused, values), evaluate(mod["main"], *values), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
