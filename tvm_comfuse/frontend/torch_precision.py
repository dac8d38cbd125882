"""Converters for operators that TVM's importer builds from several, or with a dtype of its own.

PyTorch computes them in float32 and rounds the result; so do these.  ``frontend.importer`` sees to the dtype of results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from tvm_comfuse.frontend.torch_operands import argument, in_float32, tensor, widened

# operators whose stock converter is right, in float32
_WIDE = (
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit_no_training.default",
    "asinh.default",
    "acosh.default",
    "atan2.default",
    "atanh.default",
    "batch_norm.default",
    "celu.default",
    "clamp.Tensor",
    "cumprod.default",
    "div.Tensor_mode",
    "expm1.default",
    "floor_divide.default",
    "fmod.Scalar",
    "fmod.Tensor",
    "linalg_vector_norm.default",
    "log10.default",
    "log1p.default",
    "log2.default",
    "logaddexp.default",
    "std.correction",
    "var.correction",
)

_CONVOLUTIONS = (
    "conv1d.default",
    "conv2d.default",
    "conv3d.default",
    "conv_transpose1d.default",
    "conv_transpose2d.input",
    "convolution.default",
)


def precise() -> dict[str, Any]:
    """Converters by name, for ``frontend.importer``."""
    return {
        **{name: _wide(name) for name in _WIDE},
        **{name: _convolution(name) for name in _CONVOLUTIONS},
        "elu.default": _elu,
        "group_norm.default": _group_norm,
        "native_group_norm.default": _native_group_norm,
    }


def _wide(name: str) -> Any:
    """The stock converter on float32 copies of all operands."""

    def convert(node: Any, importer: Any) -> Any:
        with in_float32(importer, node.all_input_nodes):
            return importer.stock[name](node)

    return convert


def _convolution(name: str) -> Any:
    """The stock convolution gives float32 whatever its operands are; so the bias is added in float32 as well."""

    def convert(node: Any, importer: Any) -> Any:
        bias = argument(node, 2, "bias")
        with in_float32(importer, [] if bias is None else [bias]):
            return importer.stock[name](node)

    return convert


def _elu(node: Any, importer: Any) -> relax.Var:
    """scale * x where x > 0, else scale * alpha * (exp(input_scale * x) - 1).  selu and celu are exported as this one;
    TVM's importer drops the two scales."""
    emit = importer.block_builder.emit
    x = widened(importer.env[node.args[0]], emit)
    alpha, scale, inner = (
        argument(node, at, name, 1.0) for at, name in ((1, "alpha"), (2, "scale"), (3, "input_scale"))
    )

    def times(value: relax.Expr, factor: float) -> relax.Expr:
        return value if factor == 1 else emit(relax.op.multiply(value, relax.const(factor, x.ty.dtype)))

    below = emit(relax.op.subtract(emit(relax.op.exp(times(x, inner))), relax.const(1.0, x.ty.dtype)))
    positive = emit(relax.op.greater(x, relax.const(0.0, x.ty.dtype)))
    return emit(relax.op.where(positive, times(x, scale), times(below, alpha * scale)))


def _native_group_norm(node: Any, importer: Any) -> relax.Var:
    """``(x, weight, bias, N, C, HxW, groups, eps)``; of the three results only the first is made."""
    return _normalized_groups(node, importer, 1, int(node.args[6]), float(node.args[7]))


def _group_norm(node: Any, importer: Any) -> relax.Var:
    """``(x, groups, weight, bias, eps)``"""
    return _normalized_groups(node, importer, 2, int(node.args[1]), float(argument(node, 4, "eps", 1e-5)))


def _normalized_groups(node: Any, importer: Any, first: int, groups: int, epsilon: float) -> relax.Var:
    """Relax has no group norm of bfloat16, and none without scale and shift, which are operands ``first`` and the next."""
    emit = importer.block_builder.emit
    x = widened(importer.env[node.args[0]], emit)
    channels, axes = int(x.ty.shape[1]), list(range(2, len(x.ty.shape)))
    operands = []
    for position, name, neutral in ((first, "weight", 1.0), (first + 1, "bias", 0.0)):
        given = tensor(node, importer, position, name)
        filled = relax.const(np.full(channels, neutral), x.ty.dtype)
        operands.append(filled if given is None else widened(given, emit))
    return emit(relax.op.nn.group_norm(x, *operands, groups, 1, axes, epsilon))
