"""Growing a cluster downstream from a matmul.

The bindings behind the matmul are visited once in program order; each that reads a value of the cluster is taken when
it is legal and otherwise gives a refusal.  Taking it must keep the dependences between clusters and other bindings free
of cycles: nothing it reads from outside may depend on the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import ir

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.admit import Admission, Value
from tvm_comfuse.relay_patterns.anchor import Anchor
from tvm_comfuse.relay_patterns.block import Dataflow, op_name, used_vars, var_key
from tvm_comfuse.relay_patterns.cluster import Cluster, Output
from tvm_comfuse.relay_patterns.graph import Graph, Node, walk
from tvm_comfuse.relay_patterns.operands import Operands
from tvm_comfuse.relay_patterns.shapes import FLOATS, dims_of, dtype_of

#: an expression is copied wherever its value is used; a larger one costs more than writing the value once
MAX_EXPRESSION = 1024
#: parameters of one kernel
MAX_OPERANDS = 16


@dataclass
class _Growth:
    """One attempt."""

    flow: Dataflow
    anchor: Anchor
    number: int
    banned: dict[int, Refusal]
    reductions: bool
    values: dict[int, Value] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = Graph(self.anchor.columns)
        self.operands = Operands(self.flow, self.graph)
        self.admission = Admission(self.anchor, self.graph, self.operands, self.values)

    def run(self) -> None:
        """Visits every binding behind the matmul."""
        self._take(self.anchor.index, self.graph.gemm)
        for index in range(self.anchor.index + 1, len(self.flow)):
            value = self.flow.bindings[index].value
            reads = any(var_key(var) in self.values for var in used_vars(value))
            if not reads or index not in self.flow.live or not isinstance(value, ir.Call):
                continue
            node = self._admit(index, value)
            if isinstance(node, Refusal):
                self.refusals.append(node)
            else:
                self._take(index, node)

    def _take(self, index: int, node: Node) -> None:
        var = self.flow.bindings[index].var
        dims = dims_of(var)
        assert dims is not None  # the callers have checked it
        self.values[var_key(var)] = Value(node, dims, dtype_of(var))
        self.members.append(index)

    def _admit(self, index: int, call: Any) -> Node | Refusal:
        var = self.flow.bindings[index].var
        where = {"operator": op_name(call) or "call", "at": var.name}
        if index in self.banned:
            return self.banned[index]
        owner = self.flow.owner.get(index, self.number)
        if owner != self.number or op_name(call) == "relax.matmul":
            return Refusal(
                "foreign-matmul",
                "the operator belongs to the cluster of another matmul",
                where,
                "the value is an operand there; nothing is lost but one read and one write of it",
            )
        node = self.admission.node(call, var)
        if isinstance(node, Refusal):
            return Refusal(node.code, node.clause, {**where, **node.numbers}, node.remedy)
        return self._check(node, where) or node

    def _check(self, node: Node, where: dict[str, Any]) -> Refusal | None:
        """The rules about the cluster as a whole once `node` is in it."""
        nodes = list(walk([node]))
        if not self.reductions and any(each.kind == "reduction" for each in nodes):
            return Refusal("reduction-refused", "the cluster must do without row reductions", where, "see the refusal")
        if node.size > MAX_EXPRESSION:
            numbers = {**where, "size": node.size, "limit": MAX_EXPRESSION}
            return Refusal("expression-size", "the expression has grown too large to be recomputed", numbers)
        starts = {index for each in nodes if (index := self._source(each)) is not None}
        if self.flow.depends(starts, set(self.members)):
            return Refusal(
                "not-convex",
                "an operand depends on the cluster through an operator outside it",
                where,
                "the cluster's value is written for that operator, so it ends here",
            )
        count = len({each.index for value in self.values.values() for each in walk([value.node, node])} - {-1})
        if count > MAX_OPERANDS:
            numbers = {**where, "operands": count, "limit": MAX_OPERANDS}
            return Refusal("operand-count", "the cluster would read too many operands", numbers)
        return None

    def _source(self, node: Node) -> int | None:
        """Binding that computes an operand, if it is in this block."""
        return self.flow.index_of(self.operands.found[node.index].expr) if node.kind == "operand" else None

    def inputs(self) -> frozenset[int]:
        """Bindings that the cluster reads."""
        roots = [value.node for value in self.values.values()]
        read = {self._source(node) for node in walk(roots)}
        read |= {self.flow.index_of(self.anchor.x), self.flow.index_of(self.anchor.w)}
        return frozenset(index for index in read if index is not None)

    def leaving(self) -> list[int]:
        """Members whose variable is used outside the cluster."""
        inside = set(self.members)
        return [index for index in self.members if self.flow.read_outside(index, inside)]

    def outputs(self) -> tuple[Output, ...]:
        """One output for each different value and type that leaves."""
        merged: dict[tuple[Node, str], list[Any]] = {}
        for index in self.leaving():
            var = self.flow.bindings[index].var
            value = self.values[var_key(var)]
            merged.setdefault((value.node, value.dtype), []).append(var)
        outputs = [Output(node, dtype, tuple(vars_)) for (node, dtype), vars_ in merged.items()]
        return tuple(sorted(outputs, key=lambda output: output.node.level))


def grow(flow: Dataflow, anchor: Anchor, number: int, reductions: bool = True) -> tuple[Cluster | None, list[Refusal]]:
    """The largest legal cluster of `anchor`, and why it did not grow further.

    number      of the cluster; what other clusters of `flow` own is not touched, what it gets is claimed
    reductions  False: without row reductions and what depends on them
    """
    banned: dict[int, Refusal] = {}
    while True:
        growth = _Growth(flow, anchor, number, banned, reductions)
        growth.run()
        unfit = {index: refusal for index in growth.leaving() if (refusal := _unfit_output(growth, index))}
        if not unfit:
            break
        banned.update(unfit)
    outputs = growth.outputs()
    if not outputs:
        dead = Refusal("unused", "nothing uses the product", {}, "remove it")
        return None, [dead, *growth.refusals]
    flow.claim(number, growth.members, growth.inputs())
    names = tuple(op_name(flow.bindings[index].value) for index in growth.members)
    stored = frozenset((value.node, value.dtype) for value in growth.values.values())
    members, operands = tuple(growth.members), tuple(growth.operands.found)
    cluster = Cluster(anchor, members, names, growth.graph, operands, outputs, stored)
    return cluster, growth.refusals


def _unfit_output(growth: _Growth, index: int) -> Refusal | None:
    """Why the value of a member cannot leave the cluster."""
    binding = growth.flow.bindings[index]
    dtype = growth.values[var_key(binding.var)].dtype
    if dtype in FLOATS:
        return None
    return Refusal(
        "integer-output",
        "an output must be float16, bfloat16 or float32",
        {"operator": op_name(binding.value), "at": binding.var.name, "dtype": dtype},
        "the operator runs after the cluster",
    )
