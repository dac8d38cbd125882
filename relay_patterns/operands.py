"""Operands: values computed outside the cluster that its expressions read.

A cast of an operand, a view of it, and small arithmetic on [N] vectors and scalars (such as ``1 + g``) become part of
the cluster's expression, so that the operand is read as the model stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.block import Dataflow, op_name, var_key
from tvm_comfuse.relay_patterns.graph import Graph, Node
from tvm_comfuse.relay_patterns.rules import ELEMENTWISE, VIEWS
from tvm_comfuse.relay_patterns.shapes import FLOATS, Dim, dims_of, dtype_of, equal, placed, plain, product, same

FILLS = {"relax.zeros": 0.0, "relax.ones": 1.0}
#: producers looked through for one operand
PRODUCER_DEPTH = 16


@dataclass(frozen=True)
class Operand:
    """A value the cluster reads.

    expr   Relax variable or constant
    shape  shape class: ``tile`` [M, N], ``col`` [N], ``row`` [M, 1], ``scalar`` [1]
    dtype  as stored: float16, bfloat16 or float32
    """

    expr: Any
    shape: str
    dtype: str


@dataclass
class Operands:
    """The operands of one cluster in order of discovery, and the graph nodes that stand for them."""

    flow: Dataflow
    graph: Graph
    found: list[Operand] = field(default_factory=list)
    _index: dict[tuple[int, str], int] = field(default_factory=dict)

    def node(self, expr: Any, shape: str, depth: int = 0) -> Node | Refusal:
        """Node for `expr`, read with shape class `shape`."""
        value = constant_value(expr)
        if value is not None and shape == "scalar":
            return self.graph.const(value)
        if depth < PRODUCER_DEPTH:
            absorbed = self._absorb(expr, shape, depth + 1)
            if absorbed is not None:
                return absorbed
        dtype = dtype_of(expr)
        if not isinstance(expr, (relax.Var, GenericConst)) or dtype not in FLOATS or dims_of(expr) is None:
            return Refusal(
                "operand-dtype",
                "an operand must be a float16, bfloat16 or float32 tensor",
                {"operand": str(getattr(expr, "name", type(expr).__name__)), "dtype": dtype or "none"},
                "convert it to a floating type before the cluster",
            )
        key = (var_key(expr), shape)
        if key not in self._index:
            self._index[key] = len(self.found)
            self.found.append(Operand(expr, shape, dtype))
        return self.graph.operand(self._index[key], shape)

    def _absorb(self, expr: Any, shape: str, depth: int) -> Node | None:
        """Node for the expression that produces `expr` if it is small enough to be computed in place."""
        call = self.flow.producer(expr)
        name = op_name(call)
        if call is None or not name:
            return None
        fill = _fill_value(name, call)
        if fill is not None:
            return self.graph.const(fill)
        if name in VIEWS:
            return self._absorb_view(expr, call, shape, depth)
        if name not in ELEMENTWISE or shape not in ("col", "scalar") or dtype_of(expr) not in (*FLOATS, "bool"):
            return None
        return self._absorb_elementwise(expr, call, shape, depth)

    def _absorb_view(self, expr: Any, call: Any, shape: str, depth: int) -> Node | None:
        source = call.args[0]
        before, after = dims_of(source), dims_of(expr)
        if before is None or after is None or dtype_of(source) not in FLOATS or dtype_of(expr) not in FLOATS:
            return None
        inner: str | None = shape
        if all(same(dim, 1) for dim in before):
            inner = "scalar"
        elif not same(product(before), product(after)):
            # a broadcast: the source decides how it repeats
            inner = placed(before, after, "tile") if shape == "tile" else None
        node = None if inner is None else self.node(source, inner, depth)
        return node if isinstance(node, Node) else None

    def _absorb_elementwise(self, expr: Any, call: Any, shape: str, depth: int) -> Node | None:
        whole = dims_of(expr)
        args = []
        for arg in call.args:
            dims = dims_of(arg)
            if constant_value(arg) is not None or (dims is not None and all(same(dim, 1) for dim in dims)):
                node = self.node(arg, "scalar", depth)
            elif dims is not None and whole is not None and equal(dims, whole):
                node = self.node(arg, shape, depth)
            else:
                return None
            if isinstance(node, Refusal):
                return None
            args.append(node)
        name = op_name(call)
        return self.graph.elementwise(name, *args, dtype=ELEMENTWISE[name].dtype, **attribute_values(name, call.attrs))


def attribute_values(name: str, attrs: Any) -> dict[str, float]:
    """The attributes of a call that the expression of the elementwise operator `name` takes."""
    return {key: float(getattr(attrs, key)) for key in ELEMENTWISE[name].attrs}


def constant_value(expr: Any) -> float | None:
    """The number of a scalar constant, whatever its rank; None for anything else."""
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return float(expr.value)
    if isinstance(expr, GenericConst):
        dims: tuple[Dim, ...] = dims_of(expr) or ()
        if all(dim == 1 for dim in dims):
            return float(np.asarray(expr.value.numpy()).astype("float64").reshape(-1)[0])
    return None


def broadcast_refusal(name: str, shape: Any, against: Any) -> Refusal:
    """Why an operand that repeats over a part of the rows is not taken."""
    return Refusal(
        "operand-broadcast",
        "an operand must be a scalar, one value per column, one per row, or one per element",
        {"operator": name, "operand": plain(shape), "value": plain(against)},
        "broadcast the operand to the full shape before the cluster",
    )


def _fill_value(name: str, call: Any) -> float | None:
    if name in FILLS:
        return FILLS[name]
    return constant_value(call.args[1]) if name in ("relax.full", "relax.full_like") else None
