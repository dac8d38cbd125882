"""Mailboxes: (value, tag) words between warp groups, CTAs and the grid, and the grid's launch counter.

Such words are read and written by relaxed atomic instructions only.  They order nothing but themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.ops_barrier import BarrierOps
from tvm_comfuse.verify.interpreter.ops_memory import MemoryOps

Array = np.ndarray
Steps = Generator[Any, None, Any]
WORD, TAG_SHIFT = 8, 32


def _mail(value: Any, tag: Any, count: int) -> Array:
    bits = (
        np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.float32), (count,))).view(np.uint32).astype(np.uint64)
    )
    tags = np.broadcast_to(np.asarray(tag).astype(np.uint64), (count,))
    return tags << np.uint64(TAG_SHIFT) | bits


def _value(words: Array) -> Array:
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)


def _pick(value: Any, lanes: Array) -> Any:
    return value[lanes] if isinstance(value, np.ndarray) and value.ndim else value


class MailOps(BarrierOps, MemoryOps):
    """Part of Actor."""

    def post_cluster(self, address: Any, rank: Any, value: Any, tag: Any, mask: Any, where: str) -> Steps:
        """Each lane writes (value, tag) to its address in the CTA `rank` of the cluster."""
        yield None
        lanes, at = self._shared(address, WORD, mask, where)
        ranks = np.broadcast_to(np.asarray(_pick(rank, lanes)), at.shape)
        words = _mail(_pick(value, lanes), _pick(tag, lanes), len(lanes))
        for to in np.unique(ranks):
            chosen = ranks == to
            cta = self.peer(int(to), where)
            self.touch(cta, self._mask_of(lanes[chosen]), where)
            cta.shadow.atomic(self, self.row_of_lane[lanes[chosen]], at[chosen], where)
            cta.bytes.view(np.uint64)[at[chosen] // WORD] = words[chosen]
            cta.posted.wake()

    def _mask_of(self, lanes: Array) -> Array:
        mask = np.zeros(self.lanes, bool)
        mask[lanes] = True
        return mask

    def take_cluster(self, addresses: list[Any], tag: Any, mask: Any, where: str) -> Steps:
        """The values at each lane's addresses in this CTA once all their tags are `tag`."""
        yield None
        places = [self._shared(address, WORD, mask, where) for address in addresses]
        words, lanes = self.cta.bytes.view(np.uint64), places[0][0]
        got = yield from self._take(words, [at // WORD for _, at in places], tag, lanes, self.cta.posted, where)
        for _, at in places:
            self.cta.shadow.read(self, self.row_of_lane[lanes], at, where)
        return [self._spread(values, lanes, mask) for values in got]

    def _take(self, words: Array, places: list[Array], tag: Any, lanes: Array, posted: Any, where: str) -> Steps:
        at = np.stack(places)
        wanted = np.broadcast_to(np.asarray(_pick(tag, lanes)), at.shape)
        while (missing := (words[at] >> np.uint64(TAG_SHIFT)) != wanted).any():
            self.waiting = lambda: self._missing_mail(words, at, wanted, where)
            yield posted
        del missing
        return [_value(words[slots]) for slots in at]

    def _missing_mail(self, words: Array, at: Array, wanted: Array, where: str) -> str:
        tags = words[at] >> np.uint64(TAG_SHIFT)
        missing = tags != wanted
        first = tuple(np.argwhere(missing)[0]) if missing.any() else (0, 0)
        return (
            f"for mail ({where}): {int(missing.sum())} of {missing.size} slots lack tag {int(wanted[first])}, "
            f"slot {int(at[first])} has {int(tags[first])}"
        )

    def post_grid(self, name: str, index: Any, value: Any, tag: Any, mask: Any, where: str) -> Steps:
        """Each lane writes (value, tag) to a slot in global memory."""
        yield None
        self._owned(mask, where)
        lanes, at = self._slots(name, index, mask, where)
        self.machine.mail[name][at] = _mail(_pick(value, lanes), _pick(tag, lanes), len(lanes))
        self.machine.posted.wake()

    def take_grid(self, name: str, indices: list[Any], tag: Any, mask: Any, where: str) -> Steps:
        """The values of each lane's slots once all their tags are `tag`."""
        yield None
        self._owned(mask, where)
        places = [self._slots(name, index, mask, where) for index in indices]
        lanes = places[0][0]
        got = yield from self._take(
            self.machine.mail[name], [at for _, at in places], tag, lanes, self.machine.posted, where
        )
        return [self._spread(values, lanes, mask) for values in got]

    def _slots(self, name: str, index: Any, mask: Any, where: str) -> tuple[Array, Array]:
        self.reach_global(where)
        lanes = self.active(mask)
        at = np.broadcast_to(np.asarray(_pick(index, lanes)), lanes.shape).astype(np.int64)
        limit = len(self.machine.mail[name])
        if len(at) and (at.min() < 0 or at.max() >= limit):
            text = f"{where}: mail slot {int(at.min())}..{int(at.max())} of {limit}"
            self.report.fatal(
                "global-bounds", f"{self.label}, {where}", text, low=int(at.min()), high=int(at.max()), extent=limit
            )
        return lanes, at

    def enter_grid(self, name: str, takes: Any, mask: Any, where: str) -> Steps:
        """Waits until this launch owns the slots, which a thread that `takes` them brings about once nobody does.  Gives the
        tag behind those of earlier launches."""
        yield None
        self.reach_global(where)
        words, launch = self.machine.statics.words(name), self.machine.number
        taking = bool(self.one(takes, mask, where))
        while words[2] != launch:
            if taking and words[2] == 0:
                words[2] = launch
                self.machine.turn.wake()
                break
            self.waiting = lambda: f"for the mailboxes ({where}): launch {words[2]} owns them, not {launch}"
            yield self.machine.turn
        row = int(self.rows(mask)[0])
        self.cta.entered = (int(self.comp[row]), int(self.vc[row, self.comp[row]]))
        self.machine.tag_readers.append(self.cta.entered)
        self.tick(row)
        return words[0]

    def _owned(self, mask: Any, where: str) -> None:
        """Mailboxes are used only behind the wait for them."""
        component, clock = self.cta.entered or (0, 1)
        if self.vc[self.rows(mask), component].min() < clock:
            text = f"{where}: no barrier orders the wait for the mailboxes before it"
            self.report.add("mail-not-owned", f"{self.label}, {where}", text)

    def leave_grid(self, name: str, ctas: Any, tags: Any, mask: Any, where: str) -> None:
        """Counts a CTA that leaves; the last one moves the tag base on and gives the slots away.  Acquires and releases at
        grid scope."""
        words, joined = self.machine.statics.words(name), self.machine.left
        self.release(mask, joined)
        joined.complete()
        self.acquire(mask, joined)
        words[1] += self.threads(mask)
        if words[1] != int(ctas):
            return
        seen, _ = self.seen(mask)
        for component, clock in self.machine.tag_readers:
            if seen[component] < clock:
                who = self.machine.components.name(component)
                text = f"{where}: moves the tag base while {who} may still read the old one"
                self.report.add("write-after-read", f"{self.label}, {where}", text)
        words[:] = [words[0] + int(tags), 0, 0]
        self.machine.turn.wake()
