"""Normalisations over the last axis."""

from __future__ import annotations

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.graph import Node
from tvm_comfuse.relay_patterns.rules import Lowering, composite


@composite("relax.nn.layer_norm")
def layer_norm(use: Lowering) -> Node | Refusal:
    refusal = use.refuse_axes(use.attrs.axes)
    if refusal:
        return refusal
    value, gamma, beta = use.args
    centred = use.make("subtract", value, use.graph.mean(value))
    scale = use.make("rsqrt", use.make("add", use.graph.variance(value), use.attrs.epsilon))
    result = use.make("multiply", centred, scale)
    if use.attrs.scale:
        result = use.make("multiply", result, gamma)
    return use.make("add", result, beta) if use.attrs.center else result


@composite("relax.nn.rms_norm")
def rms_norm(use: Lowering) -> Node | Refusal:
    refusal = use.refuse_axes(use.attrs.axes)
    if refusal:
        return refusal
    value, weight = use.args
    mean_square = use.graph.mean(use.make("multiply", value, value))
    scale = use.make("rsqrt", use.make("add", mean_square, use.attrs.epsilon))
    return use.make("multiply", use.make("multiply", value, scale), weight)
