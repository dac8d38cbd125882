"""One spelling for expressions that models write in several ways.

Only identities that keep the value (up to the last bit of float32) and the propagation of NaN are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_comfuse.relay_patterns.graph import Graph, Node

FOLDED: dict[str, Callable[[float, float], float]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
}


def simplify(graph: Graph, op: str, args: tuple[Node, ...]) -> Node | None:
    """The simpler node for `op(*args)`, or None when there is none."""
    if len(args) == 1:
        return graph.elementwise("relax.multiply", args[0], args[0]) if op == "relax.square" else None
    if len(args) != 2:
        return None
    left, right = args
    if op in FOLDED and left.kind == right.kind == "const":
        return graph.const(FOLDED[op](left.value, right.value))
    if op == "relax.power" and right.kind == "const":
        return _power(graph, left, right.value)
    if op == "relax.multiply" and right.kind == "const" and right.value == 1.0:
        return left
    if op == "relax.divide" and right.kind == "const":
        return _divide(graph, left, right.value)
    if op == "relax.add" and right.kind == "elementwise" and right.op == "relax.negative":
        return graph.elementwise("relax.subtract", left, right.args[0])
    return None


def _power(graph: Graph, base: Node, exponent: float) -> Node | None:
    if exponent == 1.0:
        return base
    if exponent == 2.0:
        return graph.elementwise("relax.multiply", base, base)
    if exponent == 3.0:
        return graph.elementwise("relax.multiply", graph.elementwise("relax.multiply", base, base), base)
    if exponent == -1.0:
        return graph.elementwise("relax.divide", graph.const(1.0), base)
    if exponent in (0.5, -0.5):
        return graph.elementwise("relax.sqrt" if exponent > 0 else "relax.rsqrt", base)
    return None


def _divide(graph: Graph, value: Node, divisor: float) -> Node | None:
    """A row sum over N is a mean, and powers of two have an exact reciprocal; other quotients stay as they are."""
    if divisor == 0.0 or not math.isfinite(divisor):
        return None
    exact = math.frexp(divisor)[0] in (0.5, -0.5)
    if exact or (value.shape == "row" and divisor == graph.columns):
        return graph.elementwise("relax.multiply", value, graph.const(1.0 / divisor))
    return None
