"""From a cluster to its canonical function: plain TensorIR with one block per thing that happens.

Parameters: x [M, K], w [N, K] or [K, N], the operands in order of first use, the outputs.  Blocks: ``gemm``; then for
each stage ``stage_{i}`` (the carried value), ``stage_{i}_out{k}`` (outputs) and ``reduce_{i}`` (row reductions).
Everything between is float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import tvm
from tvm import te, tirx

from tvm_comfuse.relay_patterns.cluster import Cluster, Output
from tvm_comfuse.relay_patterns.graph import Node
from tvm_comfuse.relay_patterns.operands import Operand
from tvm_comfuse.relay_patterns.rules import ELEMENTWISE
from tvm_comfuse.relay_patterns.stages import Merge, Stage, plan_stages
from tvm_comfuse.row_reducers import REDUCERS

#: Relax's operator pattern "opaque": its fusion passes leave the function alone
OPAQUE = 8
F32 = "float32"
#: offsets into a larger buffer need 64-bit loop variables
INT32_LIMIT = 2**31


@dataclass(frozen=True)
class Canonical:
    """A canonical function and what its parameters are in the model.

    func      parameters: x, w, operands, outputs
    operands  in parameter order
    outputs   in parameter order
    """

    func: tirx.PrimFunc
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]


def canonicalize(cluster: Cluster) -> Canonical:
    """The canonical function of `cluster`."""
    return Builder(cluster).build()


class Builder:
    """Makes one function.  base: the node that its first tensors give, by default the product."""

    def __init__(self, cluster: Cluster, base: Node | None = None) -> None:
        self.cluster, self.kind = cluster, cluster.kind
        anchor = cluster.anchor
        nodes = [output.node for output in cluster.outputs]
        self.carried: Node = base or cluster.graph.gemm
        self.stages, self.merges = plan_stages(self.carried, nodes, anchor.columns)
        static = isinstance(anchor.rows, int)
        sizes = (anchor.rows if static else 0, anchor.columns, anchor.depth)
        wide = max(a * b for a, b in combinations(sizes, 2)) >= INT32_LIMIT
        self.index_type = "int64" if wide else "int32"
        self.rows: Any = self._size(anchor.rows) if static else tirx.Var("m", "int64")
        self.columns, self.depth = self._size(anchor.columns), self._size(anchor.depth)
        self.inputs: dict[int, Any] = {}
        self.tensors: dict[Node, Any] = {}

    def _size(self, value: int) -> Any:
        return tirx.IntImm(self.index_type, value)

    def build(self) -> Canonical:
        """The function."""
        base = self._base()
        outputs: list[Any] = []
        summary: list[dict[str, Any]] = []
        for stage in self.stages:
            entry: dict[str, Any] = {"stage": stage.index, "carried": None, "reductions": [], "outputs": []}
            if stage.carried is not None:
                entry["carried"] = self._carry(stage, stage.carried)
            for position, number in enumerate(stage.outputs):
                tensor = self._output(stage, position, self.cluster.outputs[number])
                entry["outputs"].append(tensor.op.name)
                outputs.append(tensor)
            for position, node in enumerate(stage.reductions):
                entry["reductions"].append(self._reduce(stage, position, node))
            summary.append(entry)
        func = te.create_prim_func([*base, *self.inputs.values(), *outputs])
        attrs = {
            "comfuse.kind": self.kind,
            "comfuse.stages": json.dumps(summary),
            "op_pattern": OPAQUE,
            "tirx.is_scheduled": True,
            "tirx.noalias": True,
        }
        if self.cluster.anchor.product == F32:
            attrs["comfuse.wide_product"] = True
        return Canonical(
            _in_order(func.with_attrs(attrs), summary),
            tuple(self.cluster.operands[index] for index in self.inputs),
            tuple(self.cluster.outputs[number] for stage in self.stages for number in stage.outputs),
        )

    def _base(self) -> list[Any]:
        """The first parameters, x and w; makes the ``gemm`` tensor."""
        anchor = self.cluster.anchor
        x = te.placeholder((self.rows, self.depth), anchor.dtype, name="x")
        transposed = anchor.layout == "NK"
        w_shape = (self.columns, self.depth) if transposed else (self.depth, self.columns)
        w = te.placeholder(w_shape, anchor.dtype, name="w")
        k = te.reduce_axis((0, self.depth), name="k")

        def dot(i: Any, j: Any) -> Any:
            weight = w[j, k] if transposed else w[k, j]
            return te.sum(x[i, k].astype(F32) * weight.astype(F32), axis=k)

        self.tensors[self.carried] = te.compute((self.rows, self.columns), dot, name="gemm")
        return [x, w]

    def _carry(self, stage: Stage, node: Node) -> str:
        name = f"stage_{stage.index}"
        tensor = te.compute((self.rows, self.columns), lambda i, j: self._expr(node, i, j), name=name)
        self.tensors[node] = tensor
        self.carried = node
        return name

    def _output(self, stage: Stage, position: int, output: Output) -> Any:
        columns = self.columns if output.node.shape == "tile" else self._size(1)
        return te.compute(
            (self.rows, columns),
            lambda i, j: self._expr(output.node, i, j).astype(output.dtype),
            name=f"stage_{stage.index}_out{position}",
        )

    def _reduce(self, stage: Stage, position: int, node: Node) -> str:
        name = f"reduce_{stage.index}" + (f"_{position}" if position else "")
        merge = self.merges.get(node)
        j = te.reduce_axis((0, self.columns), name="j")
        self.tensors[node] = te.compute(
            (self.rows,),
            lambda i: REDUCERS[node.op](self._expr(node.args[0], i, j), axis=j),
            name=name,
            attrs=self._merge_attrs(merge) if merge else None,
        )
        return name

    def _merge_attrs(self, merge: Merge) -> dict[str, str]:
        return {"comfuse.merge": merge.kind, "comfuse.merge_with": self.tensors[merge.with_].op.name}

    def _expr(self, root: Node, i: Any, j: Any) -> Any:
        """`root` at row `i` and column `j`, over the carried value, operands and row values."""
        done: dict[Node, Any] = {}

        def visit(node: Node) -> Any:
            if node not in done:
                done[node] = self._leaf(node, i, j) if self._is_leaf(node) else apply(node)
            return done[node]

        def apply(node: Node) -> Any:
            args = [visit(arg) for arg in node.args]
            return ELEMENTWISE[node.op].function(*args, **dict(node.attrs))

        return visit(root)

    def _is_leaf(self, node: Node) -> bool:
        return node.kind in ("operand", "const", "reduction") or node is self.carried

    def _leaf(self, node: Node, i: Any, j: Any) -> Any:
        if node.kind == "const":
            return tirx.const(node.value, F32)
        if node.kind == "reduction":
            return self.tensors[node][i]
        if node.kind == "operand":
            index = {"tile": (i, j), "col": (j,), "row": (i, 0), "scalar": (0,)}[node.shape]
            return self._input(node)[index].astype(F32)
        return self.tensors[node][i, j].astype(F32)

    def _input(self, node: Node) -> Any:
        if node.index not in self.inputs:
            operand = self.cluster.operands[node.index]
            shape = operand_shape(operand.shape, self.rows, self.columns)
            name = f"{operand.shape}_{len(self.inputs)}"
            self.inputs[node.index] = te.placeholder(shape, operand.dtype, name=name)
        return self.inputs[node.index]


def operand_shape(shape_class: str, rows: Any, columns: Any) -> tuple[Any, ...]:
    """Shape with which an operand of a shape class is passed."""
    return {"tile": (rows, columns), "col": (columns,), "row": (rows, 1), "scalar": (1,)}[shape_class]


def _in_order(func: tirx.PrimFunc, summary: Sequence[dict[str, Any]]) -> tirx.PrimFunc:
    """`func` with its blocks in the order of the stages; creation orders them by dependence alone."""
    names = ["gemm"]
    for entry in summary:
        names += [entry["carried"]] if entry["carried"] else []
        names += entry["outputs"] + entry["reductions"]
    realize = func.body
    root = realize.block
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    order = {name: position for position, name in enumerate(names)}
    nests.sort(key=lambda nest: order[_block_name(nest)])
    body = tirx.SeqStmt(nests) if len(nests) > 1 else nests[0]
    block = tvm.s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        body,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(tvm.s_tir.SBlockRealize(realize.iter_values, realize.predicate, block))


def _block_name(nest: Any) -> str:
    while isinstance(nest, tirx.For):
        nest = nest.body
    return str(nest.block.name_hint)
