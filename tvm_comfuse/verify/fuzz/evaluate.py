"""The value of a Relax function by NumPy, operator by operator, and in float32 or float64 throughout.

It shares no code with relay_patterns: what discovery makes of a model differently shows as an error.  Types of the model
are not followed, because a cluster computes in float32 whatever they are; the value in float32 says how well a model is
conditioned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from tvm_comfuse.errors import LoweringError

Array = np.ndarray
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _erf(x: Array) -> Array:
    import torch

    return torch.special.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _softmax(x: Array, axis: int) -> Array:
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def _layer_norm(x: Array, gamma: Array, beta: Array, attrs: Any) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(attrs.epsilon))
    out = out * gamma if attrs.scale else out
    return out + beta if attrs.center else out


def _rms_norm(x: Array, gamma: Array, attrs: Any) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(attrs.epsilon)) * gamma


def _over(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Array, attrs: Any) -> Array:
        axis = None if attrs.axis is None else tuple(int(a) for a in attrs.axis)
        return function(x, axis=axis, keepdims=bool(attrs.keepdims))

    return reduced


def _softplus(x: Array, attrs: Any) -> Array:
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
    "clip": np.clip,
    "where": np.where,
    "less": np.less,
    "greater": np.greater,
    "negative": np.negative,
    "abs": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "erf": _erf,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "ewise_fma": lambda x, y, z: x * y + z,
    "nn.relu": lambda x: np.where(x < 0, np.zeros_like(x), x),
    "nn.silu": lambda x: x / (1 + np.exp(-x)),
    "nn.gelu": lambda x: x / 2 * (1 + _erf(x * x.dtype.type(math.sqrt(0.5)))),
    "nn.gelu_tanh": lambda x: (
        x / 2 * (1 + np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)))
    ),
    "nn.selu": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0))),
}
WITH_ATTRS: dict[str, Callable[..., Any]] = {
    "sum": _over(np.sum),
    "max": _over(np.max),
    "min": _over(np.min),
    "mean": _over(np.mean),
    "variance": _over(np.var),
    "std": _over(np.std),
    "permute_dims": lambda x, attrs: np.transpose(x, None if attrs.axes is None else [int(a) for a in attrs.axes]),
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
    "nn.softmax": lambda x, attrs: _softmax(x, int(attrs.axis)),
    "nn.log_softmax": lambda x, attrs: np.log(_softmax(x, int(attrs.axis))),
    "nn.leakyrelu": lambda x, attrs: np.where(x < 0, x * x.dtype.type(attrs.alpha), x),
    "nn.softplus": _softplus,
}
#: the shape of the result says it all
SHAPED = ("reshape", "flatten", "expand_dims", "squeeze")


class Evaluation:
    """The value of every variable of a function for some inputs.

    inputs     one array for each parameter, of any float dtype
    precision  float32 or float64, of every operator
    Raises LoweringError for an operator that is not known here.
    """

    def __init__(self, function: relax.Function, inputs: list[Array], precision: str = "float64"):
        self.precision = np.dtype(precision)
        self.sizes: dict[int, int] = {}
        self._values: dict[int, Array] = {}
        for param, given in zip(function.params, inputs, strict=True):
            self._values[param.id_] = given.astype(self.precision)
            for dim, size in zip(param.ty.shape, given.shape, strict=True):
                if isinstance(dim, tirx.Var):
                    self.sizes[dim.id_] = size
        with np.errstate(all="ignore"):
            for block in function.body.blocks:
                for binding in block.bindings:
                    self._values[binding.var.id_] = self.value(binding.value)
            result = self.value(function.body.body)
        self.outputs: list[Array] = list(result) if isinstance(result, tuple) else [result]

    def value(self, expr: Any) -> Any:
        """The value of a variable, constant or call."""
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(field) for field in expr.fields)
        if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
            return self.precision.type(expr.value)
        if isinstance(expr, relax.Var):
            return self._values[expr.id_]
        if isinstance(expr, ir.expr.GenericConst):
            return np.asarray(expr.value.numpy()).astype(self.precision)
        name = str(expr.op.name).removeprefix("relax.")
        args = [self.value(arg) for arg in expr.args if not isinstance(arg, relax.ShapeExpr)]
        if name == "astype":
            return args[0]
        if name in SHAPED:
            return args[0].reshape(self.shape(expr.ty.shape))
        if name == "broadcast_to":
            return np.broadcast_to(args[0], self.shape(expr.ty.shape))
        if name in PLAIN:
            return _as(PLAIN[name](*args), self.precision)
        if name in WITH_ATTRS:
            return _as(WITH_ATTRS[name](*args, expr.attrs), self.precision)
        raise LoweringError("an operator that the fuzzer evaluates", name, "add it to verify/fuzz/evaluate.py")

    def shape(self, dims: Any) -> list[int]:
        """Dimensions with the sizes of this run."""
        return [size_of(dim, self.sizes) for dim in dims]


def _as(value: Array, precision: np.dtype) -> Array:
    return value if value.dtype == np.bool_ else np.asarray(value, precision)


def size_of(dim: Any, sizes: Mapping[int, int]) -> int:
    """A dimension with the values of its variables, which are known by their identity."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, tirx.Var):
        return sizes[dim.id_]
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    if isinstance(dim, tirx.Mul):
        return size_of(dim.a, sizes) * size_of(dim.b, sizes)
    raise LoweringError("a dimension made of products", f"{dim}", "add it to verify/fuzz/evaluate.py")
