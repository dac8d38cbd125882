"""Activations, each as one float32 expression that keeps NaN."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from tvm_comfuse.relay_patterns.ops_arithmetic import sigmoid
from tvm_comfuse.relay_patterns.rules import elementwise

#: the constants of the self-normalising unit: alpha and the scale
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def f32(value: float) -> Any:
    """A float32 constant."""
    return tirx.const(value, "float32")


@elementwise("relax.nn.relu")
def relu(x: Any) -> Any:
    return tirx.Select(x < f32(0), f32(0), x)


@elementwise("relax.nn.leakyrelu", attrs=("alpha",))
def leakyrelu(x: Any, alpha: float) -> Any:
    return tirx.Select(x < f32(0), x * f32(alpha), x)


@elementwise("relax.nn.silu")
def silu(x: Any) -> Any:
    return x * sigmoid(x)


@elementwise("relax.nn.gelu")
def gelu(x: Any) -> Any:
    return x * f32(0.5) * (f32(1) + tirx.erf(x * f32(math.sqrt(0.5))))


@elementwise("relax.nn.gelu_tanh")
def gelu_tanh(x: Any) -> Any:
    return x * f32(0.5) * (f32(1) + tirx.tanh(f32(math.sqrt(2 / math.pi)) * (x + f32(0.044715) * x * x * x)))


@elementwise("relax.nn.selu")
def selu(x: Any) -> Any:
    return f32(SELU_SCALE) * tirx.Select(x < f32(0), f32(SELU_ALPHA) * (tirx.exp(x) - f32(1)), x)


@elementwise("relax.nn.softplus", attrs=("beta", "threshold"))
def softplus(x: Any, beta: float, threshold: float) -> Any:
    # above the threshold the exponential may overflow; the branch not selected may hold any value
    smooth = tirx.log(f32(1) + tirx.exp(x * f32(beta))) / f32(beta)
    return tirx.Select(x * f32(beta) > f32(threshold), x, smooth)
