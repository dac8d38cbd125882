"""Index and guard expressions as arrays over the threads of a cluster and the iterations of loops.

Axis 0 is the CTA's rank in its cluster, 1 the warp group, 2 the warp in it, 3 the lane, 4 + d the loop of nesting depth d.
Every array has all axes, with extent 1 where the expression does not vary, so that arrays combine by broadcasting.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tvm
from tvm import tirx

Array = np.ndarray
#: deepest loop nest of a kernel that is checked
MAX_LOOPS = 6
THREAD_AXES = 4
RANK, WARP_GROUP, WARP, LANE = range(THREAD_AXES)
AXES = THREAD_AXES + MAX_LOOPS

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    # of non-negative numbers, which is all that index arithmetic divides
    tirx.Div: operator.floordiv,
    tirx.Mod: operator.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.BitwiseXor: operator.xor,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
}


class UnknownValueError(Exception):
    """An expression depends on something that is known only while the kernel runs."""


def along(axis: int, values: Array) -> Array:
    """A vector as an array that varies along one axis."""
    shape = [1] * AXES
    shape[axis] = len(values)
    return values.reshape(shape)


def constant(value: int) -> Array:
    """A number as an array that does not vary."""
    return np.full([1] * AXES, value, dtype=np.int64)


def evaluate(expr: Any, env: dict[Any, Array], cells: dict[Any, Array] | None = None) -> Array:
    """The value of an integer or boolean expression.

    env    arrays of variables
    cells  arrays of the mutable scalars that may be read
    Raises UnknownValueError for a load, call or variable that neither gives.
    """
    known = cells or {}

    def go(node: Any) -> Any:
        kind = type(node)
        if isinstance(node, tirx.IntImm):
            return np.int64(int(node.value))
        if isinstance(node, tirx.Var):
            if node in env:
                return env[node]
            raise UnknownValueError(str(node.name))
        if kind in _BINARY:
            return _BINARY[kind](go(node.a), go(node.b))
        if isinstance(node, tirx.Cast):
            return go(node.value)
        if isinstance(node, tirx.Not):
            return np.logical_not(go(node.a))
        if isinstance(node, tirx.Select):
            return np.where(go(node.condition), go(node.true_value), go(node.false_value))
        if isinstance(node, tvm.ir.TensorLoad) and node.source in known:
            return known[node.source]
        if isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") == "prim.if_then_else":
            return np.where(*map(go, node.args))
        raise UnknownValueError(kind.__name__)

    value = np.asarray(go(expr))
    return value if value.ndim == AXES else np.full([1] * AXES, value)


def total(factors: Iterable[Array], keep: tuple[int, ...], lengths: dict[int, int]) -> Array:
    """Sum of the product of `factors` over all axes but `keep`.

    lengths  extents of the axes to sum over that no factor may vary along
    Axes are summed out one by one, innermost first, so that conditions on different axes are never multiplied out.
    """
    pool = [np.asarray(factor, dtype=np.int64) for factor in factors] or [constant(1)]
    for axis in range(AXES - 1, -1, -1):
        if axis in keep:
            continue
        touching = [factor for factor in pool if factor.shape[axis] > 1]
        pool = [factor for factor in pool if factor.shape[axis] == 1]
        if touching:
            pool.append(_product(touching).sum(axis=axis, keepdims=True))
        elif lengths.get(axis, 1) != 1:
            pool.append(constant(lengths[axis]))
    return _product(pool)


def _product(factors: list[Array]) -> Array:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result
