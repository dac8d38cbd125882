"""Whether an operator that reads a value of the cluster can be computed in it, and as what expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.anchor import Anchor
from tvm_comfuse.relay_patterns.block import op_name, var_key
from tvm_comfuse.relay_patterns.graph import Graph, Node
from tvm_comfuse.relay_patterns.operands import Operands, attribute_values, broadcast_refusal, constant_value
from tvm_comfuse.relay_patterns.rules import COMPOSITE, ELEMENTWISE, VIEWS, Lowering, known
from tvm_comfuse.relay_patterns.shapes import FLOATS, Dim, dims_of, dtype_of, equal, is_row, is_tile, placed, plain


@dataclass(frozen=True)
class Value:
    """A Relax variable whose value the cluster computes: what it is, and its shape and type in Relax."""

    node: Node
    dims: tuple[Dim, ...]
    dtype: str


@dataclass
class Admission:
    """Turns calls into nodes for one cluster.  `values` is the cluster's own, by variable."""

    anchor: Anchor
    graph: Graph
    operands: Operands
    values: dict[int, Value]

    def node(self, call: Any, var: Any) -> Node | Refusal:
        """The node for `call`, whose result `var` gets; or why the cluster cannot compute it."""
        name = op_name(call)
        if name == "relax.permute_dims":
            return _row_order("the value is transposed", dims_of(call.args[0]), dims_of(var))
        if not known(name):
            return Refusal(
                "opaque-operator",
                "only elementwise operators, row reductions and views of the rows can join a cluster",
                {},
                "register the operator with @elementwise or @composite if it is one",
            )
        dims, dtype = dims_of(var), dtype_of(var)
        if dims is None:
            return Refusal("unknown-shape", "the shape of the result must be known", {}, "give it in the model")
        if dtype not in FLOATS and dtype != "bool":
            code = "dtype" if dtype.startswith("float") else "integer-output"
            return Refusal(
                code,
                "a cluster computes float16, bfloat16 and float32 values only",
                {"dtype": dtype},
                "the operator runs after the cluster",
            )
        if name in VIEWS:
            return self._view(call, dims, dtype)
        if name in COMPOSITE:
            return self._composite(name, call)
        return self._elementwise(name, call, dims)

    def _value(self, expr: Any) -> Value | None:
        return self.values.get(var_key(expr)) if hasattr(expr, "id_") else None

    def _view(self, call: Any, dims: tuple[Dim, ...], dtype: str) -> Node | Refusal:
        value = self._value(call.args[0])
        if value is None:
            return _row_order("the cluster's value gives the shape only", dims, dims)
        node = value.node
        if node.dtype == "bool" and dtype != "bool":
            node = self.graph.elementwise("relax.where", node, self.graph.const(1.0), self.graph.const(0.0))
        elif dtype == "bool" and node.dtype != "bool":
            node = self.graph.elementwise("relax.not_equal", node, self.graph.const(0.0), dtype="bool")
        if node.shape == "row" and is_row(dims, self.anchor.rows):
            return node
        if is_tile(dims, self.anchor.rows, self.anchor.columns):
            if node.shape == "tile":
                return node
            if placed(value.dims, dims, "tile") == "row" and node.dtype == "float32":
                return self.graph.broadcast(node)
        return _row_order("a view must keep the last dimension and the order of the rows", value.dims, dims)

    def _composite(self, name: str, call: Any) -> Node | Refusal:
        value = self._value(call.args[0])
        if value is None or value.node.dtype != "float32":
            return broadcast_refusal(name, dims_of(call.args[0]) or (), ())
        args = self._arguments(name, call, value.dims, value.node.shape)
        if isinstance(args, Refusal):
            return args
        return COMPOSITE[name](Lowering(self.graph, tuple(args), call.attrs, len(value.dims)))

    def _elementwise(self, name: str, call: Any, dims: tuple[Dim, ...]) -> Node | Refusal:
        shape = self._result_class(call, dims)
        if shape is None:
            return broadcast_refusal(name, dims, [self.anchor.rows, self.anchor.columns])
        args = self._arguments(name, call, dims, shape)
        if isinstance(args, Refusal):
            return args
        node = self.graph.elementwise(name, *args, dtype=ELEMENTWISE[name].dtype, **attribute_values(name, call.attrs))
        # a fill operand leaves a row value where Relax has a tile
        return self.graph.broadcast(node) if shape == "tile" and node.shape != "tile" else node

    def _result_class(self, call: Any, dims: tuple[Dim, ...]) -> str | None:
        """``tile`` or ``row``, or None when the result is neither."""
        inside = [value for arg in call.args if (value := self._value(arg)) is not None]
        if all(value.node.shape == "row" for value in inside) and all(equal(value.dims, dims) for value in inside):
            return "row"
        return "tile" if is_tile(dims, self.anchor.rows, self.anchor.columns) else None

    def _arguments(self, name: str, call: Any, dims: Sequence[Dim], shape: str) -> list[Node] | Refusal:
        """Nodes of the inputs, each broadcast against a result of shape `dims` and class `shape`."""
        nodes: list[Node] = []
        for arg in call.args:
            value = self._value(arg)
            arg_dims = value.dims if value is not None else dims_of(arg)
            if constant_value(arg) is not None:
                arg_dims = ()
            place = None if arg_dims is None else placed(arg_dims, dims, shape)
            if value is not None and place is not None:
                # one row or one column in all: the class of the cluster's value is the finer one
                place = value.node.shape if place == "scalar" or equal(value.dims, dims) else place
            if place is None or (value is not None and place != value.node.shape):
                return broadcast_refusal(name, arg_dims or (), dims)
            node = value.node if value is not None else self.operands.node(arg, place)
            if isinstance(node, Refusal):
                return node
            nodes.append(node)
        return nodes


def _row_order(clause: str, before: Sequence[Dim] | None, after: Sequence[Dim] | None) -> Refusal:
    return Refusal(
        "row-order-changed",
        clause,
        {"from": plain(before or ()), "to": plain(after or ())},
        "the operator runs after the cluster",
    )
