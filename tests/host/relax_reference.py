"""A float64 interpreter of Relax functions, the reference of the discovery tests.

It follows the operators one by one as the model has them and shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from tvm import ir, relax, tirx

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _softmax(x: Any, axis: int) -> Any:
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def _layer_norm(x: Any, gamma: Any, beta: Any, attrs: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + attrs.epsilon)
    out = out * gamma if attrs.scale else out
    return out + beta if attrs.center else out


def _rms_norm(x: Any, gamma: Any, attrs: Any) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + attrs.epsilon) * gamma


def _over(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, attrs: Any) -> Any:
        axis = None if attrs.axis is None else tuple(int(a) for a in attrs.axis)
        return function(x, axis=axis, keepdims=bool(attrs.keepdims))

    return reduced


def _permute(x: Any, attrs: Any) -> Any:
    return np.transpose(x, None if attrs.axes is None else [int(a) for a in attrs.axes])


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softplus(x: Any, attrs: Any) -> Any:
    scaled = x * attrs.beta
    return np.where(scaled > attrs.threshold, x, np.log1p(np.exp(np.minimum(scaled, attrs.threshold))) / attrs.beta)


PLAIN: dict[str, Callable[..., Any]] = {
    "matmul": np.matmul,
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "clip": lambda x, low, high: np.clip(x, low, high),
    "where": np.where,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "isnan": np.isnan,
    "negative": np.negative,
    "abs": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "erf": lambda x: _erf(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.round,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "ewise_fma": lambda x, y, z: x * y + z,
    "nn.relu": lambda x: np.where(x < 0, 0, x),
    "nn.silu": lambda x: x / (1 + np.exp(-x)),
    "nn.gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "nn.gelu_tanh": _gelu_tanh,
    "nn.selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "cumsum": lambda x: np.cumsum(x, -1),
}
WITH_ATTRS: dict[str, Callable[..., Any]] = {
    "sum": _over(np.sum),
    "max": _over(np.max),
    "min": _over(np.min),
    "mean": _over(np.mean),
    "variance": _over(np.var),
    "std": _over(np.std),
    "permute_dims": _permute,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
    "nn.softmax": lambda x, attrs: _softmax(x, int(attrs.axis)),
    "nn.log_softmax": lambda x, attrs: np.log(_softmax(x, int(attrs.axis))),
    "nn.leakyrelu": lambda x, attrs: np.where(x < 0, attrs.alpha * x, x),
    "nn.prelu": lambda x, slope, attrs: np.where(x < 0, slope * x, x),
    "nn.softplus": _softplus,
}
RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze")


def evaluate(function: relax.Function, *inputs: Any) -> list[Any]:
    """Outputs of a Relax function in float64 (or bool).  A single output gives a list of one."""
    values: dict[int, Any] = {}
    sizes: dict[int, int] = {}
    for param, given in zip(function.params, inputs, strict=True):
        values[param.id_] = np.asarray(given).astype("float64")
        for dim, size in zip(param.ty.shape, np.shape(given), strict=True):
            if isinstance(dim, tirx.Var):
                sizes[dim.id_] = size
    for block in function.body.blocks:
        for binding in block.bindings:
            values[binding.var.id_] = _value(binding.value, values, sizes)
    result = _value(function.body.body, values, sizes)
    return list(result) if isinstance(result, tuple) else [result]


def _value(expr: Any, values: dict[int, Any], sizes: dict[int, int]) -> Any:
    if isinstance(expr, relax.Tuple):
        return tuple(_value(field, values, sizes) for field in expr.fields)
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return float(expr.value)
    if isinstance(expr, relax.Var):
        return values[expr.id_]
    if isinstance(expr, ir.expr.GenericConst):
        return np.asarray(expr.value.numpy()).astype("float64")
    name = expr.op.name.removeprefix("relax.")
    if name == "full":
        return np.full(_shape(expr.args[0], sizes), _value(expr.args[1], values, sizes))
    args = [_value(arg, values, sizes) for arg in expr.args if not isinstance(arg, relax.ShapeExpr)]
    if name == "astype":
        kind = str(expr.attrs.dtype)
        return args[0].astype(bool) if kind == "bool" else args[0].astype("int64" if "int" in kind else "float64")
    if name in RESHAPES:
        return args[0].reshape(_shape(expr.ty.shape, sizes))
    if name == "broadcast_to":
        return np.broadcast_to(args[0], _shape(expr.ty.shape, sizes))
    return PLAIN[name](*args) if name in PLAIN else WITH_ATTRS[name](*args, expr.attrs)


def _shape(shape: Any, sizes: dict[int, int]) -> list[int]:
    return [_size(dim, sizes) for dim in shape]


def _size(dim: Any, sizes: dict[int, int]) -> int:
    if isinstance(dim, tirx.Var):
        return sizes[dim.id_]
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    left, right = _size(dim.a, sizes), _size(dim.b, sizes)
    return {"Mul": left * right, "Add": left + right, "FloorDiv": left // max(right, 1)}[type(dim).__name__]
