"""Row values across warp groups, CTAs and the grid, by mailboxes.

A partial travels as one 8-byte store of (value, tag); a reader takes it once the tag is the one it expects, so the data is
its own flag: no fence, and one trip instead of two.  A slot is written at every second exchange of its warp group (two
parities).  Writing exchange x + 2 cannot overtake a reader of exchange x: the writer has finished exchange x + 1, for which
it took a partial of that reader, who had sent it after reading exchange x.

cta, cluster   slots in the shared memory of every reader (distributed shared memory); tags count from 1
grid           one slot in global memory; tags go on from launch to launch, so nothing has to be cleared in between.  In front
               of its first exchange a warp group waits until its launch owns the slots (emit/workspace.py)
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import do, f32, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.instructions import post_cluster, post_grid, take

Expr = Any
QUAD = 4
#: a slot is used again by the exchange after the next
PARITIES = 2


def slots_of_group(kernel: Any) -> int:
    """Mailbox slots of a row group: for every warp group and both parities, every part, value and row."""
    plan = kernel.plan
    return plan.mma_groups * PARITIES * kernel.geometry.row_parts * kernel.layout.row_values * plan.tile_m


class Exchange:
    """Sends a warp group's row partials and takes those of all parts of the row."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.parts = kernel.geometry.row_parts
        self.scope = kernel.plan.exchange

    def post(self, number: Expr, partial: Any) -> None:
        """Sends this part's partials.

        number   how many exchanges this warp group did before, in this launch
        partial  registers [values, rows]
        """
        count, rows = partial.shape
        self.kernel.stamps.begin_round("post", number)
        tag = self._tag(number)
        for value in range(int(count)):
            for row in range(int(rows)):
                self._post(number % PARITIES, self.kernel.row_part, value, row, partial[value, row], tag)
        self.kernel.stamps.end_round("post", number)

    def take(self, count: int, number: Expr) -> Any:
        """Waits for the partials of all parts.

        count  values per row
        Returns registers [count, rows, mine]: the partials of parts q, q + 4, ... for lane q of a quad.
        """
        fragment = self.kernel.fragment
        mine, tag = -(-self.parts // QUAD), self._tag(number)
        got = registers([count, fragment.rows, mine], "float32", "taken")
        self.kernel.stamps.begin_round("exchange", number)
        for turn in range(mine):
            source = fragment.quad_lane + turn * QUAD
            for value in range(count):
                for row in range(fragment.rows):
                    store(got, f32(0.0), value, row, turn)
            with when(source < self.parts):
                which = [(value, row) for value in range(count) for row in range(fragment.rows)]
                slots = [self._slot(number % PARITIES, source, value, row) for value, row in which]
                take(self._memory, tag, slots, [got[value, row, turn] for value, row in which])
        self.kernel.stamps.end_round("exchange", number)
        return got

    def _tag(self, number: Expr) -> Expr:
        # not the sum of two conversions: TVM's analyzer takes the number of a step before for a negative one
        tag = u32(number + 1)
        return self._tag_base() + tag if self.scope == "grid" else tag

    def _tag_base(self) -> Expr:
        """The tags of this launch begin behind this one.  It is loaded anew for each exchange: the main loop has no register
        to keep it in."""
        kernel = self.kernel
        base = registers([1], "uint32", "tag_base")
        do(T.ptx.ld.shared.u32(base[0], kernel.smem.ptr_to([kernel.layout.mailbox])))
        return base[0]

    def _post(self, parity: Expr, part: Expr, value: int, row: int, what: Expr, tag: Expr) -> None:
        kernel, lane = self.kernel, self.kernel.fragment.quad_lane
        if self.scope == "grid":
            # all four lanes of the quad have the partial; they share the stores
            with when(lane == (value + row) % QUAD):
                post_grid(self._global_slot(parity, part, value, row), what, tag)
            return
        # lane q of the quad serves the CTAs q, q + 4, ...
        slot = self._shared_slot(parity, part, value, row)
        readers = kernel.geometry.parts
        for turn in range(-(-readers // QUAD)):
            reader = lane + turn * QUAD
            with when(reader < readers):
                post_cluster(slot, self._rank_of(reader), what, tag)

    def _rank_of(self, part: Expr) -> Expr:
        """Cluster rank of the CTA with the columns of `part` and this CTA's rows."""
        plan, place = self.kernel.plan, self.kernel.place
        return part * plan.cluster_m + place.share if plan.cluster_n > 1 else place.rank

    @property
    def _memory(self) -> str:
        """Where the slots are that this warp group reads."""
        return "grid" if self.scope == "grid" else "cluster"

    def _slot(self, parity: Expr, part: Expr, value: int, row: int) -> Expr:
        of = self._global_slot if self.scope == "grid" else self._shared_slot
        return of(parity, part, value, row)

    def _index(self, parity: Expr, part: Expr, value: int, row: int) -> Expr:
        kernel, fragment = self.kernel, self.kernel.fragment
        domain = kernel.group if kernel.geometry.pingpong else kernel.group_row(kernel.group)
        values = kernel.layout.row_values
        index = (domain * PARITIES + parity) * self.parts + part
        return (index * values + value) * kernel.plan.tile_m + fragment.row(row)

    def _shared_slot(self, parity: Expr, part: Expr, value: int, row: int) -> Expr:
        return self.kernel.smem.ptr_to([self.kernel.layout.mailbox + self._index(parity, part, value, row) * 8])

    def _global_slot(self, parity: Expr, part: Expr, value: int, row: int) -> Expr:
        kernel = self.kernel
        return kernel.workspace.slot(
            kernel.place.row_group * slots_of_group(kernel) + self._index(parity, part, value, row)
        )
