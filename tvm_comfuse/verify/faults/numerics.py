"""Faults of the arithmetic at the edges: masks behind N, guards behind M, parts of a row."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.verify.faults.changes import replace
from tvm_comfuse.verify.faults.registry import add
from tvm_comfuse.verify.rewrite import Stmt, call_of, map_exprs, name_of, rewrite


def _masks() -> None:
    add("mask-n-missing", "interpreter", "columns behind N count in a reduction", _without_masks(vectors=False))
    add("mask-vector-missing", "interpreter", "vectors are read behind N", _without_masks(vectors=True))
    add("guard-missing", "interpreter", "results are stored behind M and N", _without_guards)
    add("quad-missing", "interpreter", "partials of two of a row's four lanes are left out", _without_shuffle)
    add("part-weight", "interpreter", "a mean is weighted as if every part of a row had all its columns", _weights)


def _without_masks(vectors: bool) -> Any:
    """Of the elements of vectors on their way to shared memory, or of everything else."""

    def change(node: Any) -> Any:
        masked = isinstance(node, tvm.ir.Call) and str(node.op.name) == "prim.if_then_else"
        return node.args[1] if masked and isinstance(node.args[0], tirx.LT) and _is_column(node.args[0]) else None

    def inside(node: Stmt) -> bool:
        return isinstance(node, tirx.BufferStore) and (str(node.buffer.name) == "elements") == vectors

    return lambda kernel: map_exprs(kernel, change, inside)


def _is_column(condition: Any) -> bool:
    """A comparison with N: with a constant that is no count of parts (those are compared with a lane's number)."""
    return isinstance(condition.b, tirx.IntImm) and int(condition.b) > 32


def _without_guards(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def stores(node: Stmt) -> bool:
        if isinstance(node, tirx.BufferStore):
            return any(node.buffer.same_as(param) for param in kernel.params)
        return name_of(node) == "st" and "global" in [str(getattr(a, "value", "")) for a in call_of(node).args]

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if not isinstance(node, tirx.IfThenElse) or node.else_case is not None:
            return None
        body = list(node.then_case.seq) if isinstance(node.then_case, tirx.SeqStmt) else [node.then_case]
        return body if any(stores(statement) for statement in body) else None

    return rewrite(kernel, visit)


def _without_shuffle(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def last_of_pair(node: Stmt) -> bool:
        value = node.value if isinstance(node, tirx.BufferStore) else None
        call = getattr(value, "b", None)
        return (
            isinstance(call, tvm.ir.Call)
            and str(call.op.name) == "tirx.tvm_warp_shuffle_xor"
            and int(call.args[2]) == 2
        )

    return replace(last_of_pair, lambda node: [], 0)(kernel)


def _weights(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        # max(min(N - part * tile_n, tile_n), 0) -> tile_n, which is the same where tile_n divides N
        if isinstance(node, tirx.Max) and isinstance(node.a, tirx.Min) and isinstance(node.a.b, tirx.IntImm):
            left, tile = node.a.a, node.a.b
            return tile if isinstance(left, tirx.Sub) and int(left.a) % int(tile) else None
        return None

    return map_exprs(kernel, change, lambda node: isinstance(node, tirx.BufferStore))


_masks()
