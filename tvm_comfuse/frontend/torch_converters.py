"""Converters for the ATen operators that TVM's importer gets wrong in half precision.

TVM 0.27 imports ``addmm``, ``mm``, ``bmm``, ``matmul`` and ``linear`` with ``out_dtype="float32"`` whatever the inputs
are, so that the bias add of a half precision layer has two dtypes and the import fails.  It also drops the ``scale`` of
``scaled_dot_product_attention``, takes no boolean mask, and has no ``rms_norm``.

A converter is called as ``convert(node, importer)`` and returns a Relax variable of the dtype PyTorch would give.
Accumulation in float32 is not said here: ``legalize`` sees to it for the operators that stay unfused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend.torch_operands import argument, tensor
from tvm_comfuse.frontend.torch_precision import precise
from tvm_comfuse.frontend.torch_reductions import reductions

_PERMUTE_HEADS = [0, 2, 1, 3]  # [B, H, S, D] <-> [B, S, H, D]


def converters() -> dict[str, Any]:
    """Converters by the names of operators, for ``frontend.importer``; the others are TVM's."""
    return {
        **precise(),
        **reductions(),
        "linear.default": _linear,
        "addmm.default": _addmm,
        "baddbmm.default": _addmm,
        "mm.default": _matmul,
        "bmm.default": _matmul,
        "matmul.default": _matmul,
        "layer_norm.default": _layer_norm,
        "rms_norm.default": _rms_norm,
        "scaled_dot_product_attention.default": _attention,
        "select.int": _select,
    }


def preserved_ops() -> list[Any]:
    """ATen operators that must not be decomposed before the import, because a converter above wants them whole.

    ``aten.linear`` of an input that is not contiguous would become a batched product with an expanded weight; a layer
    norm and an attention would become a dozen operators each.
    """
    import torch

    aten = torch.ops.aten
    return [
        aten.linear.default,
        aten.logsumexp.default,
        aten.matmul.default,
        aten.layer_norm.default,
        aten.rms_norm.default,
        aten.silu.default,
        aten.scaled_dot_product_attention.default,
    ]


def _linear(node: Any, importer: Any) -> relax.Var:
    """``x [..., K]``, ``weight [N, K]`` (or ``[K]``), ``bias [N]`` -> ``[..., N]``."""
    emit = importer.block_builder.emit
    x, weight = importer.env[node.args[0]], importer.env[node.args[1]]
    bias = tensor(node, importer, 2, "bias")
    if len(weight.ty.shape) == 2:
        weight = emit(relax.op.permute_dims(weight, [1, 0]))
    out = emit(relax.op.matmul(x, weight))
    return out if bias is None else emit(relax.op.add(out, bias))


def _matmul(node: Any, importer: Any) -> relax.Var:
    return importer.block_builder.emit(relax.op.matmul(importer.env[node.args[0]], importer.env[node.args[1]]))


def _scaled(importer: Any, value: relax.Expr, factor: float) -> relax.Expr:
    if factor == 1:
        return value
    return importer.block_builder.emit(relax.op.multiply(value, relax.const(factor, value.ty.dtype)))


def _addmm(node: Any, importer: Any) -> relax.Var:
    """``beta * bias + alpha * (a @ b)``; with ``beta == 0`` the bias is not read, even where it is NaN."""
    emit = importer.block_builder.emit
    bias, a, b = (importer.env[arg] for arg in node.args[:3])
    beta, alpha = argument(node, 3, "beta", 1), argument(node, 4, "alpha", 1)
    out = _scaled(importer, emit(relax.op.matmul(a, b)), alpha)
    if beta == 0:
        return out
    return emit(relax.op.add(out, _scaled(importer, bias, beta)))


def _select(node: Any, importer: Any) -> relax.Var:
    """``x[..., index, ...]``: a slice that loses its axis.  TVM's importer gathers, with an unchecked index."""
    emit = importer.block_builder.emit
    x, axis, index = importer.env[node.args[0]], node.args[1], importer.env.get(node.args[2], node.args[2])
    if not isinstance(index, int):
        return emit(relax.op.take(x, relax.op.shape_to_tensor(relax.ShapeExpr([index])), axis=axis))
    shape = list(x.ty.shape)
    axis %= len(shape)
    begin = index if index >= 0 else shape[axis] + index
    part = emit(relax.op.strided_slice(x, [axis], [begin], [begin + 1]))
    return emit(relax.op.reshape(part, shape[:axis] + shape[axis + 1 :]))


def _filled(shape: list[int], value: float, dtype: Any) -> relax.Expr:
    return relax.const(np.full([int(extent) for extent in shape], value, "float32"), str(dtype))


