"""Small kernels for the interpreter's tests: one for each kind of plan, all known to be right on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from canonical_examples import EXAMPLES, inputs, references
from tvm import tirx

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.interpreter import Program, Result

BASE = Plan(64, 128, 64, 3, "cooperative", 2, 1, "grid", 1, 1, 4, ("tma",), ("tma",))
PINGPONG = replace(BASE, layout="pingpong", groups_m=1)
#: plan and N of each kind
KINDS: dict[str, tuple[Plan, int]] = {
    "cooperative_grid": (BASE, 512),
    "cooperative_multicast": (replace(BASE, cluster_m=2, ctas=8), 512),
    "cooperative_cta": (replace(BASE, groups_m=1, groups_n=2, exchange="cta", ctas=2), 256),
    "cooperative_cluster": (replace(BASE, tile_n=256, exchange="cluster", cluster_n=2), 512),
    "cooperative_cluster_multicast": (replace(BASE, exchange="cluster", cluster_n=2, cluster_m=2), 256),
    "cooperative_ragged": (BASE, 392),
    "cooperative_cluster_share": (replace(BASE, exchange="cluster", cluster_n=4, share_a=True), 512),
    "cooperative_grid_share": (replace(BASE, cluster_m=2, cluster_n=2, ctas=8, share_a=True), 512),
    "pingpong_share": (replace(PINGPONG, exchange="cluster", cluster_n=3, ctas=6, share_a=True), 384),
    "pingpong_resident_share": (replace(PINGPONG, cluster_n=2, w_resident=True, share_a=True), 512),
    "pingpong_grid": (PINGPONG, 512),
    "pingpong_multicast": (replace(PINGPONG, cluster_m=2, ctas=8), 512),
    "pingpong_tall": (replace(PINGPONG, tile_m=128), 512),
    "pingpong_warp": (replace(PINGPONG, exchange="warp", ctas=2), 128),
    "pingpong_narrow": (replace(PINGPONG, tile_n=64, ctas=5), 320),
    "pingpong_cluster": (replace(PINGPONG, exchange="cluster", cluster_n=4), 512),
    "pingpong_ragged": (replace(PINGPONG, ctas=5), 520),
    "cooperative_resident": (replace(BASE, w_resident=True), 512),
    "cooperative_resident_cta": (
        replace(BASE, tile_n=64, groups_m=1, groups_n=2, exchange="cta", ctas=2, w_resident=True),
        128,
    ),
    "pingpong_resident": (replace(PINGPONG, pipeline_depth=2, w_resident=True), 512),
    "pingpong_resident_ragged": (replace(PINGPONG, exchange="cluster", cluster_n=5, ctas=5, w_resident=True), 520),
    "pingpong_three": (replace(PINGPONG, mma_groups=3, w_resident=True), 512),
    "pingpong_three_multicast": (replace(PINGPONG, mma_groups=3, cluster_m=2, ctas=8), 512),
    "pingpong_four_ragged": (
        replace(PINGPONG, mma_groups=4, pipeline_depth=2, exchange="cluster", cluster_n=5, ctas=5),
        520,
    ),
    "global_placement": (replace(BASE, operands=("global",), store=("global",)), 512),
}
#: placements of the [M, N] operands and outputs of each example, and how many outputs it has
PLACEMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "layer_norm": (("tma",), ("tma",), 1),
    "softmax_cap": ((), ("tma",), 1),
    "rms_residual": (("tma",), ("tma",), 1),
    "bias_gelu": ((), ("tma",), 1),
    "gate_two_outputs": (("global",), ("tma", "global"), 3),
    "norm_of_softmax": ((), ("tma",), 1),
    "min_max_scale": ((), ("tma",), 1),
}
#: the error of float32 arithmetic next to the rounding of a half-precision output, and that of a float32 output
ROUNDINGS, FLOAT32_ERROR = 1.01, 1e-6


@dataclass(frozen=True)
class Case:
    """A kernel with inputs and float64 references of its outputs, in the order of the parameters."""

    kernel: tirx.PrimFunc
    program: Program
    arrays: list[np.ndarray]
    references: list[np.ndarray]


def case(
    example: str,
    kind: str,
    m: int = 300,
    k: int = 136,
    dtype: str = "bfloat16",
    layout: str = "NK",
    symbolic: bool = False,
) -> Case:
    """An example lowered with a kind of plan.  The program is compiled anew each time: tests may break it."""
    plan, n = KINDS[kind]
    operands, stores, outputs = PLACEMENTS[example]
    if kind != "global_placement":
        plan = replace(plan, operands=operands, store=stores)
    if example == "bias_gelu":
        plan = replace(plan, exchange="none", cluster_n=1)
    return built(example, plan, n, m, k, dtype, layout, symbolic, outputs)


@lru_cache(maxsize=64)
def _lowered(example: str, plan: Plan, rows: int | None, n: int, k: int, dtype: str, layout: str) -> Any:
    func = schedule(EXAMPLES[example].build(rows, n, k, dtype, layout), H200, plan)
    assert not isinstance(func, Refusal), str(func)
    return func, lower(func, "kernel")


def built(
    example: str, plan: Plan, n: int, m: int, k: int, dtype: str, layout: str, symbolic: bool, outputs: int
) -> Case:
    """An example lowered with a plan."""
    func, kernel = _lowered(example, plan, None if symbolic else m, n, k, dtype, layout)
    arrays = inputs(func, outputs, m)
    return Case(kernel, Program(kernel), arrays, references(EXAMPLES[example], arrays, layout))


def check_numbers(result: Result, expected: list[np.ndarray]) -> None:
    """Every output is as near to float64 as its own dtype allows."""
    for (name, output), reference in zip(result.outputs.items(), expected, strict=True):
        exact = reference.reshape(output.shape)
        error = np.linalg.norm(output.astype("float64") - exact) / np.linalg.norm(exact)
        rounding = np.linalg.norm(exact.astype(output.dtype).astype("float64") - exact) / np.linalg.norm(exact)
        limit = FLOAT32_ERROR if output.dtype == np.float32 else ROUNDINGS * rounding
        assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"
