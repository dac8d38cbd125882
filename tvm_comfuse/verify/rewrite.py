"""Rewriting of TIRx statements and expressions, as plain recursions.

Nodes that do not change are used again.  Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.verify.static.index import TENSOR_LOAD, accessed

Stmt = Any
Expr = Any
#: (statement, the statements around it from the outermost) -> statements in its place, None to look inside
Change = Callable[[Stmt, tuple[Stmt, ...]], "list[Stmt] | None"]
#: ScopeIdDef.scope -> (parent, own scope), as its constructor wants them
_SCOPES = {0: ("kernel", "cluster"), 1: ("kernel", "cta"), 3: ("cta", "warpgroup")}
_BRANCHES = ("then_case", "else_case")


def rewrite(kernel: tirx.PrimFunc, change: Change) -> tirx.PrimFunc | None:
    """A copy of the kernel in which `change` has replaced statements; None if it replaced none."""
    changed = False

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt]:
        nonlocal changed
        replaced = change(node, around)
        if replaced is not None:
            changed = True
            return replaced
        inside = (*around, node)
        if isinstance(node, tirx.SeqStmt):
            return [one([new for child in node.seq for new in visit(child, inside)])]
        if isinstance(node, tirx.AttrStmt):
            return [tirx.AttrStmt(node.node, node.attr_key, node.value, one(visit(node.body, inside)))]
        if isinstance(node, tirx.For):
            return [with_body(node, one(visit(node.body, inside)))]
        if isinstance(node, tirx.IfThenElse):
            then, other = (getattr(node, name) for name in _BRANCHES)
            new_other = one(visit(other, inside)) if other is not None else None
            return [tirx.IfThenElse(node.condition, one(visit(then, inside)), new_other)]
        return [node]

    body = one(visit(kernel.body, ()))
    return tirx.PrimFunc(kernel.params, body, kernel.ret_type, kernel.attrs) if changed else None


def one(statements: list[Stmt]) -> Stmt:
    """Some statements as one."""
    if not statements:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def with_body(loop: tirx.For, body: Stmt, kind: Any = None) -> tirx.For:
    """A loop with another body, or of another kind."""
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind if kind is None else kind, body, None, loop.annotations
    )


def map_expr(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """A copy of an expression in which change(node) takes the place of each node that it does not give None for."""

    def go(node: Expr) -> Expr:
        replaced = change(node)
        if replaced is not None:
            return replaced
        if isinstance(node, tvm.ir.TensorLoad):
            return tirx.BufferLoad(node.source, [go(index) for index in node.indices])
        if isinstance(node, tvm.ir.Call):
            return with_args(node, [go(argument) for argument in node.args])
        if isinstance(node, tirx.Cast):
            return tirx.Cast(str(node.ty), go(node.value))
        if isinstance(node, tirx.Select):
            return tirx.Select(go(node.condition), go(node.true_value), go(node.false_value))
        if isinstance(node, tirx.Not):
            return tirx.Not(go(node.a))
        if hasattr(node, "a") and hasattr(node, "b"):
            return type(node)(go(node.a), go(node.b))
        return node

    return go(expr)


def map_exprs(kernel: tirx.PrimFunc, change: Callable[[Expr], Expr | None], inside: Callable[[Stmt], bool]) -> Any:
    """A copy of the kernel in which the expressions of the leaf statements for which inside(statement) is changed."""
    changed = False

    def counting(node: Expr) -> Expr | None:
        nonlocal changed
        replaced = change(node)
        changed = changed or replaced is not None
        return replaced

    def leaf(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if isinstance(node, tirx.Evaluate) and inside(node):
            return [tirx.Evaluate(map_expr(node.value, counting))]
        if isinstance(node, tirx.BufferStore) and inside(node):
            return [tirx.BufferStore(node.buffer, map_expr(node.value, counting), list(node.indices))]
        return None

    copy = rewrite(kernel, leaf)
    return copy if changed else None


def with_args(call: Any, args: list[Expr]) -> Any:
    """A call with other operands."""
    return tvm.ir.Call(call.op, args, call.attrs, call.ty_args, None, call.ty)


def call_of(node: Stmt) -> Any:
    """The call that a statement is, or None."""
    value = getattr(node, "value", None) if isinstance(node, tirx.Evaluate) else None
    return value if isinstance(value, tvm.ir.Call) else None


def name_of(node: Stmt) -> str:
    """The instruction's name as in static.index; "" for a statement that is none."""
    call = call_of(node)
    if call is None:
        return ""
    name = str(call.op.name).removeprefix("tirx.ptx.").removeprefix("tirx.cuda.").removeprefix("tirx.")
    return str(call.args[0].value) if name == "func_call" else name


#: position of the barrier among all arguments of a call
_BARRIER = {
    "mbarrier_init": 0,
    "mbarrier_arrive": 0,
    "mbarrier_arrive_expect_tx": 0,
    "mbarrier_wait": 0,
    "comfuse_arrive_at": 1,
}


def barrier_of(node: Stmt) -> str:
    """Name of the barrier array an instruction works on; "" if none."""
    position = load_barrier(node) if name_of(node) == TENSOR_LOAD else _BARRIER.get(name_of(node))
    return "" if position is None else str(accessed(call_of(node).args[position])[0].name)


def load_barrier(node: Stmt) -> int:
    """Position of the barrier among the arguments of a load by TMA; the mask of a multicast stands behind it."""
    ranks = {"2d": 2, "5d": 5}
    return 2 + next(ranks[word] for a in call_of(node).args if (word := str(getattr(a, "value", ""))) in ranks)


def is_on(node: Stmt, barrier: str, *names: str) -> bool:
    """Whether a statement is one of some instructions, on some barrier array."""
    return name_of(node) in names and barrier_of(node) == barrier


def with_argument(node: Stmt, position: int, argument: Expr) -> Stmt:
    """An instruction with one other operand."""
    call = call_of(node)
    args = list(call.args)
    args[position] = argument
    return tirx.Evaluate(with_args(call, args))


def contains(node: Stmt, wanted: Callable[[Stmt], bool]) -> bool:
    """Whether some statement inside (or the statement itself) is wanted."""
    if wanted(node):
        return True
    children = (
        list(node.seq)
        if isinstance(node, tirx.SeqStmt)
        else [child for name in ("body", *_BRANCHES) if (child := getattr(node, name, None)) is not None]
    )
    return any(contains(child, wanted) for child in children if isinstance(child, tirx.Stmt))


def with_extent(kernel: tirx.PrimFunc, scope: str, extent: int) -> tirx.PrimFunc:
    """A kernel with another number of CTAs, clusters or warp groups; scope is the name of the variable.

    Raises ValueError if the kernel has no such variable.
    """

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if type(node).__name__ != "ScopeIdDefStmt":
            return None
        old = getattr(node, "def")
        if str(old.def_ids[0].name) != scope:
            return None
        parent, own = _SCOPES[int(old.scope)]
        extents = [tirx.IntImm("int32", extent)]
        return [type(node)(type(old)(list(old.def_ids), extents, parent, own, old.preferred_extents))]

    copy = rewrite(kernel, visit)
    if copy is None:
        raise ValueError(f"the kernel has no {scope}")
    return copy
