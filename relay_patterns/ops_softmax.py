"""Softmax and its logarithm over the last axis."""

from __future__ import annotations

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.graph import Node
from tvm_comfuse.relay_patterns.rules import Lowering, composite


@composite("relax.nn.softmax")
def softmax(use: Lowering) -> Node | Refusal:
    refusal = use.refuse_axes(use.attrs.axis)
    if refusal:
        return refusal
    value = use.args[0]
    weight = use.make("exp", use.make("subtract", value, use.graph.reduction("max", value)))
    return use.make("divide", weight, use.graph.reduction("sum", weight))


@composite("relax.nn.log_softmax")
def log_softmax(use: Lowering) -> Node | Refusal:
    refusal = use.refuse_axes(use.attrs.axis)
    if refusal:
        return refusal
    value = use.args[0]
    shifted = use.make("subtract", value, use.graph.reduction("max", value))
    return use.make("subtract", shifted, use.make("log", use.graph.reduction("sum", use.make("exp", shifted))))
