"""The grid: CTAs with their shared memory and barriers, clusters, actors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tvm_comfuse.verify.interpreter.actor import Actor
from tvm_comfuse.verify.interpreter.barriers import CountedBarrier, Joined, MBarrier, Waitable
from tvm_comfuse.verify.interpreter.clocks import Components
from tvm_comfuse.verify.interpreter.memory import Statics
from tvm_comfuse.verify.interpreter.report import Report
from tvm_comfuse.verify.interpreter.scheduler import Scheduler
from tvm_comfuse.verify.interpreter.shadow import Shadow
from tvm_comfuse.verify.interpreter.state import WARP

NAMED_BARRIERS = 16
#: 32-bit registers of an SM, and what a thread's share is rounded down to
REGISTERS, REGISTER_UNIT = 65536, 8
#: every byte of fresh shared memory: a NaN in bfloat16, float16 and float32
POISON = 0xFF


@dataclass(frozen=True)
class Launch:
    """Shape of a launch.  barriers: mbarriers by array, in order; shared: bytes of dynamic shared memory; dependent: it may
    begin before the kernel in front of it has ended."""

    ctas: int
    cluster: int
    groups: int
    shared: int
    barriers: dict[str, int]
    mail: dict[str, int] = field(default_factory=dict)
    dependent: bool = False


class Pool(Waitable):
    """Registers of a CTA that no warp has."""

    free = 0


class Cluster:
    """CTAs that see each other's shared memory."""

    def __init__(self, name: str, threads: int, length: int, scheduler: Scheduler, report: Report):
        self.ctas: list[Cta] = []
        self.threads = threads
        self.barrier = CountedBarrier(f"the barrier of {name}", length, scheduler, report)


class Cta:
    """A CTA: shared memory, its shadow, barriers, actors."""

    def __init__(self, machine: Machine, index: int, rank: int, cluster: Cluster):
        self.index, self.rank, self.cluster, self.report = index, rank, cluster, machine.report
        launch, parts = machine.launch, machine.components
        self.threads = launch.groups * 4 * WARP
        self.bytes = np.full(launch.shared, POISON, np.uint8)
        self.words16 = self.bytes.view(np.uint16)
        self.shadow = Shadow(index, launch.shared, parts, machine.report)
        self.posted = Waitable(f"mail of cta {index}", machine.scheduler)
        self.pool = Pool(f"registers of cta {index}", machine.scheduler)
        self.named = [
            CountedBarrier(f"cta {index} named barrier {number}", parts.total, machine.scheduler, machine.report)
            for number in range(NAMED_BARRIERS)
        ]
        self.barriers: dict[str, list[MBarrier]] = {}
        number = 0
        for name, count in launch.barriers.items():
            self.barriers[name] = []
            for at in range(count):
                component = parts.barrier(index, number)
                self.barriers[name].append(
                    MBarrier(f"{name}[{at}]", index, component, parts.total, machine.scheduler, machine.report)
                )
                number += 1
        self.actors: list[Actor] = []
        #: epoch at which this launch was found to own the mailboxes in global memory
        self.entered: tuple[int, int] | None = None
        self.running = 0
        #: loads under way to this CTA's shared memory
        self.inbound = 0
        self.exited = False
        #: latest epoch of each component that signalled or wrote to this CTA from another one, and what its actors knew
        self.touched = np.zeros(parts.total, np.int32)
        self.known = np.zeros(parts.total, np.int32)

    def leave(self, actor: Actor) -> None:
        """An actor is done; the last one ends the CTA."""
        np.maximum(self.known, actor.vc.max(0), out=self.known)
        self.running -= 1
        if self.running:
            return
        self.exited = True
        where = f"cta {self.index}"
        late = np.flatnonzero(self.touched > self.known)
        if len(late):
            who = actor.machine.components.name(int(late[0]))
            self.report.add(
                "exited-cta", where, f"exits and nothing orders the signals or writes of {who} to it before that"
            )
        if self.inbound:
            self.report.add(
                "exited-cta", where, f"exits with {self.inbound} loads still on their way to its shared memory"
            )
        if all(cta.exited for cta in self.cluster.ctas):
            actor.scheduler.admit()
        for barrier in self.named:
            if barrier.arrived:
                text = f"{barrier.arrived} of {barrier.count} threads have arrived when the CTA exits"
                self.report.add("barrier-leftover", barrier.name, text, arrived=barrier.arrived, count=barrier.count)


class Machine:
    """Everything of one launch.  number: from 1, of the launches that run at the same time."""

    def __init__(self, launch: Launch, report: Report, scheduler: Scheduler, statics: Statics, number: int = 1):
        self.number, self.turn = number, scheduler.turn
        self.launch, self.report, self.scheduler, self.statics = launch, report, scheduler, statics
        self.components = Components(launch.ctas, launch.groups * 4, launch.groups, sum(launch.barriers.values()))
        self.entry_registers = REGISTERS // (launch.groups * 4 * WARP) // REGISTER_UNIT * REGISTER_UNIT
        self.posted = Waitable("mail of the grid", scheduler)
        self.mail = {name: statics.slots(name, count) for name, count in launch.mail.items()}
        #: how often a clock was read
        self.readings = 0
        self.left = Joined(self.components.total)
        self.tag_readers: list[tuple[int, int]] = []
        self.ctas: list[Cta] = []
        for index in range(launch.ctas):
            number, rank = divmod(index, launch.cluster)
            if rank == 0:
                threads = launch.cluster * launch.groups * 4 * WARP
                cluster = Cluster(f"cluster {number}", threads, self.components.total, scheduler, report)
            self.ctas.append(Cta(self, index, rank, cluster))
            cluster.ctas.append(self.ctas[-1])

    def add_actor(self, cta: Cta, group: int, warp: int | None) -> Actor:
        """The actor of a warp group, or of one warp of it."""
        first = group * 4
        warps = range(first, first + 4) if warp is None else range(first + warp, first + warp + 1)
        launch = "" if self.number == 1 else f"launch{self.number}."
        label = f"{launch}cta{cta.index}.wg{group}" + ("" if warp is None else f".w{warp}")
        number = 1 + sum(len(c.actors) for c in self.ctas)
        actor = Actor(self, cta, label, number, group, warps)
        cta.actors.append(actor)
        cta.running += 1
        return actor
