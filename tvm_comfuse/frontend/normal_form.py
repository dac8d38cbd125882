"""Normal form of imported models, so that what belongs together is adjacent.

Exporters leave views and transpositions between a matrix product and the operators behind it: with
``batch_first=True`` the output projection of ``nn.MultiheadAttention`` is computed as [S, B, E] and transposed before
the residual add.  A permutation of row axes commutes with a linear layer, so it moves in front of the product, meets
the permutation of the heads there, and usually the two cancel.

Every rule states its identity.  ``perm`` follows ``permute_dims``: ``out.shape[i] = in.shape[perm[i]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_comfuse.frontend.graph import Graph, ModuleRewriter, Rule
from tvm_comfuse.frontend.shapes import axes_of, merge_groups, same_extent, same_shape, shape_of, split_groups

_RESHAPES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
_UNARY = (
    "relax.astype",
    "relax.nn.relu",
    "relax.nn.gelu",
    "relax.nn.gelu_tanh",
    "relax.nn.silu",
    "relax.nn.leakyrelu",
    "relax.sigmoid",
    "relax.tanh",
    "relax.erf",
    "relax.exp",
    "relax.log",
    "relax.sqrt",
    "relax.rsqrt",
    "relax.square",
    "relax.abs",
    "relax.negative",
    "relax.clip",
)
_BINARY = tuple(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum"))


def normalize() -> tvm.transform.Pass:
    """Module pass: canonical bindings, no needless reshape or permutation, row permutations in front of products."""
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            simplify_views(),
            hoist_row_permutations(),
            relax.transform.DeadCodeElimination(),
            relax.transform.CanonicalizeBindings(),
        ],
        name="comfuse.Normalize",
    )


def simplify_views() -> tvm.transform.Pass:
    """Module pass: drop and merge reshapes and permutations."""
    return _rewrite("comfuse.SimplifyViews", _VIEW_RULES)


def hoist_row_permutations() -> tvm.transform.Pass:
    """Module pass: move permutations of row axes in front of the linear layer they follow, then simplify the views."""
    return _rewrite("comfuse.HoistRowPermutations", [*_VIEW_RULES, _hoist_over_linear, _sink_through_linear])


def _rewrite(name: str, rules: Sequence[Rule]) -> tvm.transform.Pass:
    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return ModuleRewriter(rules).run(mod)

    return run


# -- views -------------------------------------------------------------------------------------------------------------


def _drop_reshape(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """reshape(x, x.shape) = x"""
    if not graph.is_op(call, *_RESHAPES) or not same_shape(shape_of(call), shape_of(call.args[0])):
        return None
    return graph.new(call.args[0])


def _merge_reshapes(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """reshape(reshape(x, s), t) = reshape(x, t)"""
    target = shape_of(call)
    inner = graph.call(call.args[0], *_RESHAPES) if graph.is_op(call, *_RESHAPES) else None
    if inner is None or target is None:
        return None
    return relax.op.reshape(graph.new(inner.args[0]), target)


def _drop_permutation(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """permute(x, p) = reshape(x) where p keeps the order of the axes longer than 1; x itself where p is the identity"""
    perm, shape = _permutation(call, graph), shape_of(call)
    if perm is None or shape is None:
        return None
    if perm == sorted(perm):
        return graph.new(call.args[0])
    long_axes = [axis for axis, extent in zip(perm, shape, strict=True) if not same_extent(extent, 1)]
    if long_axes != sorted(long_axes):
        return None
    return relax.op.reshape(graph.new(call.args[0]), shape)


def _merge_permutations(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """permute(permute(x, p), q) = permute(x, p[q])"""
    outer, inner = _permutation(call, graph), graph.call(call.args[0], "relax.permute_dims") if call.args else None
    inner_perm = _permutation(inner, graph) if inner is not None else None
    if outer is None or inner is None or inner_perm is None:
        return None
    return relax.op.permute_dims(graph.new(inner.args[0]), [inner_perm[axis] for axis in outer])


def _drop_unit_axes(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """permute(reshape(x), p) with axes of extent 1 = reshape(permute(reshape(x) without them, p without them))"""
    perm, shape = _permutation(call, graph), shape_of(call)
    if perm is None or shape is None or graph.call(call.args[0], *_RESHAPES) is None:
        return None
    source = shape_of(call.args[0])
    kept = [axis for axis in range(len(perm)) if source is not None and not same_extent(source[axis], 1)]
    if source is None or len(kept) == len(perm):
        return None
    flat = graph.emit(relax.op.reshape(graph.new(call.args[0]), [source[axis] for axis in kept]))
    turned = graph.emit(relax.op.permute_dims(flat, [kept.index(axis) for axis in perm if axis in kept]))
    return relax.op.reshape(turned, shape)


def _permute_reshape_permute(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """permute(reshape(permute(x, p)), q) = one permutation and one reshape, where the reshape only splits axes or only
    merges neighbours."""
    outer = _permutation(call, graph)
    reshape = graph.call(call.args[0], *_RESHAPES) if outer is not None else None
    inner = graph.call(reshape.args[0], "relax.permute_dims") if reshape is not None else None
    if outer is None or reshape is None or inner is None:
        return None
    return _through_reshape(graph.new(inner.args[0]), _permutation(inner, graph), shape_of(reshape), outer, graph)


def _through_reshape(
    x: relax.Expr, inner: list[int] | None, middle: list[Any] | None, outer: list[int], graph: Graph
) -> relax.Expr | None:
    """permute(reshape(permute(x, inner), middle), outer) with a single permutation, or None."""
    source = shape_of(x)
    if inner is None or middle is None or source is None:
        return None
    kept = [axis for axis, extent in enumerate(source) if not same_extent(extent, 1)]
    if len(kept) < len(source):  # axes of extent 1 belong to no group: leave them out
        inner = [kept.index(axis) for axis in inner if axis in kept]
        source = [source[axis] for axis in kept]
        x = graph.emit(relax.op.reshape(x, source))
    turned = [source[axis] for axis in inner]
    groups = split_groups(turned, middle)
    if groups is not None:  # split x first, then one permutation of the parts
        parts = {axis: [middle[part] for part in group] for axis, group in zip(inner, groups, strict=True)}
        starts: dict[int, int] = {}
        split: list[Any] = []
        for axis in range(len(source)):
            starts[axis] = len(split)
            split += parts[axis]
        order = [starts[axis] + step for axis, group in zip(inner, groups, strict=True) for step in range(len(group))]
        whole = graph.emit(relax.op.reshape(x, split))
        return relax.op.permute_dims(whole, [order[axis] for axis in outer])
    groups = merge_groups(turned, middle)
    if groups is None:
        return None
    order = [inner[part] for axis in outer for part in groups[axis]]  # one permutation of the parts, then merge
    whole = graph.emit(relax.op.permute_dims(x, order))
    return relax.op.reshape(whole, [middle[axis] for axis in outer])


def _slice_before_permutation(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """slice(permute(x, p), axis i) = permute(slice(x, axis p[i]), p)"""
    inner = graph.call(call.args[0], "relax.permute_dims") if graph.is_op(call, "relax.strided_slice") else None
    perm = _permutation(inner, graph) if inner is not None else None
    axes = graph.value(call.args[1]) if perm is not None else None
    if inner is None or perm is None or not isinstance(axes, relax.Tuple):
        return None
    moved = [perm[int(axis.value) % len(perm)] for axis in axes.fields]
    begin, end = (list(graph.value(arg).fields) for arg in call.args[2:4])
    strides = list(graph.value(call.args[4]).fields) if len(call.args) > 4 else None
    inbound = bool(call.attrs.assume_inbound)
    part = graph.emit(relax.op.strided_slice(graph.new(inner.args[0]), moved, begin, end, strides, inbound))
    return relax.op.permute_dims(part, perm)


def _drop_unit_batch(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """matmul(x, w [1, K, N]) = matmul(x, w [K, N]), where x has as many axes: an einsum is exported so."""
    x, weight = (shape_of(arg) for arg in call.args) if graph.is_op(call, "relax.matmul") else (None, None)
    if (
        x is None
        or weight is None
        or not 2 < len(weight) <= len(x)
        or not all(same_extent(extent, 1) for extent in weight[:-2])
    ):
        return None
    plain = graph.emit(relax.op.reshape(graph.new(call.args[1]), weight[-2:]))
    return relax.op.matmul(graph.new(call.args[0]), plain, out_dtype=call.attrs.out_dtype)


_VIEW_RULES: list[Rule] = [
    _drop_reshape,
    _merge_reshapes,
    _drop_permutation,
    _merge_permutations,
    _drop_unit_axes,
    _permute_reshape_permute,
    _slice_before_permutation,
    _drop_unit_batch,
]


def _permutation(call: Any, graph: Graph) -> list[int] | None:
    """The axes of a permute_dims as non-negative integers; None for any other expression."""
    if not graph.is_op(call, "relax.permute_dims") or shape_of(call) is None:
        return None
    return axes_of(call.attrs.axes, len(shape_of(call) or []))


# -- linear layers -----------------------------------------------------------------------------------------------------


def _hoist_over_linear(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """permute(reshape(linear(x))) = linear(permute(reshape(x))), where only row axes are reshaped and permuted.

    Either of the two may be missing.
    """
    perm = _permutation(call, graph)
    view = call if perm is None else graph.call(call.args[0], *_RESHAPES)
    if perm is None and not graph.is_op(call, *_RESHAPES):
        return None
    if perm is not None and (perm[-1] != len(perm) - 1 or not graph.single_use(call.args[0])):
        return None
    end = call.args[0] if view is None else view.args[0]
    chain = _linear_chain(end, graph)
    rows, features = shape_of(call if perm is None else call.args[0]), shape_of(end)
    if chain is None or not rows or not features or not same_extent(rows[-1], features[-1]) or len(rows) < 2:
        return None
    x = graph.new(chain[0].args[0])
    source = shape_of(x)
    if source is None:
        return None
    target = [*rows[:-1], source[-1]]
    if not same_shape(target, source):
        x = graph.emit(relax.op.reshape(x, target))
    if perm is not None:
        x = graph.emit(relax.op.permute_dims(x, perm))
    return _replay(chain, x, graph)


def _sink_through_linear(call: tvm.ir.Call, graph: Graph) -> relax.Expr | None:
    """reshape(linear(permute(x, p))) = permute(reshape(linear(x)), p'), where p permutes rows, the reshape splits the
    features, and another permutation follows on every path, to merge with.

    This is the input projection of attention: features are split into query, key and value, and heads.
    """
    end = call.args[0] if graph.is_op(call, *_RESHAPES) else None
    chain = _linear_chain(end, graph) if end is not None else None
    perm = _permutation(graph.value(chain[0].args[0]), graph) if chain is not None else None
    turned, middle = (shape_of(end), shape_of(call)) if end is not None else (None, None)
    if chain is None or perm is None or turned is None or middle is None or perm[-1] != len(perm) - 1:
        return None
    groups = split_groups(turned, middle)
    readers = graph.readers(end)
    if groups is None or len(groups[-1]) < 2 or same_extent(middle[-1], turned[-1]) or len(readers) != 1:
        return None
    if not _permuted_later(readers[0][0], graph):
        return None
    straight = graph.emit(_replay(chain, graph.new(graph.value(chain[0].args[0]).args[0]), graph))
    return _through_reshape(straight, perm, middle, list(range(len(middle))), graph)


def _permuted_later(view: relax.Var, graph: Graph) -> bool:
    """Does every reader of ``view`` lead, over reshapes and slices, to a permutation?"""
    readers = graph.readers(view)
    for name, value in readers:
        if graph.is_op(value, "relax.permute_dims"):
            continue
        if not graph.is_op(value, *_RESHAPES, "relax.strided_slice") or not _permuted_later(name, graph):
            return False
    return bool(readers)


def _linear_chain(end: relax.Expr, graph: Graph) -> list[tvm.ir.Call] | None:
    """The calls from a matmul with a 2-D weight to ``end``, if each commutes with any permutation of the rows.

    The first is the matmul; the others are elementwise, with no second operand but a scalar or an [N] vector.  Every
    intermediate value is used once, so that nothing is computed twice when the chain is moved.
    """
    chain: list[tvm.ir.Call] = []
    while graph.single_use(end):
        call = graph.value(end)
        if graph.is_op(call, "relax.matmul"):
            weight = shape_of(call.args[1])
            fits = weight is not None and len(weight) == 2 and len(shape_of(call.args[0]) or []) >= 2
            return [call, *reversed(chain)] if fits else None
        position = _carried_operand(call, graph)
        if position is None:
            return None
        chain.append(call)
        end = call.args[position]
    return None


def _carried_operand(call: relax.Expr, graph: Graph) -> int | None:
    """Which operand of an elementwise call has the rows; None if the call does not commute with row permutations."""
    if graph.is_op(call, *_UNARY):
        return 0
    if not graph.is_op(call, *_BINARY):
        return None
    shapes = [shape_of(arg) for arg in call.args]
    for position, other in ((0, 1), (1, 0)):
        vector = shapes[other]
        if vector is not None and _is_vector(vector) and same_shape(shapes[position], shape_of(call)):
            return position
    return None


def _is_vector(shape: list[Any]) -> bool:
    """[], [N], [1, N] ...: the same for every row."""
    return all(same_extent(extent, 1) for extent in shape[:-1])


def _replay(chain: list[tvm.ir.Call], x: relax.Expr, graph: Graph) -> relax.Expr:
    """The same calls on another ``x``, with the same number of features; the last one is not bound yet."""
    value: relax.Expr = relax.op.matmul(x, graph.new(chain[0].args[1]), out_dtype=chain[0].attrs.out_dtype)
    for call in chain[1:]:
        position = _carried_operand(call, graph)
        bound = graph.emit(value)
        args = [bound if index == position else _vector(graph.new(arg), graph) for index, arg in enumerate(call.args)]
        value = relax.Call(call.op, args, call.attrs)
    return value


def _vector(operand: relax.Expr, graph: Graph) -> relax.Expr:
    """A [1, 1, N] operand as [N], so that it fits an ``x`` of any rank."""
    shape = shape_of(operand) or []
    return operand if len(shape) < 2 else graph.emit(relax.op.reshape(operand, [shape[-1]]))
