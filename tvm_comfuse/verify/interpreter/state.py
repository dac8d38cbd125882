"""What every instruction knows of the actor that executes it: lanes, warps, order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

Array = np.ndarray
WARP = 32
#: who takes part in an instruction: everybody (None), one lane, or a mask
Mask = Any


class State:
    """State of one actor: a warp, or a warp group that runs wgmma, whose lanes go in step.

    label    e.g. ``cta0.wg1`` or ``cta0.wg0.w2``
    vc       [warps, components] what each of its warps knows; fenced: what of it is fenced for the asynchronous proxy
    comp     component of each warp's generic accesses; local: the same among the readers of its CTA
    """

    def __init__(self, machine: Any, cta: Any, label: str, number: int, group: int, warps: range):
        self.machine, self.cta, self.label, self.number, self.group = machine, cta, label, number, group
        self.report, self.scheduler = machine.report, machine.scheduler
        self.cta_id, self.rank_id, self.cluster_id = cta.index, cta.rank, cta.index // machine.launch.cluster
        parts = machine.components
        self.warps = len(warps)
        self.lanes = self.warps * WARP
        self.comp = np.array([parts.warp(cta.index, warp) for warp in warps])
        self.local = np.array(list(warps))
        self.bulk = np.array([parts.bulk(cta.index, warp) for warp in warps])
        self.wgmma = parts.wgmma(cta.index, group)
        self.vc = np.zeros((self.warps, parts.total), np.int32)
        self.vc[:, 1] = 1
        self.vc[np.arange(self.warps), self.comp] = 1
        self.fenced = np.zeros_like(self.vc)
        self.every_row = np.arange(self.warps)
        self.row_of_lane = np.arange(self.lanes) // WARP
        self.done = False
        self.waiting: Callable[[], str] = lambda: "for its turn"
        self.code: Generator[Any, None, None] = iter(())  # type: ignore[assignment]
        self.registers = machine.entry_registers
        self.cluster_generation: int | None = None
        #: whether the kernel in front in the stream may still run
        self.depends = machine.launch.dependent

    # --- who takes part -----------------------------------------------------------------------------------------------

    def rows(self, mask: Mask) -> Array:
        """Warps with a lane that takes part, as an index of the first axis of vc."""
        if mask is None:
            return self.every_row
        if isinstance(mask, int):
            return self.every_row[mask // WARP : mask // WARP + 1]
        return np.flatnonzero(mask.reshape(-1, WARP).any(1))

    def threads(self, mask: Mask) -> int:
        """How many lanes take part."""
        return self.lanes if mask is None else 1 if isinstance(mask, int) else int(mask.sum())

    def active(self, mask: Mask) -> Array:
        """Numbers of the lanes that take part."""
        if mask is None:
            return np.arange(self.lanes)
        return np.array([mask]) if isinstance(mask, int) else np.flatnonzero(mask)

    def aligned(self, mask: Mask, where: str, group: bool = False) -> None:
        """An .aligned instruction: all lanes of a warp (of the warp group) must be there."""
        if mask is None and (not group or self.warps == 4):
            return
        whole = mask is None or (
            not isinstance(mask, int) and mask.reshape(-1, WARP).all(1).sum() == mask.reshape(-1, WARP).any(1).sum()
        )
        if not whole or group:
            text = (
                f"{where}: {self.threads(mask)} threads execute an instruction that whole warps must execute together"
            )
            self.report.add("divergence", f"{self.label}, {where}", text, threads=self.threads(mask))

    def one(self, value: Any, mask: Mask, where: str) -> int:
        """An operand that must be the same in all lanes."""
        if not isinstance(value, np.ndarray):
            return int(value)
        values = np.unique(value[self.active(mask)])
        if len(values) != 1:
            self.report.fatal(
                "divergence", f"{self.label}, {where}", f"{where}: lanes disagree on an operand: {values[:4]}"
            )
        return int(values[0])

    def reach_global(self, where: str) -> None:
        """An access to global memory, which the kernel in front may still read and write until somebody waits for it."""
        if self.depends:
            text = f"{where}: accesses global memory before griddepcontrol.wait, and the launch is a dependent one"
            self.report.add("dependency-not-awaited", f"{self.label}, {where}", text)

    # --- order --------------------------------------------------------------------------------------------------------

    def release(self, mask: Mask, joined: Any) -> None:
        """What follows an arrival is ordered after what the arriving warps did so far."""
        rows = self.rows(mask)
        joined.add(self.vc[rows].max(0), self.fenced[rows].max(0))
        self.tick(rows)

    def acquire(self, mask: Mask, joined: Any) -> None:
        """Whoever waits knows what those who arrived knew."""
        rows = self.rows(mask)
        self.vc[rows] = np.maximum(self.vc[rows], joined.ready[0])
        self.fenced[rows] = np.maximum(self.fenced[rows], joined.ready[1])

    def tick(self, rows: Any) -> None:
        """Starts a new epoch of some warps."""
        self.vc[rows, self.comp[rows]] += 1

    def seen(self, mask: Mask) -> tuple[Array, Array]:
        """What all warps that take part know, and what of it is fenced."""
        rows = self.rows(mask)
        return self.vc[rows].min(0), self.fenced[rows].min(0)
