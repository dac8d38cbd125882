"""Shadow of a CTA's shared memory: for each 16 bytes who wrote them last, and who has read them since."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.clocks import ATOMIC, NOBODY, Components
from tvm_comfuse.verify.interpreter.report import Report

Array = np.ndarray
#: bytes of a granule: the unit of swizzling; no two warps write to one at the same time in a right kernel
GRANULE = 16


class Shadow:
    """Checks every access against those before it.  Addresses are bytes in the CTA's dynamic shared memory."""

    def __init__(self, cta: int, size: int, components: Components, report: Report):
        count = -(-size // GRANULE)
        self.cta, self.components, self.report = cta, components, report
        self.writer = np.full(count, NOBODY, np.int32)
        self.clock = np.ones(count, np.int32)
        self.asynchronous = np.zeros(count, bool)
        self.reads = np.zeros((components.readers, count), np.int32)
        base = components.base(cta)
        self.known = slice(base, base + components.readers)

    # --- generic accesses of lanes ------------------------------------------------------------------------------------

    def read(self, actor: Any, rows: Array, addresses: Array, where: str) -> None:
        """Lanes of the actor's warps `rows` read at `addresses`."""
        at = addresses >> 4
        writer = self.writer[at]
        bad = actor.vc[rows, writer] < self.clock[at]
        if bad.any():
            self._bad_read(actor.label, at[bad][0], where)
        self.reads[actor.local[rows], at] = actor.vc[rows, actor.comp[rows]]

    def write(self, actor: Any, rows: Array, addresses: Array, where: str) -> None:
        """Lanes of the actor's warps `rows` write at `addresses`."""
        at = addresses >> 4
        writer = self.writer[at]
        bad = (actor.vc[rows, writer] < self.clock[at]) & (writer != NOBODY)
        if bad.any():
            self._bad_write(actor.label, at[bad][0], where)
        late = self.reads[:, at] > actor.vc[rows, self.known].T
        if late.any():
            self._still_read(actor.label, late, at, where)
        self._written(at, actor.comp[rows], actor.vc[rows, actor.comp[rows]], False)

    def atomic(self, actor: Any, rows: Array, addresses: Array, where: str) -> None:
        """Lanes write words that are only ever touched by atomic instructions from now on."""
        at = addresses >> 4
        writer = self.writer[at]
        if (writer == NOBODY).any():
            self._bad_read(actor.label, at[writer == NOBODY][0], where)
        bad = actor.vc[rows, writer] < self.clock[at]
        if bad.any():
            self._bad_write(actor.label, at[bad][0], where)
        self._written(at, ATOMIC, 0, False)

    # --- asynchronous accesses ----------------------------------------------------------------------------------------

    def async_read(self, who: str, seen: tuple[Array, Array], at: Array, reader: int, epoch: int, where: str) -> None:
        """wgmma or a TMA store reads granules; seen: (vector, vector of what was fenced for the asynchronous proxy)."""
        vector, fenced = seen
        writer, clock = self.writer[at], self.clock[at]
        bad = vector[writer] < clock
        if bad.any():
            self._bad_read(who, at[bad][0], where)
        elif (unfenced := (fenced[writer] < clock) & ~self.asynchronous[at] & (writer != ATOMIC)).any():
            self._unfenced(who, at[unfenced][0], where)
        self.reads[reader - self.known.start, at] = epoch

    def async_write(self, who: str, seen: tuple[Array, Array], at: slice, writer: int, epoch: int, where: str) -> None:
        """A TMA load is issued that will write granules; they count as written when the load's barrier completes."""
        vector, fenced = seen
        old, clock = self.writer[at], self.clock[at]
        bad = (vector[old] < clock) & (old != NOBODY)
        if bad.any():
            self._bad_write(who, at.start + int(np.argmax(bad)), where)
        elif (unfenced := (fenced[old] < clock) & ~self.asynchronous[at] & (old > ATOMIC)).any():
            self._unfenced(who, at.start + int(np.argmax(unfenced)), where)
        late = self.reads[:, at] > vector[self.known][:, None]
        if late.any():
            self._still_read(who, late, np.arange(at.start, at.stop), where)
        self._written(at, writer, epoch, True)

    def _written(self, at: Any, writer: Any, clock: Any, asynchronous: bool) -> None:
        self.writer[at], self.clock[at], self.asynchronous[at] = writer, clock, asynchronous
        self.reads[:, at] = 0

    # --- what to say --------------------------------------------------------------------------------------------------

    def _place(self, granule: Any) -> dict[str, Any]:
        return {"cta": self.cta, "byte": int(granule) * GRANULE}

    def _bad_read(self, who: str, granule: Any, where: str) -> None:
        writer = self.components.name(int(self.writer[granule]))
        if self.writer[granule] == NOBODY:
            text = (
                f"{where}: reads bytes {int(granule) * GRANULE}.. of cta {self.cta}'s shared memory, which nobody wrote"
            )
            self.report.add("uninitialised-read", f"{who}, {where}", text, **self._place(granule))
            return
        text = (
            f"{where}: reads bytes {int(granule) * GRANULE}.. of cta {self.cta}'s shared memory; no barrier orders the last "
            f"write, by {writer}, before it"
        )
        self.report.add("unordered-read", f"{who}, {where}", text, **self._place(granule))

    def _bad_write(self, who: str, granule: Any, where: str) -> None:
        writer = self.components.name(int(self.writer[granule]))
        text = (
            f"{where}: writes bytes {int(granule) * GRANULE}.. of cta {self.cta}'s shared memory; no barrier orders the write "
            f"before it, by {writer}"
        )
        self.report.add("unordered-write", f"{who}, {where}", text, **self._place(granule))

    def _still_read(self, who: str, late: Array, at: Array, where: str) -> None:
        reader, position = np.argwhere(late)[0]
        name = self.components.name(self.known.start + int(reader))
        granule = int(at[position])
        text = f"{where}: overwrites bytes {granule * GRANULE}.. of cta {self.cta}'s shared memory, which {name} may still read"
        self.report.add("write-after-read", f"{who}, {where}", text, **self._place(granule))

    def _unfenced(self, who: str, granule: Any, where: str) -> None:
        writer = self.components.name(int(self.writer[granule]))
        text = (
            f"{where}: an asynchronous access to bytes {int(granule) * GRANULE}.. of cta {self.cta}'s shared memory follows a "
            f"generic write by {writer} without fence.proxy.async between them"
        )
        self.report.add("missing-proxy-fence", f"{who}, {where}", text, **self._place(granule))
