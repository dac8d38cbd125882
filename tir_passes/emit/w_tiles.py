"""Where the B tiles of W are, and what guards them: in the slots of the ring, or in shared memory for the CTA's whole life.

A tile of W is 64 columns of K deep, as a slot is; tile k belongs to the k-th slot of every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm_comfuse.tir_passes.emit import ring
from tvm_comfuse.tir_passes.emit.dsl import when

Expr = Any


class RingTiles:
    """W comes anew for every step: its tile lies behind that of x in the slot, and the slot's barriers guard both."""

    def __init__(self, kernel: Any):
        self.layout = kernel.layout
        #: offset of the first tile
        self.first = self.layout.a_bytes

    def init(self) -> None:
        """No barriers of its own."""

    @contextmanager
    def filled(self, step: Expr, k: Expr, slot: Expr, slot_barrier: Expr) -> Iterator[tuple[Expr, Expr]]:
        """For the producer, in slot number `slot`: (offset, barrier) of the loads of tile k."""
        yield self.distance(slot, k) + self.first, slot_barrier

    def wait(self, step: Expr, k: Expr) -> None:
        """The wait for the slot is enough."""

    def distance(self, slot: Expr, k: Expr, unit: int = 1) -> Expr:
        """From the first tile to tile k, which is in this slot, in units of so many bytes."""
        return slot * (self.layout.slot_bytes // unit)


class ResidentTiles:
    """W comes once: tile k at a place of its own, with a barrier of its own that completes one phase and no more.

    The first step brings the tiles beside its slots of x, so that the first main loop does not wait for all of W.
    """

    def __init__(self, kernel: Any):
        self.layout = kernel.layout
        self.count = kernel.geometry.k_slots
        self.first = self.layout.resident_w
        self.full = ring.barriers("w_full", self.count)

    def init(self) -> None:
        """The producer's arming is the one arrival."""
        for k in range(self.count):
            ring.init(self.full, k, 1)

    @contextmanager
    def filled(self, step: Expr, k: Expr, slot: Expr, slot_barrier: Expr) -> Iterator[tuple[Expr, Expr]]:
        """As of RingTiles; the loads are done in the first step only."""
        with when(step == 0):
            ring.arm(self.full, k, self.layout.b_bytes)
            yield self.distance(slot, k) + self.first, self.full.ptr_to([k])

    def wait(self, step: Expr, k: Expr) -> None:
        """In the CTA's first step: a tile that has landed is never written again.

        In the pingpong layout that step is one warp group's; the named barrier that gives the turn to the next one comes
        behind all of its waits, and so hands on what they have seen; so do the turns after it.
        """
        with when(step == 0):
            ring.wait(self.full, k, 0)

    def distance(self, slot: Expr, k: Expr, unit: int = 1) -> Expr:
        """As of RingTiles, whatever slot x is in."""
        return k * (self.layout.b_bytes // unit)


def w_tiles(kernel: Any) -> RingTiles | ResidentTiles:
    """As the plan says.  Declares the barriers."""
    return ResidentTiles(kernel) if kernel.plan.w_resident else RingTiles(kernel)
