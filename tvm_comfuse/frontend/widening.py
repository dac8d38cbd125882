"""Half precision operators that TVM computes wrongly or not at all: float32 in front, the operator, a cast behind.

Sorting and searching bfloat16 gives garbage on LLVM; running sums and products, and convolutions, round every partial
result; of some operators there is no half precision code, and of a few no code that compiles.  Casting to float32 is
exact, so that where values are only chosen the result is too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from tvm_comfuse.frontend.graph import Graph, Rule
from tvm_comfuse.frontend.torch_operands import is_half, widened

WIDENED = (
    # choosing
    "relax.argmax",
    "relax.argmin",
    "relax.argsort",
    "relax.bucketize",
    "relax.max",
    "relax.median",
    "relax.min",
    "relax.sort",
    "relax.topk",
    # arithmetic
    "relax.acosh",
    "relax.asinh",
    "relax.atan2",
    "relax.atanh",
    "relax.mod",
    "relax.nn.batch_norm",
    # classification
    "relax.isinf",
    "relax.isnan",
)

# operators that name the dtype of their result: asked for float32, they accumulate in it
_CONVOLUTIONS: dict[str, Callable[..., relax.Expr]] = {
    "relax.nn.conv1d": relax.op.nn.conv1d,
    "relax.nn.conv2d": relax.op.nn.conv2d,
    "relax.nn.conv3d": relax.op.nn.conv3d,
    "relax.nn.conv1d_transpose": relax.op.nn.conv1d_transpose,
    "relax.nn.conv2d_transpose": relax.op.nn.conv2d_transpose,
}
_GEOMETRY = ("strides", "padding", "output_padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
_SCANS: dict[str, Callable[..., relax.Expr]] = {"relax.cumsum": relax.op.cumsum, "relax.cumprod": relax.op.cumprod}


def widen(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """op(x) = astype(op(astype(x, float32)), dtype); a rule for ModuleRewriter"""
    if not graph.is_op(call, *WIDENED, *_SCANS) or not any(is_half(arg) for arg in call.args):
        return None
    args = [widened(graph.new(arg), graph.emit) for arg in call.args]
    if call.op.name in _SCANS:
        scan = _SCANS[call.op.name]
        wide = scan(args[0], call.attrs.axis, _accumulator(call.ty.dtype), bool(call.attrs.exclusive))
    else:
        wide = tvm.ir.Call(call.op, args, call.attrs, call.ty_args)
    return _narrow(graph.emit(wide), call.ty, graph)


def widen_convolution(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """convolution(x, w) = astype(convolution(x, w, out_dtype=float32), dtype)"""
    if not graph.is_op(call, *_CONVOLUTIONS) or not is_half(call):
        return None
    geometry = {name: getattr(call.attrs, name) for name in _GEOMETRY if hasattr(call.attrs, name)}
    args = [graph.new(arg) for arg in call.args]
    return _narrow(graph.emit(_CONVOLUTIONS[call.op.name](*args, **geometry, out_dtype="float32")), call.ty, graph)


def expand_finite(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """isfinite(x) = abs(x) < inf, which is false for NaN; TVM's definition does not compile in any dtype"""
    if not graph.is_op(call, "relax.isfinite"):
        return None
    size = graph.emit(relax.op.abs(widened(graph.new(call.args[0]), graph.emit)))
    return relax.op.less(size, relax.const(math.inf, size.ty.dtype))


def expand_log_add_exp(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """log(exp(x) + exp(y)) = max(x, y) + log(1 + exp(-|x - y|)), and x + log(2) where x = y, both perhaps infinite;
    TVM's definition does not compile in any dtype"""
    if not graph.is_op(call, "relax.log_add_exp"):
        return None
    emit = graph.emit
    x, y = (widened(graph.new(arg), emit) for arg in call.args)
    one, two = (relax.const(number, x.ty.dtype) for number in (1.0, math.log(2.0)))
    apart = emit(relax.op.negative(emit(relax.op.abs(emit(relax.op.subtract(x, y))))))
    extra = emit(relax.op.log(emit(relax.op.add(emit(relax.op.exp(apart)), one))))
    unequal = emit(relax.op.add(emit(relax.op.maximum(x, y)), extra))
    out = emit(relax.op.where(emit(relax.op.equal(x, y)), emit(relax.op.add(x, two)), unequal))
    return _narrow(out, call.ty, graph)


def expand_logic(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """x * y = x and y, x + y = x or y for truth values, of which TVM has no product and no sum"""
    operators = {"relax.multiply": relax.op.logical_and, "relax.add": relax.op.logical_or}
    if not graph.is_op(call, *operators) or str(call.ty.dtype) != "bool":
        return None
    return operators[call.op.name](*(graph.new(arg) for arg in call.args))


RULES: list[Rule] = [expand_logic, expand_finite, expand_log_add_exp, widen, widen_convolution]


def _accumulator(dtype: Any) -> str:
    return "float32" if str(dtype) in ("float16", "bfloat16") else str(dtype)


def _narrow(wide: relax.Var, ty: Any, graph: Graph) -> relax.Expr:
    """``wide`` with the dtypes of ``ty``, the type of one tensor or of a tuple of them."""
    if isinstance(ty, relax.TupleType):
        parts = [graph.emit(relax.TupleGetItem(wide, index)) for index in range(len(ty.fields))]
        return relax.Tuple([_narrow(part, field, graph) for part, field in zip(parts, ty.fields, strict=True)])
    if str(wide.ty.dtype) == str(ty.dtype):
        return wide
    return graph.emit(relax.op.astype(wide, str(ty.dtype)))
