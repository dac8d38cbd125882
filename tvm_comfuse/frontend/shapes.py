"""Comparing and grouping the extents of shapes that may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax


def shape_of(expr: relax.Expr) -> list[Any] | None:
    """The extents of a tensor (integers as IntImm, symbolic ones as expressions); None if the shape is not known."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return list(ty.shape.values)


def axes_of(axes: Sequence[Any] | None, rank: int) -> list[int]:
    """The axes of a permute_dims as non-negative integers; None means that all are reversed."""
    if axes is None:
        return list(reversed(range(rank)))
    return [int(axis) % rank for axis in axes]


def same_extent(a: Any, b: Any) -> bool:
    """Are two extents equal for every value of their variables?"""
    if a is None or b is None:
        return False
    if isinstance(a, (int, tvm.tirx.IntImm)) and isinstance(b, (int, tvm.tirx.IntImm)):
        return int(a) == int(b)
    return tvm.sym.Analyzer().can_prove_equal(_expr(a), _expr(b))


def same_shape(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    """Have two shapes the same rank and equal extents?"""
    return a is not None and b is not None and len(a) == len(b) and all(map(same_extent, a, b))


def split_groups(old: Sequence[Any], new: Sequence[Any]) -> list[list[int]] | None:
    """For each axis of ``old`` the axes of ``new`` whose product it is, if ``new`` is ``old`` with axes split.

    ``[S, B*H, D] -> [S, B, H, D]`` gives ``[[0], [1, 2], [3]]``.  A group takes as few axes as give the extent, the
    last one the axes that remain; None if ``new`` is not a split.
    """
    groups: list[list[int]] = []
    position = 0
    for extent in old:
        group: list[int] = []
        product: Any = 1
        while not (group and same_extent(product, extent)):
            if position == len(new):
                return None
            product = _times(product, new[position])
            group.append(position)
            position += 1
        groups.append(group)
    while position < len(new):  # units at the end
        if not groups or not same_extent(new[position], 1):
            return None
        groups[-1].append(position)
        position += 1
    return groups


def merge_groups(old: Sequence[Any], new: Sequence[Any]) -> list[list[int]] | None:
    """For each axis of ``new`` the axes of ``old`` that it merges; None if ``new`` is not ``old`` with axes merged."""
    return split_groups(new, old)


def _times(a: Any, b: Any) -> Any:
    return b if isinstance(a, int) and a == 1 else _expr(a) * _expr(b)


def _expr(extent: Any) -> Any:
    return tvm.tirx.const(extent, "int64") if isinstance(extent, int) else extent