def _layer_norm(node: Any, importer: Any) -> relax.Var:
    """Layer norm over the last ``len(normalized_shape)`` axes; a missing scale is 1, a missing shift is 0."""
    x, shape = importer.env[node.args[0]], list(node.args[1])
    gamma, beta = tensor(node, importer, 2, "weight"), tensor(node, importer, 3, "bias")
    gamma = _filled(shape, 1.0, x.ty.dtype) if gamma is None else gamma
    beta = _filled(shape, 0.0, x.ty.dtype) if beta is None else beta
    axes = list(range(-len(shape), 0))
    epsilon = argument(node, 4, "eps", 1e-5)
    return importer.block_builder.emit(relax.op.nn.layer_norm(x, gamma, beta, axes=axes, epsilon=epsilon))


def _rms_norm(node: Any, importer: Any) -> relax.Var:
    """RMS norm; PyTorch's default epsilon is the machine epsilon of the dtype it computes in, float32 for half."""
    import torch

    x, shape = importer.env[node.args[0]], list(node.args[1])
    weight = tensor(node, importer, 2, "weight")
    weight = _filled(shape, 1.0, x.ty.dtype) if weight is None else weight
    epsilon = argument(node, 3, "eps")
    if epsilon is None:
        wide = torch.float64 if str(x.ty.dtype) == "float64" else torch.float32
        epsilon = torch.finfo(wide).eps
    axes = list(range(-len(shape), 0))
    return importer.block_builder.emit(relax.op.nn.rms_norm(x, weight, axes=axes, epsilon=epsilon))


def _attention(node: Any, importer: Any) -> relax.Var:
    """``query, key, value [..., S, D]`` with 2, 3 or 4 axes -> ``relax.nn.attention`` on ``[B, S, H, D]``."""
    emit = importer.block_builder.emit
    dropout = argument(node, 4, "dropout_p", 0.0)
    if dropout != 0.0:
        raise ModelError("attention without dropout", f"dropout_p={dropout}", "call module.eval() before exporting")
    tensors = [importer.env[arg] for arg in node.args[:3]]
    if argument(node, 7, "enable_gqa", False):
        tensors = _repeat_heads(tensors, emit)
    rank = len(tensors[0].ty.shape)
    if rank > 4:
        raise ModelError("an attention of 2 to 4 axes", f"{rank} axes", "merge the leading axes before the attention")
    query, key, value = (_to_heads(part, emit) for part in tensors)
    bias = _mask(node, importer, query, key)
    scale = argument(node, 6, "scale")
    if scale is None:
        scale = 1.0 / math.sqrt(int(query.ty.shape[-1]))
    causal = "TopLeft" if argument(node, 5, "is_causal", False) else None
    out = emit(relax.op.nn.attention(query, key, value, bias=bias, scale=float(scale), causal_mask=causal))
    if rank == 4:
        return emit(relax.op.permute_dims(out, _PERMUTE_HEADS))
    return emit(relax.op.reshape(out, [*list(tensors[0].ty.shape)[:-1], tensors[2].ty.shape[-1]]))


def _repeat_heads(tensors: list[relax.Expr], emit: Any) -> list[relax.Expr]:
    """Grouped queries: repeat the heads (axis -3) of key and value to the number the query has."""
    heads = int(tensors[0].ty.shape[-3])
    repeated = [tensors[0]]
    for part in tensors[1:]:
        times = heads // int(part.ty.shape[-3])
        axis = len(part.ty.shape) - 3
        repeated.append(part if times == 1 else emit(relax.op.repeat(part, times, axis)))
    return repeated


def _to_heads(value: relax.Expr, emit: Any) -> relax.Var:
    """``[..., S, D]`` -> ``[B, S, H, D]``; with fewer than four axes there is one head."""
    shape = list(value.ty.shape)
    if len(shape) == 4:
        return emit(relax.op.permute_dims(value, _PERMUTE_HEADS))
    batch = shape[0] if len(shape) == 3 else 1
    return emit(relax.op.reshape(value, [batch, shape[-2], 1, shape[-1]]))


def _mask(node: Any, importer: Any, query: relax.Expr, key: relax.Expr) -> relax.Expr | None:
    """The mask as an additive bias ``[B or 1, H or 1, S, S_kv]``; True in a boolean mask means that the key is seen."""
    mask = tensor(node, importer, 3, "attn_mask")
    if mask is None:
        return None
    emit = importer.block_builder.emit
    dtype = str(query.ty.dtype)
    if str(mask.ty.dtype) == "bool":
        mask = emit(relax.op.where(mask, relax.const(0.0, dtype), relax.const(-math.inf, dtype)))
    rank = len(node.args[0].meta["val"].shape)
    shape = [*mask.ty.shape]
    shape = [1] * (rank - len(shape)) + shape
    if rank == 3:  # [B, S, S_kv]: the one head is the second axis
        shape = [shape[0], 1, *shape[1:]]
    elif rank == 2:
        shape = [1, 1, *shape]
    if len(shape) != len(mask.ty.shape):
        mask = emit(relax.op.reshape(mask, shape))
    full = [shape[0], shape[1], query.ty.shape[1], key.ty.shape[1]]
    return emit(relax.op.broadcast_to(mask, full))
