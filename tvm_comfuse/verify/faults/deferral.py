"""Faults of the forms that spread work over time: tails beside the next main loop, operands asked for early, rows of W in
another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.verify.faults.changes import argument, number
from tvm_comfuse.verify.faults.memory import box_columns, encodes, first_stride, rank_of
from tvm_comfuse.verify.faults.registry import Apply, add
from tvm_comfuse.verify.rewrite import Stmt, contains, map_expr, map_exprs, name_of, rewrite
from tvm_comfuse.verify.static.index import TAKE, variables

#: rank of the map of a W whose rows are put in another order
QUAD_RANK = 5


def _tails() -> None:
    add(
        "parked-offset-missing",
        "interpreter",
        "what waits for a deferred tail is taken without the offset that parking subtracted",
        _without_offset,
    )
    add(
        "half-box-missing",
        "interpreter",
        "half a box of a deferred tail is left out",
        _of_tail(lambda parts: {parts[-1]: -1}),
    )
    add(
        "half-box-twice",
        "interpreter",
        "half a box of a deferred tail runs twice, in place of the one behind it",
        _of_tail(lambda parts: {parts[-1]: parts[-2]}),
    )
    add(
        "tail-before-row-values",
        "interpreter",
        "a deferred tail begins before the partials of its row are taken",
        _tail_first,
    )


def _without_offset(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        taken = isinstance(node, tvm.ir.TensorLoad) and str(node.source.name) == "offsets"
        return tirx.FloatImm("float32", 0.0) if taken else None

    return map_exprs(
        kernel, change, lambda node: isinstance(node, tirx.BufferStore) and str(node.buffer.name).startswith("of_row")
    )


def _parts_beside(kernel: tirx.PrimFunc) -> list[Stmt]:
    """The branches of the deferred work beside a main loop, by slot."""
    found: list[Stmt] = []

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if isinstance(node, tirx.IfThenElse) and isinstance(node.condition, tirx.EQ) and around:
            loops = [outer for outer in around if isinstance(outer, tirx.For)]
            slot = node.condition.a
            if len(loops) > 1 and slot.same_as(loops[-1].loop_var) and _is_unrolled(loops[-1]):
                found.append(node)
        return None

    rewrite(kernel, visit)
    return [node for node in found if contains(node, _takes) or contains(node, _unparks)]


def _is_unrolled(loop: tirx.For) -> bool:
    return int(loop.kind) == int(tirx.ForKind.UNROLLED)


def _takes(node: Stmt) -> bool:
    return name_of(node).startswith(TAKE)


def _unparks(node: Stmt) -> bool:
    return isinstance(node, tirx.BufferStore) and "parked" in [str(v.name) for v in variables(node.value)]


def _of_tail(change: Callable[[list[Stmt]], dict[Any, Any]]) -> Apply:
    """change(branches of the tail) -> by branch the one that takes its place, or -1 for none."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        parts = [part for part in _parts_beside(kernel) if not contains(part, _takes)]
        if len(parts) < 2:
            return None
        ((old, new),) = change(parts).items()

        def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
            if not node.same_as(old):
                return None
            return [] if new == -1 else [tirx.IfThenElse(old.condition, new.then_case, None)]

        return rewrite(kernel, visit)

    return apply


def _tail_first(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    parts = _parts_beside(kernel)
    at = next((n for n, part in enumerate(parts) if contains(part, _takes)), None)
    if at is None or at + 1 >= len(parts):
        return None
    takes, first = parts[at], parts[at + 1]

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        for old, new in ((takes, first), (first, takes)):
            if node.same_as(old):
                return [tirx.IfThenElse(new.condition, old.then_case, None)]
        return None

    return rewrite(kernel, visit)


def _operands() -> None:
    add(
        "early-operand-step",
        "interpreter",
        "an operand that is asked for beside the last products is that of the step before",
        _operand_of(False, lambda use: tirx.Max(use - 1, tirx.IntImm("int32", 0))),
    )
    add(
        "ahead-operand-step",
        "interpreter",
        "an operand of a deferred tail is that of the step whose main loop runs",
        _operand_of(True, lambda use: use + 1),
    )


def _operand_of(deferred: bool, change: Callable[[Any], Any]) -> Apply:
    """With change(number of the step) in the addresses of operands that are read in the main loop's steps."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
            steps = [outer for outer in around if isinstance(outer, tirx.For) and str(outer.loop_var.name) == "use"]
            beside = any(
                isinstance(outer, tirx.IfThenElse) and steps and _names(outer.condition, steps[0]) for outer in around
            )
            if not isinstance(node, tirx.Bind) or not steps or beside != deferred or not _reads_operand(node.value):
                return None
            use = steps[0].loop_var
            return [tirx.Bind(node.var, map_expr(node.value, lambda e: change(use) if use.same_as(e) else None))]

        return rewrite(kernel, visit)

    return apply


def _names(condition: Any, steps: tirx.For) -> bool:
    return any(variable.same_as(steps.loop_var) for variable in variables(condition))


def _reads_operand(value: Any) -> bool:
    """Whether an address is that of an [M, N] operand; those of results go by the names of their blocks."""
    return isinstance(value, tvm.ir.Call) and any(str(v.name).startswith("tile_") for v in variables(value))


def _quads() -> None:
    def of_quads(position: Callable[[Stmt], int], change: Callable[[int], int]) -> Apply:
        return argument(lambda node: encodes("w_map")(node) and rank_of(node) == QUAD_RANK, position, number(change))

    add(
        "quad-stride",
        "static",
        "rows of W are taken twice and others not at all",
        of_quads(lambda node: first_stride(node) + 1, lambda stride: stride // 2),
    )
    add(
        "quad-part",
        "static",
        "boxes of a W in another order lack half of the rows",
        of_quads(lambda node: box_columns(node) + 2, lambda count: count // 2),
    )
    add("quad-strides-swapped", "interpreter", "rows of W are put in an order that the stages do not know", _swapped)


def _swapped(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The strides of two inner parts of a row number, of the same extent: each row still comes once."""
    strides: list[Any] = []

    def read(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if encodes("w_map")(node) and rank_of(node) == QUAD_RANK:
            at = first_stride(node)
            strides.extend(node.value.args[at + 1 : at + 3])
        return None

    rewrite(kernel, read)
    if not strides:
        return None
    one = argument(encodes("w_map"), lambda node: first_stride(node) + 1, lambda old: strides[1])(kernel)
    assert one is not None
    return argument(encodes("w_map"), lambda node: first_stride(node) + 2, lambda old: strides[0])(one)


for _make in (_tails, _operands, _quads):
    _make()
