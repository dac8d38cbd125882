"""The split form of a cluster: two functions instead of one, with an [M, N] tensor through memory between them.

The first is the product with what is elementwise before the first row reduction, a cluster without reductions.  The second, of
the kind ``rows``, reads its result once and computes everything from that reduction on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import te, tirx

from tvm_comfuse.relay_patterns.canonical import Builder, Canonical, canonicalize
from tvm_comfuse.relay_patterns.cluster import Cluster, Output
from tvm_comfuse.relay_patterns.graph import Node, walk
from tvm_comfuse.relay_patterns.stages import plan_stages

ROWS = "rows"
#: operators whose result is as exact, for its size, with an input rounded to half precision as it is when rounded itself
_LINEAR = frozenset({"relax.add", "relax.subtract", "relax.multiply", "relax.broadcast_to"})


@dataclass(frozen=True)
class SplitForm:
    """Two canonical functions, perhaps scheduled.

    gemm     outputs are those of the cluster that need no row value, and the value between
    rows     its first operand, in front of those of the cluster, is the value between: parameter v [M, N]
    between  the gemm's output that `rows` reads, by its number
    """

    gemm: Canonical
    rows: Canonical
    between: int

    def with_functions(self, gemm: tirx.PrimFunc, rows: tirx.PrimFunc) -> SplitForm:
        """The same with other functions of the same parameters."""
        return SplitForm(replace(self.gemm, func=gemm), replace(self.rows, func=rows), self.between)


def split_form(cluster: Cluster) -> SplitForm:
    """The split form of a cluster with a row reduction.

    The value between the functions has the dtype of the product in the model: it is rounded where eager PyTorch rounds one.
    """
    dtype = cluster.anchor.product
    between = _between(cluster, dtype)
    early = [output for output in cluster.outputs if output.node.level == 0]
    if not any(output.node is between and output.dtype == dtype for output in early):
        early.append(Output(between, dtype, ()))
    gemm = canonicalize(replace(cluster, outputs=tuple(early)))
    late = tuple(output for output in cluster.outputs if output.node.level > 0)
    rows = _RowsBuilder(replace(cluster, outputs=late), between, dtype).build()
    number = next(n for n, output in enumerate(gemm.outputs) if output.node is between and output.dtype == dtype)
    return SplitForm(gemm, rows, number)


def _between(cluster: Cluster, dtype: str) -> Node:
    """What the first stage carries, if the model rounds it to `dtype` as well and it is no less exact so than the product would
    be; else the product, which the model has in `dtype`."""
    gemm = cluster.graph.gemm
    stages, _ = plan_stages(gemm, [output.node for output in cluster.outputs], cluster.anchor.columns)
    carried = stages[0].carried
    if carried is None or (carried, dtype) not in cluster.stored:
        return gemm
    for node in walk([carried]):
        wide = node.kind == "operand" and cluster.operands[node.index].dtype not in (dtype, cluster.anchor.dtype)
        if wide or (node.kind == "elementwise" and node.op not in _LINEAR):
            return gemm
    return carried


class _RowsBuilder(Builder):
    """Makes the rows function: its base is the value between instead of a product."""

    def __init__(self, cluster: Cluster, between: Node, dtype: str) -> None:
        super().__init__(cluster, base=between)
        self.dtype, self.kind = dtype, ROWS

    def _base(self) -> list[Any]:
        v = te.placeholder((self.rows, self.columns), self.dtype, name="v")
        self.tensors[self.carried] = v
        return [v]
