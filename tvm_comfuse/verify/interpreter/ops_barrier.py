"""Instructions that synchronise: mbarriers, named barriers, cluster barriers, fences, setmaxnreg."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.barriers import CountedBarrier, MBarrier
from tvm_comfuse.verify.interpreter.state import State

Steps = Generator[Any, None, None]


class BarrierOps(State):
    """Part of Actor."""

    # --- mbarriers ----------------------------------------------------------------------------------------------------

    def barrier(self, name: str, index: Any, mask: Any, where: str, rank: int | None = None) -> MBarrier:
        """The mbarrier name[index] of this CTA, or of CTA `rank` of its cluster."""
        number = self.one(index, mask, where)
        cta = self.cta if rank is None else self.peer(rank, where)
        barriers = cta.barriers[name]
        if not 0 <= number < len(barriers):
            text = f"{where}: {name}[{number}] of {len(barriers)}"
            self.report.fatal("shared-bounds", f"{self.label}, {where}", text, index=number, extent=len(barriers))
        return barriers[number]

    def peer(self, rank: int, where: str) -> Any:
        """CTA `rank` of the cluster."""
        ctas = self.cta.cluster.ctas
        if not 0 <= rank < len(ctas):
            text = f"{where}: rank {rank} in a cluster of {len(ctas)}"
            self.report.fatal("cluster-rank", f"{self.label}, {where}", text, rank=rank, size=len(ctas))
        return ctas[rank]

    def _usable(self, barrier: MBarrier, mask: Any, where: str, remote: bool) -> None:
        """An mbarrier is used only once its initialisation is visible to who uses it."""
        if barrier.initialised is None:
            self.report.fatal("barrier-init", f"{self.label}, {where}", f"{where}: {barrier.place} is not initialised")
            return
        component, clock = barrier.initialised
        if self.vc[self.rows(mask), component].min() < clock:
            text = f"{where}: no barrier orders the initialisation of {barrier.place} before it"
            self.report.add("barrier-init", f"{self.label}, {where}", text)
        elif remote and not barrier.fenced:
            text = f"{where}: {barrier.place} was initialised without fence.mbarrier_init behind it"
            self.report.add("missing-init-fence", f"{self.label}, {where}", text)

    def mbarrier_init(self, name: str, index: Any, count: Any, mask: Any, where: str) -> None:
        """mbarrier.init"""
        row = int(self.rows(mask)[0])
        epoch = (int(self.comp[row]), int(self.vc[row, self.comp[row]]))
        if self.threads(mask) != 1:
            self.report.add("barrier-init", f"{self.label}, {where}", f"{where}: by {self.threads(mask)} threads")
        self.barrier(name, index, mask, where).init(epoch, int(count))

    def fence_init(self) -> None:
        """fence.mbarrier_init.release.cluster: the initialisations of this actor are visible to others."""
        mine = set(self.comp.tolist())
        for barriers in self.cta.barriers.values():
            for barrier in barriers:
                if barrier.initialised is not None and barrier.initialised[0] in mine:
                    barrier.fenced = True

    def arrive(self, name: str, index: Any, count: Any, mask: Any, where: str) -> None:
        """mbarrier.arrive of every lane that takes part."""
        barrier = self.barrier(name, index, mask, where)
        self._usable(barrier, mask, where, False)
        self.release(mask, barrier.joined)
        barrier.arrive(f"{self.label}, {where}", self.threads(mask) * int(count))

    def arrive_expect(self, name: str, index: Any, size: Any, mask: Any, where: str) -> None:
        """mbarrier.arrive.expect_tx"""
        barrier = self.barrier(name, index, mask, where)
        self._usable(barrier, mask, where, False)
        self.release(mask, barrier.joined)
        barrier.expect(self.threads(mask) * self.one(size, mask, where))
        barrier.arrive(f"{self.label}, {where}", self.threads(mask))

    def arrive_at(self, name: str, index: Any, rank: Any, mask: Any, where: str) -> None:
        """Arrival on the same barrier of other CTAs of the cluster; `rank` per lane."""
        lanes = self.active(mask)
        for lane in lanes:
            to = int(rank[lane]) if isinstance(rank, np.ndarray) else int(rank)
            barrier = self.barrier(name, index, mask, where, to)
            self._usable(barrier, int(lane), where, to != self.cta.rank)
            self.touch(self.peer(to, where), int(lane), where)
            self.release(int(lane), barrier.joined)
            barrier.arrive(f"{self.label}, {where}", 1)

    def touch(self, cta: Any, mask: Any, where: str) -> None:
        """A signal or write to another CTA, which must not exit before."""
        if cta is self.cta:
            return
        if cta.exited:
            text = f"{where}: signals or writes to cta {cta.index}, which has exited"
            self.report.add("exited-cta", f"{self.label}, {where}", text, cta=cta.index)
        rows = self.rows(mask)
        np.maximum.at(cta.touched, self.comp[rows], self.vc[rows, self.comp[rows]])

    def wait(self, name: str, index: Any, parity: Any, mask: Any, where: str) -> Steps:
        """Loop of mbarrier.try_wait.parity."""
        yield None
        barrier = self.barrier(name, index, mask, where)
        phase_parity = self.one(parity, mask, where)
        self._usable(barrier, mask, where, False)
        if not barrier.passes(phase_parity):
            self._not_missed(barrier, mask, phase_parity, where)
        while not barrier.passes(phase_parity):
            self.waiting = lambda: f"for parity {phase_parity} of {barrier.place} ({where}): {barrier.state()}"
            yield barrier
        self._right_phase(barrier, mask, phase_parity, where)
        self.acquire(mask, barrier.joined)
        rows = self.rows(mask)
        barrier.waited(f"{self.label}, {where}", self.comp[rows], self.vc[rows, self.comp[rows]])

    def _not_missed(self, barrier: MBarrier, mask: Any, parity: int, where: str) -> None:
        """A wait for a phase that is over, and the next one too, waits for the one after that."""
        done, known = barrier.phase, int(self.vc[self.rows(mask), barrier.component].min())
        if done - known >= 2 and known % 2 == parity:
            text = (
                f"{where} for parity {parity} comes after the end of phases {known} and {known + 1}: it misses phase {known} "
                f"and waits for phase {done}"
            )
            numbers = {"parity": parity, "complete": done, "known": known}
            self.report.add("missed-phase", f"{self.label}, {where}, {barrier.place}", text, **numbers)

    def _right_phase(self, barrier: MBarrier, mask: Any, parity: int, where: str) -> None:
        """A parity tells two neighbouring phases apart and no more: the waiter must know all phases but one."""
        done, known = barrier.phase, int(self.vc[self.rows(mask), barrier.component].min())
        place = f"{self.label}, {barrier.place}"
        numbers = {"parity": parity, "complete": done, "known": known}
        if done == 0:
            if barrier.carries_bytes:
                text = f"{where} passed before the first phase: it did not wait for the bytes"
                self.report.add("phase-aliasing", place, text, **numbers)
            else:
                barrier.passed_fresh.append(self.label)
        elif known >= done:
            text = (
                f"{where} for parity {parity} is satisfied by phase {done - 1}, whose end the waiter knew before: it does "
                f"not wait for phase {done + 1}, which has the same parity"
            )
            self.report.add("phase-aliasing", place, text, **numbers)
        elif known < done - 1:
            text = (
                f"{where} for parity {parity} is satisfied by phase {done - 1}, but nothing orders phase {done - 2} "
                f"before the wait (the waiter knows {known} complete phases): had it come earlier, phase {done - 3} would have "
                "let it pass"
            )
            self.report.add("phase-aliasing", place, text, **numbers)

    # --- barriers of threads ------------------------------------------------------------------------------------------

    def _arrive_counted(self, barrier: CountedBarrier, count: int, mask: Any, where: str) -> int:
        self.aligned(mask, where)
        self.release(mask, barrier.joined)
        return barrier.arrive(f"{self.label}, {where}", self.threads(mask), count)

    def _await_counted(self, barrier: CountedBarrier, generation: int, mask: Any, where: str) -> Steps:
        while barrier.generation <= generation:
            self.waiting = lambda: f"at {barrier.name} ({where}): {barrier.state()}"
            yield barrier
        self.acquire(mask, barrier.joined)

    def named_sync(self, number: Any, count: Any, mask: Any, where: str) -> Steps:
        """barrier.cta.sync; number None and count None: __syncthreads."""
        yield None
        barrier = self.named(number, where)
        generation = self._arrive_counted(barrier, self.cta.threads if count is None else int(count), mask, where)
        yield from self._await_counted(barrier, generation, mask, where)

    def named_arrive(self, number: Any, count: Any, mask: Any, where: str) -> Steps:
        """barrier.cta.arrive"""
        yield None
        self._arrive_counted(self.named(number, where), int(count), mask, where)

    def named(self, number: Any, where: str) -> CountedBarrier:
        """The named barrier of that number."""
        index = 0 if number is None else int(number)
        if not 0 <= index < len(self.cta.named):
            self.report.fatal(
                "barrier-count", f"{self.label}, {where}", f"named barrier {index}; there are {len(self.cta.named)}"
            )
        return self.cta.named[index]

    def cluster_arrive(self, mask: Any, where: str) -> Steps:
        """barrier.cluster.arrive.release"""
        yield None
        cluster = self.cta.cluster
        if self.cluster_generation is not None:
            self.report.add("cluster-barrier", f"{self.label}, {where}", f"{where}: a second arrival without a wait")
        self.cluster_generation = self._arrive_counted(cluster.barrier, cluster.threads, mask, where)

    def cluster_wait(self, mask: Any, where: str) -> Steps:
        """barrier.cluster.wait.acquire"""
        yield None
        if self.cluster_generation is None:
            self.report.fatal("cluster-barrier", f"{self.label}, {where}", f"{where}: a wait without an arrival")
        yield from self._await_counted(self.cta.cluster.barrier, self.cluster_generation or 0, mask, where)
        self.cluster_generation = None

    # --- fences and registers -----------------------------------------------------------------------------------------

    def fence_proxy(self, mask: Any) -> None:
        """fence.proxy.async: generic accesses so far are ordered before asynchronous ones that follow."""
        rows = self.rows(mask)
        self.fenced[rows] = self.vc[rows]
        self.tick(rows)

    def set_registers(self, count: Any, increase: bool, mask: Any, where: str) -> Steps:
        """setmaxnreg: an increase waits until the CTA's pool has the registers."""
        self.aligned(mask, where)
        wanted = (int(count) - self.registers) * self.lanes
        if increase == (wanted < 0) and wanted:
            text = f"{where}: from {self.registers} to {int(count)} registers"
            self.report.add("register-budget", f"{self.label}, {where}", text, before=self.registers, after=int(count))
        pool = self.cta.pool
        while wanted > pool.free:
            self.waiting = lambda: f"for {wanted} registers ({where}): the CTA's pool has {pool.free} free"
            yield pool
        pool.free -= wanted
        self.registers = int(count)
        if wanted < 0:
            pool.wake()
