"""From the MMA warp groups to the memory warp group: a tile of products, through shared memory, in half precision.

Thread t of the memory warp group takes what thread t of an MMA warp group has put there, so it holds the same elements and
runs the same stages on them.  A thread's words lie 16 bytes at a time, those of neighbouring threads side by side.

given[group]  completes when an MMA warp group has written its tile
taken[group]  completes when the memory warp group has read it
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.registers import THREADS_OF_GROUP
from tvm_comfuse.tir_passes.emit import operands, ring
from tvm_comfuse.tir_passes.emit.dsl import do, registers, store

Expr = Any
#: words of an access, two half-precision numbers each, and its bytes
WORDS, ACCESS = 4, 16


class Handover:
    """Both ends.  Declares the barriers."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.accesses = kernel.accumulators // (2 * WORDS)
        self.given = ring.barriers("given", kernel.plan.mma_groups)
        self.taken = ring.barriers("taken", kernel.plan.mma_groups)

    def init(self) -> None:
        """Every thread arrives for itself."""
        for group in range(self.kernel.plan.mma_groups):
            ring.init(self.given, group, THREADS_OF_GROUP)
            ring.init(self.taken, group, THREADS_OF_GROUP)

    def give(self, use: Expr) -> None:
        """An MMA warp group's part, behind its main loop."""
        kernel = self.kernel
        ring.wait(self.taken, kernel.group, (use + 1) % 2)  # parity 1 passes on a fresh barrier
        for access in range(self.accesses):
            words = registers([WORDS], "uint32", "handed")
            for word in range(WORDS):
                first = (access * WORDS + word) * 2
                operands.pack(words[word], kernel.acc[first], kernel.acc[first + 1], kernel.spec.x_dtype)
            do(T.ptx.st.shared.v4.u32(self._address(access), *[words[word] for word in range(WORDS)]))
        ring.arrive(self.given, kernel.group)

    def take(self, use: Expr) -> None:
        """The memory warp group's part: the tile of kernel.group, as float32 in kernel.acc."""
        kernel = self.kernel
        ring.wait(self.given, kernel.group, use % 2)
        words = registers([self.accesses, WORDS], "uint32", "taken_words")
        for access in range(self.accesses):
            do(T.ptx.ld.shared.v4.u32(*[words[access, word] for word in range(WORDS)], self._address(access)))
        ring.arrive(self.taken, kernel.group)
        for access in range(self.accesses):
            for word in range(WORDS):
                for element, value in enumerate(operands.unpack(words[access, word], kernel.spec.x_dtype)):
                    store(kernel.acc, value, (access * WORDS + word) * 2 + element)

    def _address(self, access: int) -> Expr:
        kernel = self.kernel
        place = access * THREADS_OF_GROUP + kernel.thread
        return kernel.smem.ptr_to([kernel.layout.handover(kernel.group) + place * ACCESS])
