"""Row reductions: over a thread's elements, the quad, and the parts of the row.

A round is a set of reductions whose partials travel in one exchange.  A pair of dependent reductions is one round too:
  moments   each part sends its mean and centred sum of squares; they merge by Chan's formula
            (Chan, Golub, LeVeque, 1979): M2 = sum over parts of M2_p + n_p (mean_p - mean)^2
  softmax   each part sends its maximum and its sum of exponentials below that; s = sum of s_p exp(max_p - max)
"""

from __future__ import annotations

import math
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.row_reducers import IDENTITY
from tvm_comfuse.schedules.split import parking_offset
from tvm_comfuse.schedules.tails import in_one_pass
from tvm_comfuse.tir_passes.emit import moments
from tvm_comfuse.tir_passes.emit.actions import COMBINE
from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store, when
from tvm_comfuse.tir_passes.emit.exchange import QUAD, Exchange
from tvm_comfuse.tir_passes.emit.instructions import pin
from tvm_comfuse.tir_passes.emit.stages import Near, Stages

Expr = Any
#: the largest finite float32
LARGEST = 3.4028234663852886e38


def reduce_local(
    kernel: Any, stages: Stages, members: list[Any], first_actions: list[Any], number: Expr, parked: Any = None
) -> None:
    """The passes of one round over this part of the row; then its partials are on their way.

    first_actions join the first pass.  `number` counts the exchanges of the launch.  The last pass parks the carried value, if
    it is to wait.
    """
    firsts = [member for member in members if member.merge is None]
    seconds = [member for member in members if member.merge is not None]
    if in_one_pass(kernel.plan) and seconds and all(member.merge == "moments" for member in seconds):
        _in_one_pass(kernel, stages, firsts, seconds, first_actions, number, parked)
    else:
        actions = first_actions + _begin(kernel, stages, firsts)
        if not seconds:
            actions += _park_whole(stages, parked)
        kernel.stamps.begin_round("first pass", number)
        stages.sweep([actions])
        _finish(kernel, stages, firsts)
        kernel.stamps.end_round("first pass", number)
        if seconds:
            _second_pass(kernel, stages, seconds, number, parked)
    if kernel.plan.exchange != "warp":
        Exchange(kernel).post(number, _partials(stages, members))


def _in_one_pass(
    kernel: Any,
    stages: Stages,
    firsts: list[Any],
    seconds: list[Any],
    first_actions: list[Any],
    number: Expr,
    parked: Any,
) -> None:
    """Sums, and sums of squares about zero; the second pass where these would lose digits (see moments.py)."""
    actions = first_actions + _begin(kernel, stages, firsts)
    for member in seconds:
        _clear(stages, member)
        cells, value = stages.rows.of(member.block), kernel.blocks[member.merge_with]
        actions.append(stages.accumulate(value, member.op, cells, squared=True))
    kernel.stamps.begin_round("first pass", number)
    stages.sweep([actions + _park_whole(stages, parked)])
    _finish(kernel, stages, firsts)
    _finish(kernel, stages, seconds)
    far = registers([1], "int32", "far")
    store(far, T.int32(0), 0)
    for member in seconds:
        totals, squares = stages.rows.of(member.merge_with), stages.rows.of(member.block)
        moments.centre(kernel, totals, squares, _columns_of(kernel, kernel.row_part), far)
    kernel.stamps.end_round("first pass", number)
    with when(moments.raised(far)):
        _second_pass(kernel, stages, seconds, number, parked)


def _second_pass(kernel: Any, stages: Stages, seconds: list[Any], number: Expr, parked: Any) -> None:
    """The second reductions of pairs, about the first ones' results; the carried value is parked about these, too, if they are
    near it."""
    actions = []
    if parked is not None and parking_offset(kernel.spec) is None:
        actions += _park_whole(stages, parked)
    elif parked is not None:
        stages.near = _near(kernel, stages, seconds[0], parked)
        actions.append(stages.park(parked))
    kernel.stamps.begin_round("second pass", number)
    stages.sweep([_begin(kernel, stages, seconds) + actions])
    _finish(kernel, stages, seconds)
    kernel.stamps.end_round("second pass", number)
    if stages.near is not None:
        _restore_nan(kernel, stages, seconds[0], stages.near)
    stages.near = None


def _park_whole(stages: Stages, parked: Any) -> list[Any]:
    """Parks the carried value without an offset."""
    if parked is None:
        return []
    for row in range(stages.fragment.rows):
        store(parked.offsets, f32(0.0), row)
    return [stages.park(parked)]


def _clear(stages: Stages, member: Any) -> None:
    for row in range(stages.fragment.rows):
        store(stages.rows.of(member.block), f32(IDENTITY[member.op]), row)


def _begin(kernel: Any, stages: Stages, members: list[Any]) -> list[Any]:
    """Clears the row values; gives the actions of a pass that reduces a thread's elements."""
    for member in members:
        _clear(stages, member)
    return [stages.accumulate(kernel.blocks[m.block], m.op, stages.rows.of(m.block)) for m in members]


def _finish(kernel: Any, stages: Stages, members: list[Any]) -> None:
    """From a thread's elements to the quad's, after the pass."""
    for member in members:
        for row in range(kernel.fragment.rows):
            stages.across_quad(member.op, stages.rows.of(member.block), row)
    for block in [member.block for member in members if kernel.merge_of(member.block) == "moments"]:
        _localise_mean(kernel, stages.rows.of(block))


