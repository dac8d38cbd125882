"""Arithmetic operators.

Maximum and minimum give NaN when either input is NaN, as PyTorch does: when neither comparison holds, the sum of the
inputs is NaN.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvm_comfuse.relay_patterns.rules import elementwise


@elementwise("relax.broadcast_to")
def broadcast_to(x: Any) -> Any:
    return x


@elementwise("relax.add")
def add(x: Any, y: Any) -> Any:
    return x + y


@elementwise("relax.subtract")
def subtract(x: Any, y: Any) -> Any:
    return x - y


@elementwise("relax.multiply")
def multiply(x: Any, y: Any) -> Any:
    return x * y


@elementwise("relax.divide")
def divide(x: Any, y: Any) -> Any:
    return x / y


@elementwise("relax.ewise_fma")
def fused_multiply_add(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


@elementwise("relax.power")
def power(x: Any, y: Any) -> Any:
    return tirx.pow(x, y)


@elementwise("relax.maximum")
def maximum(x: Any, y: Any) -> Any:
    return tirx.Select(x >= y, x, tirx.Select(y >= x, y, x + y))


@elementwise("relax.minimum")
def minimum(x: Any, y: Any) -> Any:
    return tirx.Select(x <= y, x, tirx.Select(y <= x, y, x + y))


@elementwise("relax.clip")
def clip(x: Any, low: Any, high: Any) -> Any:
    return tirx.Select(x < low, low, tirx.Select(x > high, high, x))


@elementwise("relax.negative")
def negative(x: Any) -> Any:
    return x * tirx.const(-1.0, "float32")


@elementwise("relax.abs")
def absolute(x: Any) -> Any:
    return tirx.abs(x)


@elementwise("relax.square")
def square(x: Any) -> Any:
    return x * x


@elementwise("relax.sqrt")
def sqrt(x: Any) -> Any:
    return tirx.sqrt(x)


@elementwise("relax.rsqrt")
def rsqrt(x: Any) -> Any:
    return tirx.rsqrt(x)


@elementwise("relax.exp")
def exp(x: Any) -> Any:
    return tirx.exp(x)


@elementwise("relax.log")
def log(x: Any) -> Any:
    return tirx.log(x)


@elementwise("relax.erf")
def erf(x: Any) -> Any:
    return tirx.erf(x)


@elementwise("relax.tanh")
def tanh(x: Any) -> Any:
    return tirx.tanh(x)


@elementwise("relax.sigmoid")
def sigmoid(x: Any) -> Any:
    return tirx.const(1.0, "float32") / (tirx.const(1.0, "float32") + tirx.exp(tirx.const(0.0, "float32") - x))


@elementwise("relax.sin")
def sin(x: Any) -> Any:
    return tirx.sin(x)


@elementwise("relax.cos")
def cos(x: Any) -> Any:
    return tirx.cos(x)


@elementwise("relax.floor")
def floor(x: Any) -> Any:
    return tirx.floor(x)


@elementwise("relax.ceil")
def ceil(x: Any) -> Any:
    return tirx.ceil(x)


@elementwise("relax.trunc")
def trunc(x: Any) -> Any:
    return tirx.trunc(x)


@elementwise("relax.round")
def round_half_even(x: Any) -> Any:
    return tirx.nearbyint(x)
