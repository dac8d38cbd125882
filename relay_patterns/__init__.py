"""Cluster discovery: finds each matmul of a Relax module with the operators that can be fused into it.

    discover(mod)          what there is, and why what is not fused is not
    FuseClusters(accept)   the pass that replaces each cluster by a call of one function

Operators are added with @elementwise, @composite and VIEWS (rules.py).
"""

from tvm_comfuse.relay_patterns import (
    ops_activation,
    ops_arithmetic,
    ops_compare,
    ops_norm,
    ops_prelu,
    ops_reduce,
    ops_softmax,
)
from tvm_comfuse.relay_patterns.canonical import Canonical, canonicalize
from tvm_comfuse.relay_patterns.cluster import Cluster, Discovery, MatmulReport, Output
from tvm_comfuse.relay_patterns.discover import discover
from tvm_comfuse.relay_patterns.operands import Operand
from tvm_comfuse.relay_patterns.rewrite import FuseClusters, fuse_clusters
from tvm_comfuse.relay_patterns.rules import COMPOSITE, ELEMENTWISE, VIEWS, Lowering, composite, elementwise

__all__ = [
    "COMPOSITE",
    "ELEMENTWISE",
    "VIEWS",
    "Canonical",
    "Cluster",
    "Discovery",
    "FuseClusters",
    "Lowering",
    "MatmulReport",
    "Operand",
    "Output",
    "canonicalize",
    "composite",
    "discover",
    "elementwise",
    "fuse_clusters",
    "ops_activation",
    "ops_arithmetic",
    "ops_compare",
    "ops_norm",
    "ops_prelu",
    "ops_reduce",
    "ops_softmax",
]
