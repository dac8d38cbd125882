"""Blocks of a canonical function in one normal form, and small questions about their expressions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.row_reducers import reduction_of

#: how the two reductions of a mergeable pair reduce
MERGE_OPS = {"moments": ("sum", "sum"), "softmax": ("max", "sum")}
#: cost of exp, tanh, sqrt, division and the like in simple operations (a few multifunction-unit steps and fix-ups)
TRANSCENDENTAL = 6
#: functions that a plan's fast_math makes cheaper
APPROXIMABLE = ("tirx.exp", "tirx.tanh")

_NAME = re.compile(r"(?P<gemm>gemm)|stage_(?P<stage>\d+)(_out(?P<out>\d+))?|reduce_(?P<level>\d+)(_(?P<nth>\d+))?")


@dataclass(frozen=True)
class Block:
    """A block as ``store.buffer[store.indices] = value``, or for a reduction ``op=`` instead of ``=``.

    level   stage number; None for gemm
    output  output number of an output block, else None
    nth     place among the reductions of the stage, else None
    i, j    iteration variables over rows and over columns (None for a row output of one axis)
    """

    name: str
    level: int | None
    output: int | None
    nth: int | None
    node: Any
    i: Any
    j: Any
    store: Any
    op: str | None
    value: Any


def normal_form(name: str, node: Any) -> Block:
    """Splits a block into its store and, for a reduction, the reduced expression.

    Raises LoweringError for a name, body or axes that no canonical block has.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise not_canonical("blocks named gemm, stage_<i>, stage_<i>_out<k>, reduce_<i>, reduce_<i>_<k>", name)
    store = node.body
    if not isinstance(store, tirx.BufferStore):
        raise not_canonical("one store in each block", f"{type(store).__name__} in {name}")
    spatial = [it.var for it in node.iter_vars if int(it.iter_type) == tirx.IterVar.DataPar]
    reduced = [it.var for it in node.iter_vars if int(it.iter_type) == tirx.IterVar.CommReduce]
    op, value = None, store.value
    if node.init is not None:
        found = reduction_of(value, lambda expr: is_load(expr, store.buffer, store.indices))
        if found is None:
            raise not_canonical("reductions by sum, max or min of row_reducers, which keep NaN", f"{name}: {value}")
        op, value = found
    columns = spatial[1:] or (reduced if name != "gemm" else [])
    if not spatial or len(columns) > 1 or (node.init is None) != (not reduced):
        raise not_canonical("rows, and columns or one reduced axis, in each block", f"{len(node.iter_vars)} in {name}")
    level, output, nth = (None if text is None else int(text) for text in _numbers(match))
    return Block(name, level, output, nth, node, spatial[0], columns[0] if columns else None, store, op, value)


def _numbers(match: re.Match[str]) -> tuple[str | None, str | None, str | None]:
    level = match["level"]
    return match["stage"] or level, match["out"], (match["nth"] or "0") if level is not None else None


def check_pair(merge: str, first: Block, second: Block, n: int) -> None:
    """The algebra that makes one exchange of a pair right.

    moments: first = sum v, second = sum d*d with d = v - first[i] * (1 / n).
    softmax: first = max v, second = sum exp(v - first[i]).
    Raises LoweringError if the second reduction is anything else.
    """
    if (first.op, second.op) != MERGE_OPS[merge]:
        raise not_canonical(f"{merge} to be {MERGE_OPS[merge]}", f"{first.op}, {second.op}")
    body: Any = second.value
    if merge == "moments":
        good = isinstance(body, tirx.Mul) and tvm_ffi.structural_equal(body.a, body.b)
        distance = body.a if good else None
    else:
        good = isinstance(body, tvm.ir.Call) and getattr(body.op, "name", "") == "tirx.exp"
        distance = body.args[0] if good else None
    if not isinstance(distance, tirx.Sub):
        raise not_canonical(f"{merge} written as (v - a)*(v - a) or exp(v - a)", f"{second.name}: {body}")
    row = _times_reciprocal(distance.b, n) if merge == "moments" else distance.b
    env = {first.i: second.i, first.j: second.j}
    value = tvm_ffi.structural_map(first.value, [(tirx.Var, lambda var: env.get(var, var))])
    if not is_load(row, first.store.buffer, (second.i,)) or not tvm_ffi.structural_equal(value, distance.a):
        raise not_canonical(f"{second.name} to reduce the same value as {first.name}", f"{second.name}: {body}")


def _times_reciprocal(mean: Any, n: int) -> Any:
    """The total in ``total * (1 / n)``; None for every other expression."""
    if not isinstance(mean, tirx.Mul):
        return None
    total, factor = (mean.a, mean.b) if isinstance(mean.b, tirx.FloatImm) else (mean.b, mean.a)
    is_reciprocal = isinstance(factor, tirx.FloatImm) and math.isclose(float(factor.value), 1.0 / n, rel_tol=1e-6)
    return total if is_reciprocal else None


def loads(expr: Any) -> list[Any]:
    """Every load in an expression, in evaluation order."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, lambda load: found.append(load))])
    return found


def operations(expr: Any, j: Any) -> int:
    """Scalar operations that must be done for every column.

    Equal subexpressions count once, loads, constants and casts are free, and what does not depend on the column j is
    done once a row and not counted.
    """
    seen: list[Any] = []

    def visit(node: Any) -> tuple[int, bool]:
        if isinstance(node, tvm.ir.TensorLoad):
            return 0, j is not None and any(index.same_as(j) for index in node.indices)
        children = [visit(child) for child in _children(node)]
        depends = any(varies for _, varies in children)
        # Compared, not hashed: structural_hash was seen to change for one and the same object within a process.
        if not depends or any(tvm_ffi.structural_equal(node, other) for other in seen):
            return 0, depends
        seen.append(node)
        return sum(count for count, _ in children) + _weight(node), True

    return visit(expr)[0]


def approximable(expr: Any) -> bool:
    """Whether an expression has a function of APPROXIMABLE."""
    if isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") in APPROXIMABLE:
        return True
    return any(approximable(child) for child in _children(expr))


def _children(node: Any) -> list[Any]:
    if isinstance(node, tvm.ir.Call):
        return list(node.args)
    names = ("value", "a", "b", "condition", "true_value", "false_value")
    children = [getattr(node, name, None) for name in names]
    return [child for child in children if isinstance(child, tvm.ir.Expr)]


def _weight(node: Any) -> int:
    if isinstance(node, tirx.Cast):
        return 0
    return TRANSCENDENTAL if isinstance(node, (tvm.ir.Call, tirx.Div)) else 1


def is_load(expr: Any, buffer: Any, indices: Any) -> bool:
    """Whether expr is buffer[indices]."""
    return isinstance(expr, tvm.ir.TensorLoad) and expr.source.same_as(buffer) and same_indices(expr.indices, indices)


def same_indices(left: Any, right: Any) -> bool:
    """Whether two index lists hold the same variables; a None on the right equals nothing."""
    return len(left) == len(right) and all(b is not None and a.same_as(b) for a, b in zip(left, right, strict=True))


def is_one(extent: Any) -> bool:
    """Whether an extent is the constant 1."""
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def not_canonical(clause: str, found: str) -> LoweringError:
    """The error for a function that breaks a clause of the canonical form."""
    return LoweringError(clause, found, "build the function with relay_patterns, which makes the canonical form")
