"""The main loop of an MMA warp group: wgmma over the slots of one step, accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import Cell, do, rolled, unrolled
from tvm_comfuse.tir_passes.emit.instructions import pin
from tvm_comfuse.tir_passes.emit.ring import Cursor, release, wait
from tvm_comfuse.tir_passes.emit.shared import ATOM_BYTES

Expr = Any
#: K of one wgmma of half-precision elements
K_STEP = 16
#: rows of one wgmma
M_ROWS = 64
#: descriptors count in units of 16 bytes
UNIT = 16
#: swizzle code of 128 bytes in a matrix descriptor
SWIZZLE_128B = 3


def _alone() -> None:
    """Nothing runs beside a slot."""


@dataclass(frozen=True)
class Company:
    """What else a warp group does while its wgmmas run.

    first_slots, beside_first(k)  emitted beside each of the first slots, which are unrolled
    before_last()                 emitted once, before the last slots
    last_slots, beside_last(k)    emitted beside each of the last slots, which are unrolled then; None: nothing is
    """

    first_slots: int
    beside_first: Callable[[Expr], None]
    last_slots: int
    before_last: Callable[[], None]
    beside_last: Callable[[Expr], None] | None


ALONE = Company(0, lambda k: None, 0, lambda: None, None)


class MainLoop:
    """Descriptors of both operands and the loop that uses them.  `group_row`, `group_column`: the warp group's place in a
    cooperative CTA tile (0 in the pingpong layout)."""

    def __init__(self, kernel: Any, group_row: Expr, group_column: Expr):
        self.kernel = kernel
        plan, spec = kernel.plan, kernel.spec
        self.blocks = plan.tile_m // M_ROWS
        self.per_block = plan.tile_n // 2
        self.transposed = spec.w_layout == "KN"
        self.a = Cell("uint64", "a_descriptor")
        self.b = Cell("uint64", "b_descriptor")
        a_offset = group_row * (plan.tile_m * ATOM_BYTES)
        b_offset = kernel.w_tiles.first + group_column * (plan.tile_n * ATOM_BYTES)
        # stride between groups of eight rows of 128 bytes; between blocks of 64 columns if N is the contiguous axis
        stride = 8 * ATOM_BYTES // UNIT
        leading = plan.tile_k * ATOM_BYTES // UNIT if self.transposed else 1
        encode = T.cuda.wgmma.encode_matrix_descriptor
        do(encode(self.a.address, kernel.smem.ptr_to([a_offset]), 1, stride, SWIZZLE_128B))
        do(encode(self.b.address, kernel.smem.ptr_to([b_offset]), leading, stride, SWIZZLE_128B))

    def slot(self, cursor: Cursor, k: Expr) -> None:
        """The wgmmas of a step's k-th slot, committed as one group; the first overwrites the accumulators."""
        kernel = self.kernel
        half = {"bfloat16": "bf16", "float16": "f16"}[kernel.spec.x_dtype]
        name = f"wgmma.mma_async.sync.aligned.m64n{kernel.plan.tile_n}k16.f32.{half}.{half}"
        a_moved = T.cast(cursor.slot.value * (kernel.layout.slot_bytes // UNIT), "uint64")
        b_moved = T.cast(kernel.w_tiles.distance(cursor.slot.value, k, UNIT), "uint64")
        # 16 columns further inside the 128-byte row, or 16 rows further down if N is the contiguous axis
        b_step = K_STEP * ATOM_BYTES // UNIT if self.transposed else K_STEP * 2 // UNIT
        do(T.ptx.wgmma.fence.sync.aligned())
        for step in range(kernel.plan.tile_k // K_STEP):
            for block in range(self.blocks):
                base = block * self.per_block
                a_move = block * M_ROWS * ATOM_BYTES // UNIT + step * K_STEP * 2 // UNIT
                do(
                    T.ptx[name](
                        *[kernel.acc[base + i] for i in range(self.per_block)],
                        self.a.value + a_moved + T.uint64(a_move),
                        self.b.value + b_moved + T.uint64(step * b_step),
                        T.Not(k == 0) if step == 0 else T.bool(True),
                        1,
                        1,
                        0,
                        int(self.transposed),
                    )
                )
        do(T.ptx.wgmma.commit_group.sync.aligned())

    def run(self, cursor: Cursor, step: Expr, issued: Any, company: Company) -> None:
        """All slots of one step.  `issued()` emits what happens when the last wgmma is on its way."""
        kernel, slots = self.kernel, self.kernel.geometry.k_slots
        first, last = company.first_slots, company.last_slots
        if first:
            with unrolled(first, "k") as k:
                self._slot_and_more(cursor, step, k, partial(company.beside_first, k))
        if slots > first + last:
            with rolled(slots - first - last, "k") as k:
                self._slot_and_more(cursor, step, k + first, _alone)
        # no condition in a loop leads there: what it brings would hold registers in every slot
        if last:
            company.before_last()
            beside = company.beside_last
            with (rolled if beside is None else unrolled)(last, "k") as k:
                self._slot_and_more(cursor, step, k + (slots - last), _alone if beside is None else partial(beside, k))
        issued()
        kernel.stamps.begin("drain", step // kernel.geometry.steps_of_group)
        do(T.ptx.wgmma.wait_group.sync.aligned(0))
        kernel.stamps.end("drain", step // kernel.geometry.steps_of_group)
        release(kernel.empty, cursor.previous, kernel.thread, kernel.place)
        with unrolled(kernel.accumulators, "i") as i:
            pin(kernel.acc[i])

    def _slot_and_more(self, cursor: Cursor, step: Expr, k: Expr, beside: Any) -> None:
        kernel = self.kernel
        use, slots = step // kernel.geometry.steps_of_group, kernel.geometry.k_slots
        kernel.stamps.begin("full slot", use, at=k, extent=slots)
        wait(kernel.full, cursor.slot.value, cursor.parity.value)
        kernel.w_tiles.wait(step, k)
        kernel.stamps.end("full slot", use, at=k, extent=slots)
        self.slot(cursor, k)
        beside()
        # the group before this one is complete now: its slot goes back
        do(T.ptx.wgmma.wait_group.sync.aligned(1))
        with kernel.when(k > 0):
            release(kernel.empty, cursor.previous, kernel.thread, kernel.place)
        cursor.advance(1)
