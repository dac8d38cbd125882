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
from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store
from tvm_comfuse.tir_passes.emit.exchange import QUAD, Exchange
from tvm_comfuse.tir_passes.emit.stages import COMBINE, Stages

Expr = Any


def reduce_local(kernel: Any, stages: Stages, members: list[Any], first_actions: list[Any], number: Expr) -> None:
    """The passes of one round over this part of the row; then its partials are on their way.

    first_actions join the first pass.  `number` counts the exchanges of the launch.
    """
    stages.sweep([first_actions + begin(kernel, stages, firsts(members))])
    finish(kernel, stages, firsts(members))
    if seconds(members):
        stages.sweep([begin(kernel, stages, seconds(members))])
        finish(kernel, stages, seconds(members))
    post_partials(kernel, stages, members, number)


def firsts(members: list[Any]) -> list[Any]:
    """The reductions of a round that need no row value of it."""
    return [member for member in members if member.merge is None]


def seconds(members: list[Any]) -> list[Any]:
    """The reductions of a round that need what its first ones gave for this part of the row."""
    return [member for member in members if member.merge is not None]


def begin(kernel: Any, stages: Stages, members: list[Any]) -> list[Any]:
    """Clears the row values; gives the actions of a pass that reduces a thread's elements."""
    for member in members:
        for row in range(stages.fragment.rows):
            store(stages.rows.of(member.block), f32(IDENTITY[member.op]), row)
    return accumulating(kernel, stages, members)


def accumulating(kernel: Any, stages: Stages, members: list[Any]) -> list[Any]:
    """The actions alone, for a pass in several parts."""
    return [stages.accumulate(kernel.blocks[m.block], m.op, stages.rows.of(m.block)) for m in members]


def finish(kernel: Any, stages: Stages, members: list[Any]) -> None:
    """From a thread's elements to the quad's, after the pass."""
    for member in members:
        for row in range(kernel.fragment.rows):
            stages.across_quad(member.op, stages.rows.of(member.block), row)
    for block in [member.block for member in members if kernel.merge_of(member.block) == "moments"]:
        _localise_mean(kernel, stages.rows.of(block))


def post_partials(kernel: Any, stages: Stages, members: list[Any], number: Expr) -> None:
    """Sends what this part of the row has."""
    if kernel.plan.exchange != "warp":
        Exchange(kernel).post(number, _partials(stages, members))


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
