"""The rectifier with a learned slope per column."""

from __future__ import annotations

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.graph import Node
from tvm_comfuse.relay_patterns.rules import Lowering, composite


@composite("relax.nn.prelu")
def prelu(use: Lowering) -> Node | Refusal:
    refusal = use.refuse_axes(use.attrs.axis)
    if refusal:
        return refusal
    value, slope = use.args
    return use.make("where", use.make("less", value, 0.0), use.make("multiply", value, slope), value)
