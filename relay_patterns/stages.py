"""Stages: what is computed between two row reductions, and which value is carried from one to the next.

Only one tile value is kept across a reduction, because it lives in registers.  It is the value furthest from the
product through which everything that comes later goes; what that value does not give is recomputed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_comfuse.relay_patterns.graph import Node, walk

#: how near c * N must be to 1 for a row sum times c to be the mean: float32 rounding and nothing more
MEAN_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Merge:
    """Two reductions that need only one exchange.

    kind  ``moments``: sum v, then sum (v - mean)^2;  ``softmax``: max v, then sum exp(v - max)
    with_ the first of the two
    """

    kind: str
    with_: Node


@dataclass(frozen=True)
class Stage:
    """One stage.

    carried     value stored here, or None when the older one stays
    reductions  row reductions computed at the end of it
    outputs     numbers of the cluster's outputs written in it
    """

    index: int
    carried: Node | None
    reductions: tuple[Node, ...]
    outputs: tuple[int, ...]


def find_merges(reductions: Sequence[Node], columns: int) -> dict[Node, Merge]:
    """The second reductions of the pairs that can share an exchange."""
    merges = {}
    for node in reductions:
        merge = _moments(node, columns) or _softmax(node)
        if merge is not None:
            merges[node] = merge
    return merges


def plan_stages(gemm: Node, outputs: Sequence[Node], columns: int) -> tuple[list[Stage], dict[Node, Merge]]:
    """The stages in order (one more than there are levels of reductions) and the merge pairs."""
    reductions = [node for node in walk(outputs) if node.kind == "reduction"]
    merges = find_merges(reductions, columns)
    count = 1 + max([node.level for node in reductions], default=0)
    stages: list[Stage] = []
    carried = gemm
    for index in range(count):
        here = tuple(node for node in reductions if node.reduced_in == index)
        written = tuple(number for number, node in enumerate(outputs) if node.level == index)
        later = [node.args[0] for node in reductions if node.reduced_in >= index]
        later += [node for node in outputs if node.level >= index]
        value = None
        # the pair's second reduction is computed with the first, from the same carried value
        if not any(node in merges for node in here):
            last_single = index == count - 1 and sum(outputs[number].shape == "tile" for number in written) < 2
            value = None if last_single else _gate(carried, later, index)
        stages.append(Stage(index, value, here, written))
        carried = value or carried
    return stages, merges


def _gate(carried: Node, roots: Sequence[Node], stage: int) -> Node | None:
    """The last value on every way from `roots` down to `carried` that `stage` can compute; None if there is none."""
    below = set(walk(roots, _leaves(carried, roots)))
    if carried not in below:
        return None
    best = None
    for node in walk(roots, _leaves(carried, roots)):
        fit = node is not carried and node.shape == "tile" and node.dtype == "float32" and node.level <= stage
        if fit and node.kind == "elementwise" and carried not in _reached(roots, carried, node):
            # inputs come before users, so a later find is further from the product
            best = node
    return best


def _leaves(carried: Node, roots: Sequence[Node]) -> set[Node]:
    """Where an expression over `carried` ends: at it and at row values."""
    return {carried} | {node for node in walk(roots) if node.kind == "reduction"}


def _reached(roots: Sequence[Node], carried: Node, blocked: Node) -> set[Node]:
    return set(walk(roots, _leaves(carried, roots) | {blocked}))


def _moments(node: Node, columns: int) -> Merge | None:
    """sum(d * d) with d = v - sum(v) * (1 / N)."""
    square = node.args[0]
    if node.op != "sum" or square.op != "relax.multiply" or square.args[0] is not square.args[1]:
        return None
    centred = square.args[0]
    if centred.op != "relax.subtract" or centred.args[1].op != "relax.multiply":
        return None
    value, (total, factor) = centred.args[0], centred.args[1].args
    is_mean = total.kind == "reduction" and total.op == "sum" and total.args[0] is value and factor.kind == "const"
    return Merge("moments", total) if is_mean and abs(factor.value * columns - 1.0) < MEAN_TOLERANCE else None


def _softmax(node: Node) -> Merge | None:
    """sum(exp(v - max(v)))."""
    weight = node.args[0]
    if node.op != "sum" or weight.op != "relax.exp" or weight.args[0].op != "relax.subtract":
        return None
    value, largest = weight.args[0].args
    is_max = largest.kind == "reduction" and largest.op == "max" and largest.args[0] is value
    return Merge("softmax", largest) if is_max else None
