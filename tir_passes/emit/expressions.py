"""From a block's TIR expression to an expression over registers.

A stage's arithmetic is never written by hand: the expression of the scheduled function is walked, its iteration variables
are replaced, and each load is bound to where the kernel holds the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.tir_passes.emit.dsl import f32

Expr = Any
_NAMES = "Add Sub Mul Div Mod FloorDiv FloorMod Min Max EQ NE LT LE GT GE And Or"
BINARY = tuple(getattr(tirx, name) for name in _NAMES.split())


@dataclass(frozen=True)
class Binding:
    """What the parts of an expression become.

    variables  iteration variables
    load       a load
    of_row     whether a load is the same for a whole row
    function   (name, argument) gives what stands for a float32 function of one argument, None: the function itself
    hoist      an expression that is the same for a whole row; gives where its value is kept
    offset     of a load: the value of the same row that its register lacks, None if nothing
    """

    variables: dict[Any, Expr]
    load: Callable[[Any], Expr]
    of_row: Callable[[Any], bool] = lambda _: False
    function: Callable[[str, Expr], Expr | None] = lambda name, argument: None
    hoist: Callable[[Expr], Expr] = lambda value: value
    offset: Callable[[Any], Expr | None] = lambda _: None


def rebind(expr: Expr, binding: Binding) -> Expr:
    """Copy of `expr` with everything bound.

    What is done to a value with row values only, (x - mean) * rstd, becomes one fused multiplication and addition, x * s + t,
    with s and t hoisted: beside the tensor cores every instruction of an element counts.  Division by a row value becomes
    multiplication by its reciprocal (an IEEE division is a call, which also spills registers).

    Written out here because `tvm_ffi.structural_map` corrupts memory when its callbacks return new loads (TVM 0.27).
    Raises LoweringError for a node that stages do not have.
    """
    return Rebinder(expr, binding).go(expr)


@dataclass
class Affine:
    """base * scale + shift; scale and shift are the same for a whole row, None: 1 and 0.

    base is a node of the expression that is walked; scale and shift are bound already.
    """

    base: Expr
    scale: Expr | None = None
    shift: Any = None

    @property
    def plain_shift(self) -> Expr | None:
        """The shift as an expression."""
        return -self.shift.value if isinstance(self.shift, _Negative) else self.shift


class Rebinder:
    """Walks the expression `whole`."""

    def __init__(self, whole: Expr, binding: Binding):
        self.whole, self.binding = whole, binding

    def go(self, node: Expr) -> Expr:
        """A node and everything below it, bound."""
        if self.is_of_row(node):
            plain = self.plain(node)
            return plain if isinstance(node, tvm.ir.TensorLoad) else self.binding.hoist(plain)
        if isinstance(node, (tvm.ir.TensorLoad, tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)) and _is_float32(node):
            return self.combine(self.affine(node))
        return self.plain(node)

    def is_of_row(self, node: Expr) -> bool:
        """Whether a node reads row values and nothing else."""
        found = loads(node)
        return bool(found) and all(map(self.binding.of_row, found))

    def affine(self, node: Expr) -> Affine:
        """A node as what is done to another one with row values only."""
        if isinstance(node, tvm.ir.TensorLoad):
            return Affine(node, None, self.binding.offset(node))
        if isinstance(node, (tirx.Add, tirx.Sub)) and self.is_of_row(node.b):
            inner, amount = self.affine(node.a), self.plain(node.b)
            return Affine(inner.base, inner.scale, _sum(inner.shift, amount, isinstance(node, tirx.Sub)))
        if isinstance(node, tirx.Add) and self.is_of_row(node.a):
            inner, amount = self.affine(node.b), self.plain(node.a)
            return Affine(inner.base, inner.scale, _sum(inner.shift, amount, False))
        if isinstance(node, (tirx.Mul, tirx.Div)) and self.is_of_row(node.b):
            factor = self.plain(node.b)
            return _scaled(self.affine(node.a), f32(1.0) / factor if isinstance(node, tirx.Div) else factor)
        if isinstance(node, tirx.Mul) and self.is_of_row(node.a):
            return _scaled(self.affine(node.b), self.plain(node.a))
        return Affine(node)

    def combine(self, value: Affine) -> Expr:
        """The arithmetic of an affine value."""
        hoist, node = self.binding.hoist, value.base
        base = self.binding.load(node) if isinstance(node, tvm.ir.TensorLoad) else self.plain(node)
        if value.shift is None:
            return base if value.scale is None else base * hoist(value.scale)
        if value.scale is None:
            # a difference stays one: who subtracts the same hoisted value shares the instruction
            if isinstance(value.shift, _Negative):
                return base - hoist(value.shift.value)
            return base + hoist(value.shift)
        return base * hoist(value.scale) + hoist(value.plain_shift)

    def plain(self, node: Expr) -> Expr:
        """Node by node; only operands may be combined."""
        go = self.plain if self.is_of_row(node) else self.go
        if isinstance(node, tvm.ir.TensorLoad):
            value, offset = self.binding.load(node), self.binding.offset(node)
            return value if offset is None else value + offset
        if isinstance(node, tirx.Var):
            return self.binding.variables.get(node, node)
        if isinstance(node, tirx.FloatImm):
            # TVM folds the conversion of a constant to half precision
            return f32(float(node.value)) if str(node.ty) in ("float32", "bfloat16", "float16") else node
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
            arguments = [go(argument) for argument in node.args]
            other = None
            if len(arguments) == 1 and _is_float32(node):
                other = self.binding.function(node.op.name.removeprefix("tirx."), arguments[0])
            return tirx.call_intrin(str(node.ty), node.op, *arguments) if other is None else other
        if isinstance(node, BINARY):
            return type(node)(go(node.a), go(node.b))
        raise LoweringError(
            "an expression of arithmetic, comparisons, selects and calls",
            f"{type(node).__name__} in {self.whole}",
            "write the operator with those, or leave it out of the cluster",
        )


@dataclass(frozen=True)
class _Negative:
    """Minus a value, as long as nothing else is done to it."""

    value: Expr


def _sum(shift: Any, amount: Expr, negative: bool) -> Any:
    if shift is None:
        return _Negative(amount) if negative else amount
    shift = -shift.value if isinstance(shift, _Negative) else shift
    return shift - amount if negative else shift + amount


def _scaled(value: Affine, factor: Expr) -> Affine:
    shift = value.shift
    if isinstance(shift, _Negative):
        shift = _Negative(shift.value * factor)
    elif shift is not None:
        shift = shift * factor
    return Affine(value.base, factor if value.scale is None else value.scale * factor, shift)


def _is_float32(node: Expr) -> bool:
    return str(node.ty.dtype if hasattr(node.ty, "dtype") else node.ty) == "float32"


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
