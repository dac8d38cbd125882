"""The expression graph of a cluster: what is computed for every element of the result, free of Relax and of shapes.

A node is immutable and interned: two equal expressions are one node, so that identity is equality and a graph never
holds the same work twice.  A node stands for one of four shape classes over a result of M rows and N columns:

* ``tile``    [M, N]
* ``col``     [N], one value per column
* ``row``     [M], one value per row
* ``scalar``  one value
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: constant arguments go last, so that one spelling of a commutative operator is left
COMMUTATIVE = frozenset({"relax.add", "relax.multiply", "relax.maximum", "relax.minimum"})
BROADCAST = "relax.broadcast_to"


@dataclass(frozen=True, eq=False)
class Node:
    """One value.

    kind    ``gemm``, ``operand``, ``const``, ``elementwise`` or ``reduction``
    op      operator name of an elementwise node (that of Relax); ``sum``, ``max`` or ``min`` of a reduction
    args    inputs
    attrs   attributes of an elementwise operator, sorted by name
    shape   shape class: ``tile``, ``col``, ``row`` or ``scalar``
    dtype   ``float32`` or ``bool``
    index   which operand
    value   value of a constant
    level   row reductions on the longest way from the product to this value
    size    operators of the expression written out as a tree, reductions counted as leaves
    """

    kind: str
    op: str = ""
    args: tuple[Node, ...] = ()
    attrs: tuple[tuple[str, float], ...] = ()
    shape: str = "scalar"
    dtype: str = "float32"
    index: int = -1
    value: float = 0.0
    level: int = 0
    size: int = 1

    @property
    def reduced_in(self) -> int:
        """Stage that computes this reduction."""
        return self.args[0].level

    def __str__(self) -> str:
        if self.kind == "gemm":
            return "gemm"
        if self.kind == "operand":
            return f"{self.shape}{self.index}"
        if self.kind == "const":
            return f"{self.value:g}"
        inner = [str(arg) for arg in self.args] + [f"{key}={value:g}" for key, value in self.attrs]
        return f"{self.op.removeprefix('relax.')}({', '.join(inner)})"


class Graph:
    """Makes nodes.  Equal requests give the same node."""

    def __init__(self, columns: int) -> None:
        #: N, the length of a row; a mean needs it
        self.columns = columns
        self._interned: dict[tuple[object, ...], Node] = {}
        self.gemm = self._intern(Node("gemm", shape="tile"))

    def operand(self, index: int, shape: str) -> Node:
        """Operand number `index` of shape class `shape`, already converted to float32."""
        return self._intern(Node("operand", index=index, shape=shape))

    def const(self, value: float) -> Node:
        """A scalar constant."""
        return self._intern(Node("const", value=float(value)))

    def elementwise(self, op: str, *args: Node, dtype: str = "float32", **attrs: float) -> Node:
        """`op` applied element by element; `args` broadcast by shape class."""
        from tvm_comfuse.relay_patterns.simplify import simplify

        if op in COMMUTATIVE and args[0].kind == "const" and args[1].kind != "const":
            args = (args[1], args[0])
        simpler = simplify(self, op, args)
        if simpler is not None:
            return simpler
        return self._intern(
            Node(
                "elementwise",
                op=op,
                args=tuple(args),
                attrs=tuple(sorted(attrs.items())),
                shape=join(arg.shape for arg in args),
                dtype=dtype,
                level=max(arg.level for arg in args),
                size=1 + sum(arg.size for arg in args),
            )
        )

    def reduction(self, op: str, arg: Node) -> Node:
        """`op` (``sum``, ``max``, ``min``) of a tile value over its row: a row value."""
        return self._intern(Node("reduction", op=op, args=(arg,), shape="row", level=arg.level + 1))

    def broadcast(self, arg: Node) -> Node:
        """The tile value that holds `arg` repeated."""
        if arg.shape == "tile":
            return arg
        return self._intern(
            Node("elementwise", op=BROADCAST, args=(arg,), shape="tile", level=arg.level, size=1 + arg.size)
        )

    def mean(self, arg: Node) -> Node:
        """Arithmetic mean of a tile value over its row: a row value."""
        return self.elementwise("relax.multiply", self.reduction("sum", arg), self.const(1.0 / self.columns))

    def variance(self, arg: Node) -> Node:
        """Mean of the squared distances from the mean (divided by N): a row value."""
        centred = self.elementwise("relax.subtract", arg, self.mean(arg))
        return self.mean(self.elementwise("relax.multiply", centred, centred))

    def _intern(self, node: Node) -> Node:
        key = (node.kind, node.op, tuple(map(id, node.args)), node.attrs, node.shape, node.index, repr(node.value))
        return self._interned.setdefault(key, node)


def join(shapes: Iterable[str]) -> str:
    """Shape class of an elementwise result."""
    present = set(shapes)
    if "tile" in present or {"row", "col"} <= present:
        return "tile"
    return next((shape for shape in ("row", "col") if shape in present), "scalar")


def walk(roots: Iterable[Node], leaves: frozenset[Node] | set[Node] = frozenset()) -> Iterator[Node]:
    """Every node that `roots` need, inputs before users, in a fixed order; nothing below a node of `leaves`."""
    done: set[Node] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            if node not in leaves:
                stack.extend((arg, False) for arg in reversed(node.args))
