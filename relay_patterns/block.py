"""A dataflow block as a graph of its bindings: who uses whom, and which cluster owns what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import ir, relax


def var_key(var: Any) -> int:
    """Identity of a variable or constant; valid while its module is alive."""
    return int(var.id_)


def op_name(expr: Any) -> str:
    """Name of the Relax operator a call applies; empty for anything else."""
    return str(expr.op.name) if isinstance(expr, ir.Call) and isinstance(expr.op, ir.Op) else ""


def used_vars(expr: Any) -> list[Any]:
    """Variables an expression reads."""
    return list(relax.analysis.free_vars(expr))


class Dataflow:
    """The bindings of one dataflow block, numbered in program order.

    Clusters are contracted: an edge into any binding of a cluster is an edge into the whole cluster.
    """

    def __init__(self, block: relax.DataflowBlock) -> None:
        self.block = block
        self.bindings = list(block.bindings)
        self.position = {var_key(binding.var): index for index, binding in enumerate(self.bindings)}
        self.inputs = [self._read_by(binding.value) for binding in self.bindings]
        #: who reads each binding; readers that nothing needs do not count
        self.users: list[list[int]] = [[] for _ in self.bindings]
        self.live: set[int] = set()
        for index in reversed(range(len(self.bindings))):
            if self.escapes(index) or self.users[index]:
                self.live.add(index)
                for position in self.inputs[index]:
                    self.users[position].append(index)
        #: cluster number of each binding that has one
        self.owner: dict[int, int] = {}
        #: bindings each cluster replaces, and those it reads, by cluster number
        self.cluster_members: dict[int, frozenset[int]] = {}
        self.cluster_inputs: dict[int, frozenset[int]] = {}

    def _read_by(self, value: Any) -> list[int]:
        used = (self.position.get(var_key(var)) for var in used_vars(value))
        return sorted({position for position in used if position is not None})

    def __len__(self) -> int:
        return len(self.bindings)

    def producer(self, expr: Any) -> Any:
        """The value bound in this block to a variable, else None."""
        index = self.index_of(expr)
        return None if index is None else self.bindings[index].value

    def index_of(self, expr: Any) -> int | None:
        """Number of the binding that defines a variable of this block, else None."""
        return self.position.get(var_key(expr)) if isinstance(expr, relax.Var) else None

    def escapes(self, index: int) -> bool:
        """Whether the binding's variable can be used outside the block."""
        return not isinstance(self.bindings[index].var, relax.DataflowVar)

    def claim(self, number: int, members: Iterable[int], inputs: frozenset[int]) -> None:
        """Gives `members` to cluster `number`, which reads `inputs`; takes away what it had before."""
        self.release(number)
        self.cluster_members[number] = frozenset(members)
        self.cluster_inputs[number] = inputs
        self.owner.update(dict.fromkeys(self.cluster_members[number], number))

    def release(self, number: int) -> None:
        """Forgets cluster `number`."""
        for member in self.cluster_members.pop(number, frozenset()):
            del self.owner[member]
        self.cluster_inputs.pop(number, None)

    def read_outside(self, index: int, members: set[int]) -> bool:
        """Whether anything but `members`, which no cluster owns yet, reads the binding.

        Another cluster reads its inputs and nothing else: a cast in front of it may have become a part of it.
        """
        if self.escapes(index) or any(index in inputs for inputs in self.cluster_inputs.values()):
            return True
        return any(user not in members and user not in self.owner for user in self.users[index])

    def depends(self, starts: Iterable[int], members: set[int]) -> bool:
        """Whether a binding of `starts` is in `members` or needs one of them, clusters counted as one piece."""
        # nothing before the first member and the first clustered binding can lead to a member
        floor = min(members | self.owner.keys())
        stack, seen = list(starts), set()
        while stack:
            index = stack.pop()
            if index in members:
                return True
            if index in seen or index < floor:
                continue
            seen.add(index)
            number = self.owner.get(index)
            if number is None:
                stack.extend(self.inputs[index])
            else:
                seen |= self.cluster_members[number]
                stack.extend(self.cluster_inputs[number])
        return False
