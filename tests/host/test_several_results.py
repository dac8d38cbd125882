"""Kernels with several results through one staging tile: no warp group waits for a result of its own while the store warp waits
for another group's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import relax
from verified_kernels import assert_right

from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster

M, N, K = 300, 256, 128
TMA = ("tma", "tma", "tma")
BASE = Plan(64, 64, 64, 2, "cooperative", 1, 2, "grid", 1, 1, 4, (), TMA)
PLANS = {
    "grid": BASE,
    "cluster": replace(BASE, exchange="cluster", cluster_n=2),
    "cta": replace(BASE, tile_n=128, exchange="cta", ctas=2),
    "groups_of_rows": replace(BASE, groups_m=2, groups_n=1),
    "memory": replace(BASE, layout="memory", groups_m=2, groups_n=1),
    "memory_cluster": replace(BASE, layout="memory", groups_m=2, groups_n=1, exchange="cluster", cluster_n=4),
    "pingpong": replace(BASE, layout="pingpong", groups_n=1),
}


def model() -> tvm.IRModule:
    """Two results [M, N] that no row value is needed for, and one behind the mean of the rows."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(name, relax.TensorType(shape, "bfloat16"))
        for name, shape in (("x", (M, K)), ("w", (N, K)), ("a", (N,)), ("b", (N,)))
    ]
    x, w, a, b = params
    op, emit = relax.op, builder.emit
    with builder.function("main", params):
        with builder.dataflow():
            product = emit(op.matmul(x, emit(op.permute_dims(w))))
            shifted = emit(op.add(product, a))
            mean = emit(op.mean(shifted, -1, keepdims=True))
            results = (op.exp(product), op.add(shifted, b), op.subtract(shifted, mean))
            out = [builder.emit_output(result) for result in results]
        builder.emit_func_output(relax.Tuple(out))
    return builder.get()


def function(plan: Plan) -> Any:
    module, target = from_relax(model()), parse_target("h200")
    _, explanation = fuse(module, target, form="fused")
    fused, _ = fuse(module, target, {explanation.matmuls[0].name: plan})
    (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
    return func


@pytest.mark.parametrize("slow", [None, "wg1", "wg2", "wg0.w1"])
@pytest.mark.parametrize("name", PLANS)
def test_nobody_waits_for_ever(name: str, slow: str | None) -> None:
    func = function(PLANS[name])
    assert_right(func, M, 3, slow)
