"""What discovery finds: clusters, and a report of every matmul."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.anchor import Anchor
from tvm_comfuse.relay_patterns.graph import Graph, Node, walk
from tvm_comfuse.relay_patterns.operands import Operand


@dataclass(frozen=True)
class Output:
    """A value of the cluster that is used outside.

    node   what it is; a tile or a row value
    dtype  as stored: float16, bfloat16 or float32
    vars   Relax variables that get it, each with a shape of its own
    """

    node: Node
    dtype: str
    vars: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Cluster:
    """A matmul with the operators fused into it.

    anchor    the matmul
    members   numbers of the bindings it replaces, in program order
    ops       Relax operator names, the matmul first
    graph     of its expressions
    operands  every value that its nodes may read; Node.index counts into it
    outputs   in the order of their stages
    stored    values that are variables of the model, with the dtypes that they have there
    """

    anchor: Anchor
    members: tuple[int, ...]
    ops: tuple[str, ...]
    graph: Graph
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    stored: frozenset[tuple[Node, str]] = frozenset()

    @property
    def kind(self) -> str:
        """``gemm_reduce`` with a row reduction, ``gemm_elementwise`` without."""
        nodes = walk(output.node for output in self.outputs)
        return "gemm_reduce" if any(node.kind == "reduction" for node in nodes) else "gemm_elementwise"


@dataclass
class MatmulReport:
    """One matmul of the model.

    name      of its Relax variable, with ``#2``, ``#3``, ... where several of the module have one name
    shape     [M, N, K]; text for symbolic sizes
    fused     whether it is the anchor of a cluster
    ops       Relax operators of the cluster, the matmul first; without a cluster the matmul alone
    cluster   what was found, None when the matmul was refused
    refusals  why there is no cluster, and why growth stopped at each operator that uses one of its values
    """

    name: str
    shape: list[int | str]
    fused: bool
    ops: list[str]
    cluster: Cluster | None = None
    refusals: list[Refusal] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "name": self.name,
            "shape": self.shape,
            "fused": self.fused,
            "kind": self.cluster.kind if self.cluster else None,
            "ops": self.ops,
            "refusals": [refusal.to_json() for refusal in self.refusals],
        }


@dataclass
class Discovery:
    """Every matmul of a function, in program order."""

    matmuls: list[MatmulReport] = field(default_factory=list)

    @property
    def clusters(self) -> list[Cluster]:
        """The clusters found, in program order of their matmuls."""
        return [report.cluster for report in self.matmuls if report.fused and report.cluster is not None]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain JSON values, one entry a matmul."""
        return [report.to_json() for report in self.matmuls]