def _near(kernel: Any, stages: Stages, second: Any, parked: Any) -> Near:
    """The part's mean or maximum, which the second reduction subtracts.

    0 where it is infinite or NaN: then the row value becomes neither finite by it, and a difference would lose what the parked
    element is.
    """
    first = stages.rows.of(second.merge_with)
    for row in range(stages.fragment.rows):
        value = first[row] * f32(1.0 / kernel.spec.n) if second.merge == "moments" else first[row]
        store(parked.offsets, T.if_then_else(T.abs(value) <= f32(LARGEST), value, f32(0.0)), row)
        pin(parked.offsets[row])
    return Near(second.merge, second.merge_with, parked.offsets)


def _restore_nan(kernel: Any, stages: Stages, second: Any, near: Near) -> None:
    """A sum of exponentials is NaN if the maximum is infinite; with 0 in the maximum's place it is not.

    Where partials are merged that happens there.
    """
    if near.merge != "softmax" or kernel.plan.exchange != "warp":
        return
    first, cells = stages.rows.of(near.first), stages.rows.of(second.block)
    for row in range(stages.fragment.rows):
        store(cells, T.if_then_else(T.abs(first[row]) <= f32(LARGEST), cells[row], f32(math.nan)), row)


def reduce_across(kernel: Any, stages: Stages, members: list[Any], number: Expr) -> None:
    """Takes the partials of a round and merges them, the same way in every lane and CTA; then stages.rows has every
    member's row value."""
    if kernel.plan.exchange == "warp":
        return
    taken = Exchange(kernel).take(len(members), number)
    position = {member.block: index for index, member in enumerate(members)}
    for row in range(kernel.fragment.rows):
        for member in members:
            if member.merge is None:
                _merge_plain(kernel, stages, member, taken, position[member.block], row)
        for member in members:
            if member.merge is not None:
                _merge_second(kernel, stages, member, taken, position, row)


def _partials(stages: Stages, members: list[Any]) -> Any:
    """Registers [values, rows]: what this part sends."""
    partial = registers([len(members), stages.fragment.rows], "float32", "partial")
    for index, member in enumerate(members):
        for row in range(stages.fragment.rows):
            store(partial, stages.rows.of(member.block)[row], index, row)
    return partial


def _columns_of(kernel: Any, part: Expr) -> Expr:
    """Columns of a part of the row that lie before N, as float32."""
    if not kernel.geometry.ragged_n:
        return f32(float(kernel.plan.tile_n))
    left = T.max(T.min(kernel.spec.n - part * kernel.plan.tile_n, kernel.plan.tile_n), 0)
    return T.cast(left, "float32")


def _localise_mean(kernel: Any, total: Any) -> None:
    """Scales a part's sum so that `total / N`, as the expressions have it, is the mean of the part."""
    if kernel.plan.exchange == "warp":
        return
    if not kernel.geometry.ragged_n:
        scale = f32(kernel.spec.n / kernel.plan.tile_n)
    else:
        scale = f32(float(kernel.spec.n)) / T.max(_columns_of(kernel, kernel.row_part), f32(1.0))
    for row in range(kernel.fragment.rows):
        store(total, total[row] * scale, row)


def _parts_of(kernel: Any) -> list[tuple[int, Expr]]:
    """(turn, part) of what this lane of the quad took."""
    turns = -(-kernel.geometry.row_parts // QUAD)
    return [(turn, kernel.fragment.quad_lane + turn * QUAD) for turn in range(turns)]


def _merge_plain(kernel: Any, stages: Stages, member: Any, taken: Any, index: int, row: int) -> None:
    """Row value = combination over the parts; a mean of means is weighted by columns."""
    paired = kernel.merge_of(member.block)
    cells = stages.rows.of(member.block)
    store(cells, f32(IDENTITY[member.op]), row)
    for turn, part in _parts_of(kernel):
        value = taken[index, row, turn]
        if paired == "moments":
            value = value * (_columns_of(kernel, part) * f32(1.0 / kernel.spec.n))
        inside = part < kernel.geometry.row_parts
        store(cells, COMBINE[member.op](cells[row], T.if_then_else(inside, value, f32(IDENTITY[member.op]))), row)
    stages.across_quad(member.op, cells, row)


def _merge_second(kernel: Any, stages: Stages, member: Any, taken: Any, position: dict[str, int], row: int) -> None:
    """The second of a pair: each part's value corrected for what the first became."""
    first = stages.rows.of(member.merge_with)[row]
    cells = stages.rows.of(member.block)
    store(cells, f32(0.0), row)
    for turn, part in _parts_of(kernel):
        of_first = taken[position[member.merge_with], row, turn]
        of_second = taken[position[member.block], row, turn]
        if member.merge == "moments":
            distance = (of_first - first) * f32(1.0 / kernel.spec.n)
            value = of_second + _columns_of(kernel, part) * (distance * distance)
        else:
            # a part whose elements are all -inf adds nothing; its own sum is exp(-inf + inf), a NaN
            value = T.if_then_else(of_first == f32(-math.inf), f32(0.0), of_second * T.exp(of_first - first))
        store(cells, cells[row] + T.if_then_else(part < kernel.geometry.row_parts, value, f32(0.0)), row)
    stages.across_quad("sum", cells, row)
