"""Instructions that all threads of a warp, warp group, CTA or cluster must execute together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tvm

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP
from tvm_comfuse.verify.static.index import TAKE, Guard, Instruction, KernelIndex, Loop
from tvm_comfuse.verify.static.scene import Scene

_NAMES = {RANK: "CTA", WARP_GROUP: "warp group", WARP: "warp", LANE: "lane"}
_WARP: tuple[int, ...] = (LANE,)
_GROUP = (*_WARP, WARP)
_CTA = (*_GROUP, WARP_GROUP)
_CLUSTER = (*_CTA, RANK)
#: axes along which the execution of an instruction may not vary
TOGETHER: dict[str, tuple[int, ...]] = {
    "barrier_sync_count": _WARP,
    "barrier_arrive": _WARP,
    "warp_sync": _WARP,
    "tvm_warp_shuffle_xor": _WARP,
    "setmaxnreg": _GROUP,
    "cta_sync": _CTA,
    "barrier_cluster_arrive": _CLUSTER,
    "barrier_cluster_wait": _CLUSTER,
}
#: these bring the lanes of a warp together by themselves
GATHERING = ("warp_sync", "cta_sync", "tvm_warp_shuffle_xor")
#: gives every lane of a warp the same answer
VOTE = "comfuse_any"
BLOCKING = ("mbarrier_wait", TAKE)


def together(instruction: Instruction) -> tuple[int, ...]:
    """The axes along which an instruction's execution may not vary; () if it does not matter."""
    if instruction.name.startswith("wgmma_") and "aligned" in instruction.words:
        return _GROUP
    return TOGETHER.get(instruction.name, _WARP if "aligned" in instruction.words else ())


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Uniform conditions around each, and lanes that have come together again before it."""
    for instruction in index.instructions:
        axes = together(instruction)
        if axes:
            yield from _uniform(scene, instruction, axes)
    yield from _reconverged(index, scene)


def _uniform(scene: Scene, instruction: Instruction, axes: tuple[int, ...]) -> Iterator[Finding]:
    for level in instruction.nest:
        # of a loop, all must make the same number of iterations
        value = scene.trips(level) if isinstance(level, Loop) else scene.mask(level)
        if value is None and axes == _WARP and isinstance(level, Guard) and _is_vote(level.condition):
            continue  # a vote has the same outcome in all lanes of a warp
        if value is None:
            text = "it stands under a condition that depends on values of a thread"
            yield Finding("divergent-aligned", instruction.shown, text, {})
            return
        for axis in axes:
            if value.shape[axis] > 1 and (value != value.take([0], axis=axis)).any():
                counted = value.astype(np.int64).max(axis=tuple(a for a in range(value.ndim) if a != axis))
                text = (
                    f"all threads that an .aligned instruction names must execute it; a {_NAMES[axis]} alone decides a "
                    f"condition around it: {counted.tolist()[:8]} over {_NAMES[axis]}s 0, 1, ..."
                )
                yield Finding("divergent-aligned", instruction.shown, text, {"axis": _NAMES[axis]})
                return


def _is_vote(condition: Any) -> bool:
    return isinstance(condition, tvm.ir.Call) and any(
        getattr(argument, "value", None) == VOTE for argument in condition.args
    )


def _reconverged(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    for guard, nest, start, end in index.ifs:
        mask = scene.mask(guard)
        if mask is None or mask.shape[LANE] == 1 or (mask == mask.take([0], axis=LANE)).all():
            continue
        if not any(i.name.startswith(BLOCKING) for i in index.instructions if start <= i.order <= end):
            continue
        following = next(
            (i for i in index.instructions if i.order > end and together(i) and not _other_branch(i, nest)), None
        )
        if following is not None and following.name not in GATHERING:
            text = (
                "some lanes of a warp wait in a branch before it, and nothing brings the warp together again; "
                "an .aligned instruction needs a warp_sync in between"
            )
            yield Finding("no-reconvergence", following.shown, text, {})


def _other_branch(instruction: Instruction, nest: tuple[Guard | Loop, ...]) -> bool:
    """Whether an instruction stands in the other branch of a condition around."""
    for level in nest:
        if isinstance(level, Guard):
            for own in instruction.guards:
                if own.condition.same_as(level.condition) and own.holds != level.holds:
                    return True
    return False
