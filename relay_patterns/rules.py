"""The registries of operators a cluster may contain.

An elementwise operator needs one decorated function that gives its float32 TensorIR expression:

    @elementwise("relax.nn.relu")
    def relu(x):
        return tirx.Select(x < 0.0, zero, x)

An operator with row reductions inside needs one function that builds graph nodes:

    @composite("relax.nn.softmax")
    def softmax(use: Lowering) -> Node | Refusal: ...

A view (reshape and the like, casts) needs nothing but its name: whether it is legal follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.graph import Graph, Node


@dataclass(frozen=True)
class Elementwise:
    """Registered elementwise operator.

    function  from float32 (or bool) expressions, and the attributes by keyword, to one expression
    attrs     attributes of the Relax call that `function` takes
    dtype     ``float32`` or ``bool``: type of the result
    """

    name: str
    function: Callable[..., Any]
    attrs: tuple[str, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Lowering:
    """One use of a composite operator.

    graph  makes nodes
    args   nodes of the inputs, broadcast against the first, which is the cluster's value
    attrs  attributes of the Relax call
    ndim   rank of the first input in Relax
    """

    graph: Graph
    args: tuple[Node, ...]
    attrs: Any
    ndim: int

    def make(self, op: str, *args: Node | float) -> Node:
        """Elementwise node; `op` without the prefix ``relax.``; numbers become constants."""
        nodes = [arg if isinstance(arg, Node) else self.graph.const(arg) for arg in args]
        name = f"relax.{op}"
        return self.graph.elementwise(name, *nodes, dtype=ELEMENTWISE[name].dtype)

    def refuse_axes(self, axes: int | Sequence[int] | None) -> Refusal | None:
        """A refusal unless `axes` is the last axis of a tile value."""
        given = [axes] if isinstance(axes, int) else list(axes) if axes is not None else list(range(self.ndim))
        normal = sorted(int(axis) % self.ndim for axis in given)
        if self.args[0].shape == "tile" and normal == [self.ndim - 1]:
            return None
        return Refusal(
            "not-last-axis",
            "a row reduction must be over the last axis, the columns of the product",
            {"axes": [int(axis) for axis in given], "ndim": self.ndim},
            "reduce over the last axis, or transpose before the matmul",
        )


ELEMENTWISE: dict[str, Elementwise] = {}
COMPOSITE: dict[str, Callable[[Lowering], Node | Refusal]] = {}
#: same elements in the same order, another shape or type
VIEWS: set[str] = {
    "relax.reshape",
    "relax.flatten",
    "relax.expand_dims",
    "relax.squeeze",
    "relax.broadcast_to",
    "relax.astype",
}


def elementwise(name: str, attrs: tuple[str, ...] = (), dtype: str = "float32") -> Callable[..., Any]:
    """Registers the decorated function as the float32 expression of the Relax operator `name`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        ELEMENTWISE[name] = Elementwise(name, function, attrs, dtype)
        return function

    return register


def composite(name: str) -> Callable[..., Any]:
    """Registers the decorated function as the lowering of the Relax operator `name` to graph nodes."""

    def register(function: Callable[[Lowering], Node | Refusal]) -> Callable[[Lowering], Node | Refusal]:
        COMPOSITE[name] = function
        return function

    return register


def known(name: str) -> bool:
    """Whether a cluster may contain the operator at all."""
    return name in ELEMENTWISE or name in COMPOSITE or name in VIEWS
