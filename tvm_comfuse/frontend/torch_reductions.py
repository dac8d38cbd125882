"""Converters of reductions that TVM's importer lacks, or makes of a sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from tvm_comfuse.frontend.torch_operands import argument, widened


def reductions() -> dict[str, Any]:
    """Converters by name, for ``frontend.importer``."""
    return {
        "amax.default": _extremum(relax.op.max),
        "amin.default": _extremum(relax.op.min),
        "max.dim": _with_index(relax.op.max, relax.op.argmax),
        "min.dim": _with_index(relax.op.min, relax.op.argmin),
        "logsumexp.default": _logsumexp,
    }


def _axes(node: Any) -> list[int] | None:
    """The axes of a reduction; in PyTorch an empty list means all."""
    dims = argument(node, 1, "dim", [])
    return [dims] if isinstance(dims, int) else list(dims) or None


def _extremum(operator: Callable[..., relax.Expr]) -> Any:
    def convert(node: Any, importer: Any) -> relax.Var:
        x, keep = importer.env[node.args[0]], bool(argument(node, 2, "keepdim", False))
        return importer.block_builder.emit(operator(x, _axes(node), keep))

    return convert


def _with_index(operator: Callable[..., relax.Expr], index: Callable[..., relax.Expr]) -> Any:
    """(values, indices) over one axis, each an operator of its own: a model that reads only the values has a row
    reduction, which can be part of a cluster.  TVM's importer sorts."""

    def convert(node: Any, importer: Any) -> tuple[relax.Var, relax.Var]:
        emit, x = importer.block_builder.emit, importer.env[node.args[0]]
        axis, keep = int(argument(node, 1, "dim")), bool(argument(node, 2, "keepdim", False))
        if not len(x.ty.shape):  # a single number is its own extremum
            return x, emit(relax.op.zeros([], "int64"))
        return emit(operator(x, [axis], keep)), emit(index(x, axis, keep))

    return convert


def _logsumexp(node: Any, importer: Any) -> relax.Var:
    """max + log(sum(exp(x - max))) in float32; where the maximum is infinite, 0 stands for it: inf - inf is NaN."""
    emit, axes = importer.block_builder.emit, _axes(node)
    x = widened(importer.env[node.args[0]], emit)
    dtype = str(x.ty.dtype)
    top = emit(relax.op.max(x, axes, True))
    infinite = emit(relax.op.equal(emit(relax.op.abs(top)), relax.const(math.inf, dtype)))
    shift = emit(relax.op.where(infinite, relax.const(0.0, dtype), top))
    total = emit(relax.op.sum(emit(relax.op.exp(emit(relax.op.subtract(x, shift)))), axes, True))
    out = emit(relax.op.add(emit(relax.op.log(total)), shift))
    if argument(node, 2, "keepdim", False):
        return out
    rank = len(x.ty.shape)
    kept = [] if axes is None else [axis for axis in range(rank) if axis not in [each % rank for each in axes]]
    shape: list[tvm.ir.Expr] = [x.ty.shape[axis] for axis in kept]
    return emit(relax.op.reshape(out, shape))
