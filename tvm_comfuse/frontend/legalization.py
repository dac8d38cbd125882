"""Legalization of the operators that stay unfused, exact in half precision.

Stock legalization computes in the dtype of the operands: a float16 product accumulates in float16, a bfloat16 layer
norm is an error, a bfloat16 softmax sums in bfloat16.  PyTorch computes all of these in float32 and rounds once at the
end, and so does ``legalize``: the stock compute definition is kept, with a cast to float32 in front and one behind,
inside the same PrimFunc.  Models in float32 or float64 are legalized as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, te, topi

from tvm_comfuse.frontend.graph import Graph, ModuleRewriter
from tvm_comfuse.frontend.torch_operands import HALF, is_half
from tvm_comfuse.frontend.widening import RULES

# Operators whose result is rounded once from float32.  Exact ones (relu, max, reshape ...) and the four basic
# operations, which round the same either way, need nothing.
PROMOTED = (
    "relax.nn.layer_norm",
    "relax.nn.rms_norm",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.softmax",
    "relax.nn.log_softmax",
    "relax.nn.gelu",
    "relax.nn.gelu_tanh",
    "relax.nn.silu",
    "relax.nn.selu",
    "relax.nn.softplus",
    "relax.nn.avg_pool2d",
    "relax.nn.adaptive_avg_pool2d",
    "relax.sigmoid",
    "relax.tanh",
    "relax.erf",
    "relax.exp",
    "relax.log",
    "relax.sqrt",
    "relax.rsqrt",
    "relax.sin",
    "relax.cos",
    "relax.tan",
    "relax.sinh",
    "relax.cosh",
    "relax.asin",
    "relax.acos",
    "relax.atan",
    "relax.power",
    "relax.sum",
    "relax.mean",
    "relax.variance",
    "relax.std",
    "relax.prod",
    "relax.einsum",
    "relax.outer",
)


def legalize() -> tvm.transform.Pass:
    """Module pass: every Relax operator becomes call_tir, with float32 accumulators and statistics for half inputs."""
    return tvm.transform.Sequential(
        [expand_attention(), widen_operators(), relax.transform.LegalizeOps(legalize_map())], name="comfuse.Legalize"
    )


def legalize_map() -> dict[str, Callable[[relax.BlockBuilder, tvm.ir.Call], relax.Expr]]:
    """The map for ``relax.transform.LegalizeOps``; it does not cover attention, which ``expand_attention`` removes."""
    table: dict[str, Callable[[relax.BlockBuilder, tvm.ir.Call], relax.Expr]] = {name: _promote for name in PROMOTED}
    table["relax.matmul"] = _matmul
    return table


def widen_operators() -> tvm.transform.Pass:
    """Module pass: the operators that TVM computes wrongly or not at all, most of them in half precision, by others."""

    @tvm.transform.module_pass(opt_level=0, name="comfuse.WidenOperators")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return ModuleRewriter(RULES).run(mod)

    return run


def expand_attention() -> tvm.transform.Pass:
    """Module pass: ``relax.nn.attention`` and ``attention_bias`` become matmul, softmax, matmul.

    Scores and softmax are float32; the probabilities are rounded to the dtype of the values before the second product,
    as PyTorch's attention kernels do.  As separate operators they meet the scheduling rules for matrix products.
    Sliding windows and variable lengths are left alone.
    """

    @tvm.transform.module_pass(opt_level=0, name="comfuse.ExpandAttention")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return ModuleRewriter([_expand_attention]).run(mod)

    return run


class _PromotingBuilder:
    """A block builder for stock legalization functions: their compute definition gets float32, gives its own dtype."""

    def __init__(self, builder: relax.BlockBuilder, dtype: str):
        self._builder, self._dtype = builder, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def call_te(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> relax.Expr:
        kwargs.setdefault("primfunc_name_hint", getattr(func, "__name__", "te"))

        def promoted(*te_args: Any, **te_kwargs: Any) -> Any:
            out = func(*map(_widen, te_args), **{key: _widen(value) for key, value in te_kwargs.items()})
            return topi.cast(out, self._dtype)

        return self._builder.call_te(promoted, *args, **kwargs)


def _widen(value: Any) -> Any:
    if isinstance(value, te.Tensor) and str(value.dtype) in HALF:
        return topi.cast(value, "float32")
    if isinstance(value, tvm.tirx.FloatImm) and str(value.ty.dtype) in HALF:
        return tvm.tirx.const(float(value.value), "float32")
    return value


def _stock(call: tvm.ir.Call) -> Callable[..., relax.Expr]:
    return call.op.get_attr("FLegalize")


def _promote(builder: relax.BlockBuilder, call: tvm.ir.Call) -> relax.Expr:
    if is_half(call):
        return _stock(call)(_PromotingBuilder(builder, str(call.ty.dtype)), call)
    return _stock(call)(builder, call)


def _matmul(builder: relax.BlockBuilder, call: tvm.ir.Call) -> relax.Expr:
    """``[..., M, K] x [..., K, N]``: accumulate in float32, then one rounding."""
    if not is_half(call):
        return _stock(call)(builder, call)
    wide = builder.normalize(relax.op.matmul(*call.args, out_dtype="float32"))
    product = builder.emit(_stock(wide)(builder, wide))
    return builder.call_te(topi.cast, product, str(call.ty.dtype), primfunc_name_hint="cast")


def _expand_attention(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """query [B, S, H, D], key [B, T, H, D], value [B, T, H, E], bias [B, H, S, T] -> [B, S, H, E]."""
    if not graph.is_op(call, "relax.nn.attention", "relax.nn.attention_bias") or call.attrs.window_size is not None:
        return None
    emit = graph.emit
    query, key, value = (graph.new(arg) for arg in call.args[:3])
    dtype, wide = str(query.ty.dtype), "float64" if str(query.ty.dtype) == "float64" else "float32"
    queries = emit(relax.op.permute_dims(query, [0, 2, 1, 3]))
    keys = emit(relax.op.permute_dims(key, [0, 2, 3, 1]))
    values = emit(relax.op.permute_dims(value, [0, 2, 1, 3]))
    scores = emit(relax.op.matmul(queries, keys, out_dtype=wide))
    scale = call.attrs.scale
    factor = 1.0 / math.sqrt(int(query.ty.shape[3])) if scale is None else float(getattr(scale, "value", scale))
    scores = emit(relax.op.multiply(scores, relax.const(factor, wide)))
    if len(call.args) > 3:
        scores = emit(relax.op.add(scores, _as(graph.new(call.args[3]), wide, emit)))
    if call.attrs.causal_mask is not None:
        scores = emit(relax.op.add(scores, _causal(scores, str(call.attrs.causal_mask), wide, emit)))
    probabilities = _as(emit(relax.op.nn.softmax(scores, axis=-1)), dtype, emit)
    out = emit(relax.op.matmul(probabilities, values))
    return relax.op.permute_dims(out, [0, 2, 1, 3])


def _as(expr: relax.Expr, dtype: str, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
    return expr if str(expr.ty.dtype) == dtype else emit(relax.op.astype(expr, dtype))


def _causal(scores: relax.Expr, mask: str, dtype: str, emit: Callable[[relax.Expr], relax.Var]) -> relax.Var:
    """``[S, T]``: minus infinity where a query would see a later key, zero elsewhere."""
    rows, columns = scores.ty.shape[2], scores.ty.shape[3]
    diagonal = 1 + (columns - rows if mask == "BottomRight" else 0)
    infinite = emit(relax.op.broadcast_to(relax.const(-math.inf, dtype), [rows, columns]))
    return emit(relax.op.triu(infinite, diagonal))
