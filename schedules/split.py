"""Where a step can be cut in two: before and behind the last exchange of row values.

The head ends with the partials of the last round on their way.  The tail begins when the row values are there; it holds no
reduction, so each element goes its own way.
"""

from __future__ import annotations

from .spec import ClusterSpec, Output, Reduction, Stage, rounds


def last_round(spec: ClusterSpec) -> int:
    """Position in ``spec.stages`` of the stage that the last round belongs to; -1 without reductions."""
    groups = rounds(spec)
    if not groups:
        return -1
    return next(at for at, stage in enumerate(spec.stages) if groups[-1][0] in stage.reductions)


def parking_offset(spec: ClusterSpec) -> Reduction | None:
    """The reduction near whose partial results a parked carried value lies.

    It is the first of the last round's pair, if that reduces the carried value itself.
    """
    groups = rounds(spec)
    pairs = [member.merge_with for member in groups[-1] if member.merge is not None] if groups else []
    if not pairs:
        return None
    return next((each for each in groups[-1] if each.block == pairs[0] and each.of_carried), None)


def tail_stages(spec: ClusterSpec) -> tuple[tuple[Output, ...], tuple[Stage, ...]]:
    """The late outputs of the stage of the last round, and the stages behind it."""
    cut = last_round(spec)
    late = tuple(output for output in spec.stages[cut].outputs if output.late) if cut >= 0 else ()
    return late, spec.stages[cut + 1 :]


def tail_blocks(spec: ClusterSpec) -> frozenset[str]:
    """Blocks that run in the tail."""
    late, stages = tail_stages(spec)
    carried = [stage.carried for stage in stages if stage.carried]
    outputs = [output.block for stage in stages for output in stage.outputs]
    return frozenset([*carried, *outputs, *(output.block for output in late)])


def head_blocks(spec: ClusterSpec) -> frozenset[str]:
    """Blocks that run in the head, also those of reductions of later stages that its last round takes along."""
    every = [block for blocks in spec.passes for block in blocks]
    return frozenset(every) - tail_blocks(spec)
