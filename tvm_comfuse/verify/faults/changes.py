"""The few kinds of change that most faults are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvm_comfuse.verify.faults.registry import Apply
from tvm_comfuse.verify.rewrite import Stmt, call_of, rewrite, with_argument

Match = Callable[[Stmt], bool]
Value = Callable[[Any], Any]


def remove(match: Match, which: int | None = None) -> Apply:
    """Without the statements that match, or without one of them (in program order)."""
    return replace(match, lambda node: [], which)


def replace(match: Match, change: Callable[[Stmt], list[Stmt]], which: int | None = None) -> Apply:
    """With others in the place of the statements that match, or of one of them; which counts from 0."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        seen = 0

        def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
            nonlocal seen
            if not match(node):
                return None
            seen += 1
            return change(node) if which in (None, seen - 1) else [node]

        copy = rewrite(kernel, visit)
        return copy if seen and (which is None or seen > which) else None

    return apply


def argument(match: Match, position: int | Callable[[Stmt], int], value: Value, which: int | None = None) -> Apply:
    """With another operand, at a position or where position(statement) says: value(old) -> new."""

    def change(node: Stmt) -> list[Stmt]:
        at = position if isinstance(position, int) else position(node)
        return [with_argument(node, at, value(call_of(node).args[at]))]

    return replace(match, change, which)


def number(change: Callable[[int], int]) -> Value:
    """A constant changed."""
    return lambda old: tirx.IntImm(str(old.ty), change(int(old)))


def moved(match: Match, behind: Match) -> Apply:
    """With the first statement that matches moved behind another one of the same sequence."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
            if not isinstance(node, tirx.SeqStmt):
                return None
            children = list(node.seq)
            start = next((n for n, child in enumerate(children) if match(child)), None)
            if start is None:
                return None
            end = next((n for n in range(start + 1, len(children)) if behind(children[n])), None)
            if end is None:
                return None
            order = [*children[:start], *children[start + 1 : end + 1], children[start], *children[end + 1 :]]
            return [tirx.SeqStmt(order)]

        return rewrite(kernel, visit)

    return apply
