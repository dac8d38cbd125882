"""How row values are reduced: the reducers of canonical functions, and how to know one again.

``tvm.te.max`` and ``min`` lose a NaN: a comparison with it is false, and the other operand stays.  PyTorch keeps it, and so
do the reducers here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import te, tirx

#: what no element at all reduces to
IDENTITY = {"sum": 0.0, "max": -math.inf, "min": math.inf}
_BETTER = {"max": tirx.GT, "min": tirx.LT}


def _reducer(op: str) -> Callable[..., Any]:
    def combine(best: Any, value: Any) -> Any:
        # a NaN of `best` stays; one of `value` wins, as no comparison with it is true
        stays = tirx.Or(tirx.isnan(best), _BETTER[op](best, value))
        return tirx.Select(stays, best, value)

    return te.comm_reducer(combine, lambda dtype: tirx.const(IDENTITY[op], dtype), name=f"row_{op}")  # type: ignore[no-any-return]


#: called with an expression and ``axis=``
REDUCERS: dict[str, Callable[..., Any]] = {"sum": te.sum, "max": _reducer("max"), "min": _reducer("min")}


def reduction_of(value: Any, is_total: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """(op, reduced expression) of what a reduction block stores, None for another reduction.

    is_total  whether an expression is a load of the cell that the block stores to
    """
    if isinstance(value, tirx.Add) and is_total(value.a):
        return "sum", value.b
    if not isinstance(value, tirx.Select) or not isinstance(value.condition, tirx.Or) or not is_total(value.true_value):
        return None
    test, better = value.condition.a, value.condition.b
    op = next((op for op, kind in _BETTER.items() if isinstance(better, kind)), None)
    same = getattr(getattr(test, "op", None), "name", "") == "tirx.isnan" and is_total(test.args[0])
    if op is None or not same or not is_total(better.a):
        return None
    return (op, value.false_value) if tvm_ffi.structural_equal(better.b, value.false_value) else None
