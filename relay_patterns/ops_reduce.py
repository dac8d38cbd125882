"""Row reductions: the statistics of Relax over the last axis."""

from __future__ import annotations

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.graph import Node
from tvm_comfuse.relay_patterns.rules import Lowering, composite


@composite("relax.sum")
def row_sum(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.graph.reduction("sum", use.args[0])


@composite("relax.max")
def row_max(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.graph.reduction("max", use.args[0])


@composite("relax.min")
def row_min(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.graph.reduction("min", use.args[0])


@composite("relax.mean")
def row_mean(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.graph.mean(use.args[0])


@composite("relax.variance")
def row_variance(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.graph.variance(use.args[0])


@composite("relax.std")
def row_std(use: Lowering) -> Node | Refusal:
    return use.refuse_axes(use.attrs.axis) or use.make("sqrt", use.graph.variance(use.args[0]))
