"""TMA: tensor loads that complete on mbarriers, tensor stores in bulk groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.memory import ROW, SWIZZLE_NONE, TensorMap
from tvm_comfuse.verify.interpreter.ops_barrier import BarrierOps
from tvm_comfuse.verify.interpreter.scheduler import Event
from tvm_comfuse.verify.interpreter.shadow import GRANULE


@dataclass
class Group:
    """Bulk copies committed together."""

    events: list[Event]


class AsyncOps(BarrierOps):
    """Part of Actor."""

    def _start_async(self) -> None:
        #: per warp: copies not committed yet, groups committed, groups known to be read
        self.uncommitted: list[list[Event]] = [[] for _ in range(self.warps)]
        self.groups: list[list[Group]] = [[] for _ in range(self.warps)]

    def _box(self, cta: Any, tensor_map: TensorMap, address: Any, mask: Any, where: str) -> tuple[int, slice]:
        """Address and granules of a box in shared memory."""
        start = self.one(address, mask, where)
        size = tensor_map.box_bytes
        unit = GRANULE if tensor_map.swizzle == SWIZZLE_NONE else ROW
        if start < 0 or start + size > len(cta.bytes) or start % unit:
            text = f"{where}: a box of {size} bytes at {start} of {len(cta.bytes)} bytes of shared memory; aligned to {unit}"
            self.report.fatal(
                "shared-bounds", f"{self.label}, {where}", text, start=start, size=size, limit=len(cta.bytes)
            )
        return start, slice(start // GRANULE, -(-(start + size) // GRANULE))

    def tma_load(
        self,
        tensor_map: TensorMap,
        at: tuple[Any, ...],
        address: Any,
        barrier: tuple[str, Any],
        targets: Any,
        mask: Any,
        where: str,
    ) -> None:
        """cp.async.bulk.tensor from global to shared memory.

        at       (column, row) of the box; or (column, parts of the row number)
        barrier  (name, index) of the mbarrier that the bytes complete, in each CTA that they go to
        targets  bit mask of cluster ranks, or None for this CTA
        """
        if self.threads(mask) != 1:
            text = f"{where}: issued by {self.threads(mask)} threads"
            self.report.add("divergence", f"{self.label}, {where}", text, threads=self.threads(mask))
        self.reach_global(where)
        column, row = tensor_map.corner([self.one(index, mask, where) for index in at])
        ranks = [self.cta.rank] if targets is None else self._ranks(self.one(targets, mask, where), where)
        for rank in ranks:
            cta = self.peer(rank, where)
            start, granules = self._box(cta, tensor_map, address, mask, where)
            gate = self.barrier(barrier[0], barrier[1], mask, where, rank)
            self._usable(gate, mask, where, True)
            who = f"{self.label} to cta {cta.index}" if rank != self.cta.rank else self.label
            cta.shadow.async_write(who, self.seen(mask), granules, gate.component, gate.phase + 1, where)
            self._remote_load(cta, where)
            run = _landing(cta, tensor_map, (column, row), start, gate)
            self.scheduler.events.append(Event(f"cta{cta.index}.load", run))
            cta.inbound += 1

    def _ranks(self, bits: int, where: str) -> list[int]:
        ranks = [rank for rank in range(16) if bits >> rank & 1]
        if not ranks:
            self.report.fatal("cluster-rank", f"{self.label}, {where}", f"{where}: an empty multicast mask")
        return ranks

    def _remote_load(self, cta: Any, where: str) -> None:
        if cta.exited:
            text = f"{where}: a load into cta {cta.index}, which has exited"
            self.report.add("exited-cta", f"{self.label}, {where}", text, cta=cta.index)

    def tma_store(self, tensor_map: TensorMap, at: tuple[Any, Any], address: Any, mask: Any, where: str) -> None:
        """cp.async.bulk.tensor from shared to global memory."""
        self.reach_global(where)
        column, row = (self.one(index, mask, where) for index in at)
        start, granules = self._box(self.cta, tensor_map, address, mask, where)
        warp = self._row(mask)
        epoch = len(self.groups[warp]) + 1
        at_granules = _range(granules)
        self.cta.shadow.async_read(self.label, self.seen(mask), at_granules, int(self.bulk[warp]), epoch, where)
        cta, size, label, number = self.cta, tensor_map.box_bytes, self.label, self.number

        def run() -> None:
            data = cta.bytes[start : start + size].reshape(tensor_map.box_rows, -1)
            tensor_map.store(data, column, row, start, number, label, where)

        event = Event(f"cta{cta.index}.store", run)
        self.uncommitted[warp].append(event)
        self.scheduler.events.append(event)

    def bulk_commit(self, mask: Any) -> None:
        """cp.async.bulk.commit_group"""
        warp = self._row(mask)
        self.groups[warp].append(Group(self.uncommitted[warp]))
        self.uncommitted[warp] = []

    def bulk_wait(self, most: Any, mask: Any) -> None:
        """cp.async.bulk.wait_group[.read]: all groups but the newest `most` have been read.

        Copies that the scheduler has not run yet run now, which is as late as they may.
        """
        warp = self._row(mask)
        done = max(len(self.groups[warp]) - int(most), 0)
        for group in self.groups[warp][:done]:
            for event in group.events:
                if event in self.scheduler.events:
                    self.scheduler.events.remove(event)
                    event.run()
            group.events.clear()
        self.vc[warp, self.bulk[warp]] = max(self.vc[warp, self.bulk[warp]], done)

    def _row(self, mask: Any) -> int:
        return int(self.rows(mask)[0])

    def _end_async(self) -> None:
        """Shared memory must stay until every store has read it."""
        for warp in range(self.warps):
            pending = len(self.groups[warp]) - int(self.vc[warp, self.bulk[warp]])
            if pending > 0 or self.uncommitted[warp]:
                rest = len(self.uncommitted[warp])
                text = (
                    f"exits with {max(pending, 0)} groups of TMA stores not waited for and {rest} stores not committed"
                )
                self.report.add("store-not-awaited", self.label, text, groups=pending)


def _range(granules: slice) -> Any:
    return np.arange(granules.start, granules.stop)


def _landing(cta: Any, tensor_map: TensorMap, at: tuple[int, int], start: int, gate: Any) -> Callable[[], None]:
    phase = gate.phase

    def run() -> None:
        cta.inbound -= 1
        data = tensor_map.load(*at, start)
        cta.bytes[start : start + data.size] = data.reshape(-1)
        gate.land(phase, tensor_map.box_bytes)

    return run
