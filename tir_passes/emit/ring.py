"""The ring of slots between the producer and the MMA warp groups, and the barriers that guard it.

full[slot]    completes when the producer has armed it and all bytes of the slot's A and B tiles are there
empty[slot]   completes when every consumer of the slot, in every CTA that wrote to it by multicast, is done with it
A wait names the parity of the phase it waits for and may be at most one phase ahead.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import Cell, do, named, when
from tvm_comfuse.tir_passes.emit.instructions import arrive_at

Expr = Any


class Cursor:
    """A position in the ring: slot index and parity of its phase."""

    def __init__(self, depth: int, parity: int, name: str):
        self.depth = depth
        self.slot = Cell("int32", f"{name}_slot", T.int32(0))
        self.parity = Cell("int32", f"{name}_parity", T.int32(parity))

    def advance(self, count: int) -> None:
        """Moves on by `count` slots."""
        self.slot.set(self.slot.value + count % self.depth)
        if (count // self.depth) % 2:
            self.parity.set(self.parity.value ^ 1)
        with when(self.slot.value >= self.depth):
            self.slot.set(self.slot.value - self.depth)
            self.parity.set(self.parity.value ^ 1)

    @property
    def previous(self) -> Expr:
        """The slot before this one."""
        return T.Select(self.slot.value == 0, self.depth - 1, self.slot.value - 1)


def barriers(name: str, count: int) -> Any:
    """Shared memory for `count` mbarriers."""
    return named(name, T.alloc_buffer([count], "uint64", scope="shared", align=8))


def init(barrier: Any, index: Expr, arrivals: int) -> None:
    """mbarrier.init with the number of arrivals that complete a phase."""
    do(T.ptx.mbarrier.init.shared.b64(barrier.ptr_to([index]), T.uint32(arrivals)))


def arrive(barrier: Any, index: Expr) -> None:
    """One arrival on a barrier of this CTA."""
    do(T.ptx.mbarrier.arrive.shared.b64(barrier.ptr_to([index]), T.uint32(1)))


def arm(barrier: Any, index: Expr, transaction_bytes: int) -> None:
    """The producer's arrival, with the bytes that must land before the phase completes."""
    do(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier.ptr_to([index]), T.uint32(transaction_bytes)))


def wait(barrier: Any, index: Expr, parity: Expr) -> None:
    """Waits until the phase of that parity is complete.

    Acquire at CTA scope is enough for slots that other CTAs release: what follows is a TMA load, which the slot's own bytes
    order.  Acquire at cluster scope invalidates the L1 cache at each wait and made the main loop 1.6 times slower.
    """
    do(T.cuda.mbarrier_wait(barrier.ptr_to([index]), parity))


def release(empty: Any, slot: Expr, thread: Expr, place: Any) -> None:
    """One warp group gives a slot back: to its own CTA, and to those whose multicast wrote to it."""
    writers = place.geometry.slot_writers
    with when(thread < writers):
        if writers == 1:
            arrive(empty, slot)
        else:
            arrive_at(empty.ptr_to([slot]), place.writer(thread))
