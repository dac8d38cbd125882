"""Comparisons, logic and selection.  A bool value may live inside a cluster; it cannot be an output."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvm_comfuse.relay_patterns.rules import elementwise


@elementwise("relax.less", dtype="bool")
def less(x: Any, y: Any) -> Any:
    return x < y


@elementwise("relax.less_equal", dtype="bool")
def less_equal(x: Any, y: Any) -> Any:
    return x <= y


@elementwise("relax.greater", dtype="bool")
def greater(x: Any, y: Any) -> Any:
    return x > y


@elementwise("relax.greater_equal", dtype="bool")
def greater_equal(x: Any, y: Any) -> Any:
    return x >= y


@elementwise("relax.equal", dtype="bool")
def equal(x: Any, y: Any) -> Any:
    return tirx.EQ(x, y)


@elementwise("relax.not_equal", dtype="bool")
def not_equal(x: Any, y: Any) -> Any:
    return tirx.NE(x, y)


@elementwise("relax.logical_and", dtype="bool")
def logical_and(x: Any, y: Any) -> Any:
    return tirx.And(x, y)


@elementwise("relax.logical_or", dtype="bool")
def logical_or(x: Any, y: Any) -> Any:
    return tirx.Or(x, y)


@elementwise("relax.logical_not", dtype="bool")
def logical_not(x: Any) -> Any:
    # tirx.Not of a comparison is simplified to the opposite comparison, which is wrong for NaN
    return tirx.Select(x, tirx.const(False, "bool"), tirx.const(True, "bool"))


@elementwise("relax.isnan", dtype="bool")
def isnan(x: Any) -> Any:
    return tirx.isnan(x)


@elementwise("relax.where")
def where(condition: Any, x: Any, y: Any) -> Any:
    return tirx.Select(condition, x, y)
