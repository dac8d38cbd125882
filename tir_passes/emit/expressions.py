"""From a block's TIR expression to an expression over registers.

A stage's arithmetic is never written by hand: the expression of the scheduled function is walked, its iteration variables
are replaced, and each load is bound to where the kernel holds the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.tir_passes.emit.dsl import f32

Expr = Any
_NAMES = "Add Sub Mul Div Mod FloorDiv FloorMod Min Max EQ NE LT LE GT GE And Or"
BINARY = tuple(getattr(tirx, name) for name in _NAMES.split())


def rebind(
    expr: Expr,
    variables: dict[Any, Expr],
    load: Callable[[Any], Expr],
    of_row: Callable[[Any], bool] = lambda _: False,
    function: Callable[[str, Expr], Expr | None] = lambda name, argument: None,
) -> Expr:
    """Copy of `expr`: iteration variables become their `variables`, each load becomes `load(it)`.

    of_row(load) tells whether a load is the same for a whole row.  Division by such a value becomes multiplication by its
    reciprocal, one division a row instead of one an element (an IEEE division is a call, which also spills registers).
    function(name, argument) gives what stands for a float32 function of one argument, None: the function itself.

    Written out here because `tvm_ffi.structural_map` corrupts memory when its callbacks return new loads (TVM 0.27).
    Raises LoweringError for a node that stages do not have.
    """

    def go(node: Expr) -> Expr:
        if isinstance(node, tvm.ir.TensorLoad):
            return load(node)
        if isinstance(node, tirx.Var):
            return variables.get(node, node)
        if isinstance(node, tirx.FloatImm):
            return f32(float(node.value)) if str(node.ty) == "float32" else node
        if isinstance(node, tirx.IntImm):
            return node
        if isinstance(node, tirx.Cast):
            value = go(node.value)
            return value if str(value.ty) == str(node.ty) else tirx.Cast(str(node.ty), value)
        if isinstance(node, tirx.Select):
            return tirx.Select(go(node.condition), go(node.true_value), go(node.false_value))
        if isinstance(node, tirx.Not):
            return tirx.Not(go(node.a))
        if isinstance(node, tvm.ir.Call):
            if len(node.args) == 1 and str(node.ty) == "float32":
                other = function(node.op.name.removeprefix("tirx."), go(node.args[0]))
                if other is not None:
                    return other
            return tirx.call_intrin(str(node.ty), node.op, *[go(argument) for argument in node.args])
        if (
            isinstance(node, tirx.Div)
            and str(node.ty) == "float32"
            and loads(node.b)
            and all(map(of_row, loads(node.b)))
        ):
            return go(node.a) * (f32(1.0) / go(node.b))
        if isinstance(node, BINARY):
            return type(node)(go(node.a), go(node.b))
        raise LoweringError(
            "an expression of arithmetic, comparisons, selects and calls",
            f"{type(node).__name__} in {expr}",
            "write the operator with those, or leave it out of the cluster",
        )

    return go(expr)


def loads(expr: Expr) -> list[Any]:
    """Every load in an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, lambda node: found.append(node))])
    return found


def read_buffers(exprs: Iterable[Expr]) -> list[Any]:
    """The buffers that some expressions load from, each once, in order of appearance."""
    found: list[Any] = []
    for expr in exprs:
        for node in loads(expr):
            if not any(node.source.same_as(buffer) for buffer in found):
                found.append(node.source)
    return found


def without_cast(expr: Expr) -> Expr:
    """The float32 value under an output's conversion."""
    return expr.value if isinstance(expr, tirx.Cast) else expr
