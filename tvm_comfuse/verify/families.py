"""One small cluster of each family of kernels: layouts, exchange scopes, placements, with and without a reduction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvm_comfuse.schedules.plan import Plan

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

_BASE = Plan(64, 64, 64, 2, "cooperative", 2, 1, "cluster", 1, 2, 2, ("tma",), ("tma",))
_QUADS = replace(
    _BASE, tile_n=128, exchange="grid", cluster_n=1, w_order="quads", operands=("global",), store=("global",)
)
_DEFERRED = replace(_QUADS, defer=True)
_MEMORY = replace(_QUADS, layout="memory")
_PINGPONG = replace(_BASE, layout="pingpong", groups_m=1, exchange="grid", cluster_n=1)
_PINGPONG_QUADS = replace(
    _PINGPONG, tile_n=128, w_order="quads", w_resident=True, operands=("global",), store=("global",)
)


@dataclass(frozen=True)
class Family:
    """An operator of bench.ops with extents and a plan that exercise every role: the ring wraps, every warp group works
    twice or more.

    plan  of the fused form; None for the rows function of the split form, whose plan follows from its extents
    """

    name: str
    op: str
    m: int
    n: int
    k: int
    plan: Plan | None

    def cluster(self, target: Target) -> PrimFunc:
        """The scheduled function; for a target without kernels that of an H200, which runs on LLVM too.

        Raises PlanError if the plan is not legal for the target's device.
        """
        from tvm_comfuse.bench.ops import OPS
        from tvm_comfuse.forms import SPLIT
        from tvm_comfuse.frontend import from_relax
        from tvm_comfuse.fusion import fuse
        from tvm_comfuse.relay_patterns import discover
        from tvm_comfuse.schedules.rows import is_rows
        from tvm_comfuse.target import is_cuda, parse_target
        from tvm_comfuse.tir_passes.lower import is_cluster

        target = target if is_cuda(target) else parse_target("h200")
        module = from_relax(OPS[self.op].relax_module(self.m, self.n, self.k))
        if self.plan is None:
            split, _ = fuse(module, target, form=SPLIT)
            (func,) = (func for _, func in split.functions_items() if is_cluster(func) and is_rows(func))
            return func
        (matmul,) = discover(module).matmuls
        fused, _ = fuse(module, target, {matmul.name: self.plan})
        (func,) = (func for _, func in fused.functions_items() if is_cluster(func))
        return func


FAMILIES = (
    Family("cooperative_cluster", "layer_norm", 384, 128, 192, _BASE),
    Family("cooperative_grid", "layer_norm", 384, 128, 192, replace(_BASE, exchange="grid", cluster_n=1)),
    Family(
        "cooperative_multicast",
        "layer_norm",
        640,
        128,
        192,
        replace(_BASE, exchange="grid", cluster_m=2, cluster_n=1, ctas=4),
    ),
    Family(
        "cooperative_cta",
        "layer_norm",
        192,
        128,
        192,
        replace(_BASE, groups_m=1, groups_n=2, exchange="cta", cluster_n=1, ctas=1),
    ),
    Family("cooperative_warp", "layer_norm", 384, 64, 192, replace(_BASE, exchange="warp", cluster_n=1, ctas=1)),
    Family("quads_grid", "layer_norm", 384, 256, 192, _QUADS),
    Family("quads_multicast", "rms_norm", 640, 256, 192, replace(_QUADS, cluster_m=2, ctas=4)),
    Family("deferred_grid", "layer_norm", 384, 256, 576, _DEFERRED),
    Family("deferred_cluster", "layer_norm", 300, 256, 576, replace(_DEFERRED, exchange="cluster", cluster_n=2)),
    Family("deferred_rows", "layer_norm", 300, 248, 576, replace(_DEFERRED, w_order="rows")),
    # behind N its values are zeros, which add nothing to the sum of squares: a mask there changes nothing
    Family("deferred_rms", "rms_norm", 384, 224, 512, _DEFERRED),
    Family("deferred_softmax", "softcap_softmax", 384, 256, 576, replace(_DEFERRED, operands=())),
    Family("deferred_resident", "layer_norm", 384, 256, 576, replace(_DEFERRED, w_resident=True)),
    Family("pingpong_quads", "layer_norm", 320, 256, 192, _PINGPONG_QUADS),
    Family("pingpong_grid", "layer_norm", 320, 128, 192, _PINGPONG),
    Family("pingpong_cluster", "layer_norm", 320, 128, 192, replace(_PINGPONG, exchange="cluster", cluster_n=2)),
    Family("pingpong_multicast", "layer_norm", 640, 128, 192, replace(_PINGPONG, cluster_m=2, ctas=4)),
    Family(
        "cooperative_resident",
        "layer_norm",
        384,
        128,
        192,
        replace(_BASE, exchange="grid", cluster_n=1, w_resident=True),
    ),
    Family("pingpong_resident", "layer_norm", 300, 120, 136, replace(_PINGPONG, w_resident=True)),
    Family("pingpong_three", "layer_norm", 448, 128, 192, replace(_PINGPONG, mma_groups=3, w_resident=True)),
    Family("pingpong_three_quads", "layer_norm", 500, 256, 192, replace(_PINGPONG_QUADS, mma_groups=3)),
    Family(
        "pingpong_four",
        "layer_norm",
        556,
        120,
        136,
        replace(_PINGPONG, mma_groups=4, exchange="cluster", cluster_n=2, w_resident=True),
    ),
    Family("global_ragged", "layer_norm", 300, 120, 136, replace(_BASE, operands=("global",), store=("global",))),
    # the ring holds all of K, so operands come while the stages of the step before still run
    Family("staged_ragged", "layer_norm", 300, 120, 136, replace(_BASE, pipeline_depth=3, store=("global",))),
    Family(
        "dependent_ragged",
        "layer_norm",
        300,
        120,
        136,
        replace(_BASE, exchange="grid", cluster_n=1, operands=("global",), dependent_launch=True),
    ),
    Family("packed_grid", "layer_norm", 384, 256, 576, replace(_DEFERRED, packed_tail=True)),
    Family("packed_residual", "rms_norm", 300, 224, 512, replace(_DEFERRED, packed_tail=True)),
    Family("packed_tiles", "rms_norm", 300, 120, 136, replace(_BASE, packed_tail=True)),
    Family("packed_relu", "ln_relu", 300, 256, 136, replace(_QUADS, operands=(), packed_tail=True)),
    Family("softmax", "softcap_softmax", 384, 128, 192, replace(_BASE, operands=())),
    Family("softmax_fast", "softcap_softmax", 384, 128, 192, replace(_BASE, operands=(), fast_math=True)),
    Family("elementwise", "bias_gelu", 384, 128, 192, replace(_BASE, operands=(), exchange="none", cluster_n=1)),
    # three CTAs take turns at five columns of tiles, in bands of one, two and two; tiles of one and a half boxes
    Family("in_turn", "gated", 300, 320, 192, replace(_BASE, exchange="none", cluster_n=1, ctas=3, walk="tiles")),
    Family(
        "in_turn_multicast",
        "gated",
        640,
        480,
        192,
        replace(_QUADS, tile_n=96, exchange="none", cluster_m=2, ctas=6, walk="tiles"),
    ),
    Family("share_a_cluster", "layer_norm", 384, 128, 192, replace(_BASE, share_a=True)),
    # clusters of two by two, two of which share a row
    Family(
        "share_a_grid",
        "layer_norm",
        640,
        512,
        192,
        replace(_QUADS, cluster_m=2, cluster_n=2, ctas=8, share_a=True, packed_tail=True),
    ),
    # three CTAs take turns at four boxes of A
    Family(
        "share_a_pingpong",
        "layer_norm",
        320,
        168,
        136,
        replace(_PINGPONG, exchange="cluster", cluster_n=3, ctas=3, w_resident=True, share_a=True),
    ),
    Family("memory_grid", "layer_norm", 384, 256, 192, replace(_MEMORY, packed_tail=True)),
    Family("memory_deferred", "rms_norm", 300, 224, 192, replace(_MEMORY, defer=True, packed_tail=True)),
    Family("memory_multicast", "rms_norm", 640, 256, 192, replace(_MEMORY, cluster_m=2, ctas=4)),
    Family("memory_staged", "layer_norm", 300, 120, 136, replace(_BASE, layout="memory")),
    # a row in a warp, of which not all lanes have the last chunk, and a last CTA with a single row; a row in 16 warps
    Family("rows_ragged", "layer_norm", 1057, 1000, 64, None),
    Family("rows_softmax", "softcap_softmax", 77, 2312, 64, None),
)
