"""The protocol of a kernel as a picture: who waits for whom, drawn from the kernel itself as Mermaid text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from tvm_comfuse.verify.static.barriers import ARM, ARRIVE, INIT, LOAD, REMOTE, WAIT, Uses, barrier_uses
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP
from tvm_comfuse.verify.static.index import TAKE, Instruction, KernelIndex, index_of
from tvm_comfuse.verify.static.named_barriers import ARRIVE as NAMED_ARRIVE
from tvm_comfuse.verify.static.named_barriers import SYNC as NAMED_SYNC
from tvm_comfuse.verify.static.scene import scenes
from tvm_comfuse.verify.static.shared_memory import STORE

POST = "comfuse_post_"


@dataclass
class _Role:
    """A set of warps that runs the same code.  warps: (warp group, warp) pairs."""

    warps: frozenset[tuple[int, int]]
    works: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As the documentation calls it."""
        groups = sorted({group for group, _ in self.warps})
        if len(self.warps) == 1:
            ((group, warp),) = self.warps
            return f"warp group {group}, warp {warp}"
        return "warp groups " + ", ".join(map(str, groups)) if len(groups) > 1 else f"warp group {groups[0]}"


class _Diagram:
    def __init__(self, kernel: tirx.PrimFunc):
        self.index = index_of(kernel)
        self.scene, _ = scenes(self.index)
        self.roles: dict[frozenset[tuple[int, int]], _Role] = {}
        communicating = [i for i in self.index.instructions if i.nest and i.name != INIT and _communicates(i)]
        sets = {self._warps(instruction) for instruction in communicating}
        self.maximal = [warps for warps in sets if not any(warps < other for other in sets)]
        self.edges: list[str] = []

    def draw(self) -> str:
        """All lines."""
        barriers = [line for uses in barrier_uses(self.index) for line in self._barrier(uses)]
        barriers += self._turns() + self._meetings() + self._mailboxes()
        roles = [
            f'    {self._id(role)}["{"<br/>".join([role.name, *dict.fromkeys(role.works)])}"]'
            for role in self.roles.values()
        ]
        return "\n".join(["flowchart LR", *roles, *barriers, *dict.fromkeys(self.edges)]) + "\n"

    def _id(self, role: _Role) -> str:
        return f"role{list(self.roles.values()).index(role)}"

    def _warps(self, instruction: Instruction) -> frozenset[tuple[int, int]]:
        counted = self.scene.count(instruction, (WARP_GROUP, WARP))
        return frozenset((int(g), int(w)) for _, g, w, *_ in np.argwhere(counted > 0))

    def _role(self, instruction: Instruction) -> _Role:
        own = self._warps(instruction)
        # what one warp of a role does for all of them is the role's work
        warps = next(warps for warps in self.maximal if own <= warps)
        role = self.roles.setdefault(warps, _Role(warps))
        role.works += _works(self.index, instruction)
        return role

    def _arrivals(self, instruction: Instruction) -> str:
        """Threads that execute it at once, of each warp group if several do."""
        counted = self.scene.count(instruction, (RANK, WARP_GROUP, WARP, LANE)) > 0
        per_group = counted.sum(axis=(WARP, LANE))[0].ravel()
        several = " a warp group" if (per_group > 0).sum() > 1 else ""
        return _times(int(per_group.max())) + several

    def _barrier(self, uses: Uses) -> list[str]:
        awaited = uses.of(WAIT)
        if not awaited:
            return []
        for store in self.index.named(STORE):
            self._role(store)
        name = str(uses.buffer.name)
        counts = sorted({int(init.args[1]) for init, _ in uses.of(INIT)})
        for site, _ in uses.of(ARM):
            self._edge(self._role(site), name, f"announces {int(site.args[1])} bytes")
        for site, _ in uses.of(ARRIVE):
            self._edge(self._role(site), name, self._arrivals(site))
        for site, _ in uses.of(REMOTE):
            self._edge(self._role(site), name, f"{self._arrivals(site)}, one in each CTA that shares W")
        for site, _ in awaited:
            self.edges.append(f"    {name} -- wait --> {self._id(self._role(site))}")
        for site, _ in uses.of(LOAD):
            self._role(site)
        plural = "s" if uses.slots > 1 else ""
        text = f"{name}<br/>{uses.slots} barrier{plural}, a phase is {_times(counts[0])}"
        return [f'    {name}(("{text}"))']

    def _edge(self, role: _Role, name: str, text: str) -> None:
        self.edges.append(f"    {self._id(role)} -- {text} --> {name}")

    def _turns(self) -> list[str]:
        """Named barriers at which some threads arrive and others wait."""
        arrives = self.index.named(NAMED_ARRIVE)
        if not arrives:
            return []
        ids = {number for site in arrives for number in self._numbers(site)}
        for site in arrives:
            self._edge(self._role(site), "turns", "gives the turn")
        for site in self.index.named(NAMED_SYNC):
            if self._numbers(site) <= ids:
                self.edges.append(f"    turns -- waits for its turn --> {self._id(self._role(site))}")
        return [f'    turns(("named barriers {_list(sorted(ids))}<br/>{int(arrives[0].args[1])} threads"))']

    def _meetings(self) -> list[str]:
        """Named barriers at which all threads wait for each other."""
        turns = {number for site in self.index.named(NAMED_ARRIVE) for number in self._numbers(site)}
        lines = []
        for site in self.index.named(NAMED_SYNC):
            for number in sorted(self._numbers(site) - turns):
                self._edge(self._role(site), f"meeting{number}", "all meet")
                lines.append(f'    meeting{number}(("named barrier {number}<br/>{int(site.args[1])} threads"))')
        return lines

    def _numbers(self, site: Instruction) -> set[int]:
        """Numbers of the named barriers that an instruction is executed on."""
        return {int(value) for value in self.scene.values(site.args[0], site)}

    def _mailboxes(self) -> list[str]:
        lines = []
        for memory, text in (("cluster", "shared memory of the cluster"), ("grid", "global memory")):
            takes = self.index.takes(memory)
            if not takes:
                continue
            lines.append(f'    mail_{memory}[("mailboxes<br/>{text}")]')
            for post in self.index.named(POST + memory):
                self._edge(self._role(post), f"mail_{memory}", "value and tag")
            for take in takes:
                self.edges.append(f"    mail_{memory} -- spins for the tag --> {self._id(self._role(take))}")
        return lines


def _communicates(instruction: Instruction) -> bool:
    return instruction.name.startswith(("mbarrier_", "barrier_sync", "barrier_arrive", REMOTE, POST, TAKE, LOAD, STORE))


def _works(index: KernelIndex, instruction: Instruction) -> list[str]:
    if instruction.name == LOAD:
        tensor_map = index.map_of(instruction.args[1])
        return [f"loads {str(tensor_map.variable.name).removesuffix('_map')}"] if tensor_map is not None else []
    if instruction.name == STORE:
        tensor_map = index.map_of(instruction.args[0])
        return [f"stores {str(tensor_map.variable.name).removesuffix('_map')}"] if tensor_map is not None else []
    return []


def _times(count: int) -> str:
    return "1 arrival" if count == 1 else f"{count} arrivals"


def _list(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def protocol_diagram(kernel: tirx.PrimFunc) -> str:
    """A Mermaid flow chart: boxes are roles, circles barriers, arrows who arrives and who waits.

    Raises LoweringError for a kernel that static.index does not know.
    """
    return _Diagram(kernel).draw()
