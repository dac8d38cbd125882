"""Which expressions packed half-precision instructions can compute."""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from .normal_form import loads

#: significant bits of bfloat16, and the exponents (of math.frexp) that float16 has without being subnormal
SIGNIFICANT, EXPONENTS = 8, range(-13, 17)


def packable(value: Any, j: Any) -> bool:
    """Whether the value of column j is made of half-precision loads by additions, products and max(v, 0) only.

    What does not depend on the column is computed once a row, in float32, and may be anything.  Constants must be exact.
    """
    if isinstance(value, tirx.FloatImm):
        return _exact(float(value.value))
    if isinstance(value, tirx.Cast):
        return packable(value.value, j)
    if isinstance(value, tvm.ir.TensorLoad) or not _varies(value, j):
        return True
    if isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul)):
        return packable(value.a, j) and packable(value.b, j)
    positive = positive_part(value)
    return positive is not None and packable(positive, j)


def positive_part(value: Any) -> Any | None:
    """v of max(v, 0) in the form that keeps NaN, Select(v < 0, 0, v); None for every other expression."""
    if not isinstance(value, tirx.Select) or not isinstance(value.condition, tirx.LT):
        return None
    v, zero = value.false_value, value.true_value
    is_it = all(_is_zero(each) for each in (zero, value.condition.b)) and tvm_ffi.structural_equal(v, value.condition.a)
    return v if is_it else None


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.FloatImm) and float(value.value) == 0.0


def _varies(value: Any, j: Any) -> bool:
    return any(any(index.same_as(j) for index in load.indices) for load in loads(value))


def _exact(value: float) -> bool:
    """Whether bfloat16 and float16 have it."""
    if value == 0.0:
        return True
    fraction, exponent = math.frexp(value)
    return math.isfinite(value) and (fraction * 2**SIGNIFICANT).is_integer() and exponent in EXPONENTS
