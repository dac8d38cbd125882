"""Shapes: comparing dimensions that may be symbolic, and how a value lies against the M x N result.

All leading dimensions count as rows in row-major order, so a value that keeps its last dimension and the number of its
elements keeps its rows, whatever its rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

from tvm import sym, tirx

#: a dimension: int when static, otherwise a TensorIR expression
Dim = Any
FLOATS = ("float16", "bfloat16", "float32")
HALVES = ("float16", "bfloat16")


def dims_of(expr: Any) -> tuple[Dim, ...] | None:
    """Dimensions of a Relax expression, or None when its shape is not known."""
    ty = getattr(expr, "ty", None)
    shape = getattr(ty, "shape", None)
    values = getattr(shape, "values", None)
    if values is None:
        return None
    return tuple(int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in values)


def dtype_of(expr: Any) -> str:
    """Element type of a Relax expression; empty when it has none."""
    dtype = getattr(getattr(expr, "ty", None), "dtype", None)
    return "" if dtype is None else str(getattr(dtype, "dtype", dtype))


def same(left: Dim, right: Dim) -> bool:
    """Whether two dimensions are provably equal."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(sym.Analyzer().can_prove_equal(left, right))


def product(dims: Sequence[Dim]) -> Dim:
    """Product of dimensions; 1 for none."""
    return reduce(lambda total, dim: total * dim, dims, 1)


def padded(shape: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """`shape` with ones in front up to `rank` dimensions, as broadcasting does."""
    return (1,) * (rank - len(shape)) + tuple(shape)


def equal(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Whether two shapes are the same after ones are put in front of the shorter."""
    rank = max(len(left), len(right))
    return all(same(a, b) for a, b in zip(padded(left, rank), padded(right, rank), strict=True))


def is_tile(shape: Sequence[Dim], rows: Dim, columns: int) -> bool:
    """Whether a value of this shape is [M, N] with the rows flattened."""
    return bool(shape) and same(shape[-1], columns) and same(product(shape[:-1]), rows)


def is_row(shape: Sequence[Dim], rows: Dim) -> bool:
    """Whether a value of this shape has one element per row."""
    return same(product(shape), rows)


def placed(shape: Sequence[Dim], against: Sequence[Dim], against_class: str) -> str | None:
    """Shape class with which a value of `shape` broadcasts against a tile or row value of shape `against`.

    None when it repeats in some other way, for example over a part of the rows.
    """
    if all(same(dim, 1) for dim in shape):
        return "scalar"
    if len(shape) > len(against):
        return None
    full = padded(shape, len(against))
    if against_class == "row":
        return "row" if equal(full, against) else None
    if len(shape) == len(against) > 1 and equal(shape, against):
        return "tile"  # with one row a tile looks like a column vector, but needs no view to be read
    if all(same(dim, 1) for dim in full[:-1]) and same(full[-1], against[-1]):
        return "col"
    if not all(same(a, b) for a, b in zip(full[:-1], against[:-1], strict=True)):
        return None
    if same(full[-1], 1):
        return "row"
    return "tile" if same(full[-1], against[-1]) else None


def plain(dims: Sequence[Dim]) -> list[int | str]:
    """Dimensions for a report: ints, and symbolic ones as text."""
    return [dim if isinstance(dim, int) else re.sub(r"T\.int(?:32|64)\((-?\d+)\)", r"\1", str(dim)) for dim in dims]
