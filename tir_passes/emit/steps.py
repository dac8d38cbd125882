"""The stages of a step in order: the head up to the last exchange, the tail behind it.

Both run behind the step's main loop; or the tail is deferred into the next step's main loop, beside whose wgmmas it runs.  The
carried value waits in registers then, in half precision: shared memory, where there would be room, is what the main loop is
short of (wgmma reads 80 bytes a cycle and TMA writes 48 of the 128 that it can do).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.plan import QUAD_COLUMNS
from tvm_comfuse.schedules.split import head_blocks, last_round, tail_blocks, tail_stages
from tvm_comfuse.schedules.timetable import Part, early_slots, timetable
from tvm_comfuse.tir_passes.emit import operands, ring
from tvm_comfuse.tir_passes.emit.actions import Action
from tvm_comfuse.tir_passes.emit.dsl import Cell, do, when
from tvm_comfuse.tir_passes.emit.fragment import Fragment
from tvm_comfuse.tir_passes.emit.held import InAccumulators, InParked, InWords, Parked
from tvm_comfuse.tir_passes.emit.instructions import opaque
from tvm_comfuse.tir_passes.emit.mma import Company
from tvm_comfuse.tir_passes.emit.reduce import reduce_across, reduce_local
from tvm_comfuse.tir_passes.emit.stages import RowValues, Stages

Expr = Any


def _nothing() -> None:
    """Nothing comes before the last slots."""


@dataclass
class Steps:
    """Emits head and tail of a kernel's steps.

    rows, columns, parked: registers that live from a step's head to its tail.
    """

    kernel: Any

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.spec, self.staging, self.rounds = kernel.spec, kernel.staging, kernel.rounds
        self.cut = last_round(self.spec)
        self.rows = RowValues(self._fragment(kernel.lane))
        for reduction in self.spec.reductions:
            self.rows.of(reduction.block)
        self.columns = operands.column_registers(kernel, self.rows.fragment.rows)
        self.parked = Parked(kernel, self.rows.fragment) if kernel.plan.defer else None
        self.early, self.ahead = self._early_operands(), self._ahead_operands()

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _stages(self, held: Any, step: Expr) -> Stages:
        kernel = self.kernel
        # addresses made from the lane would otherwise be computed before the main loop, where no register is left for them
        lane = Cell("int32", "stage_lane", kernel.lane)
        opaque(lane.value)
        kernel.fragment = self._fragment(lane.value)
        return Stages(kernel, held(), self.rows, self.columns, step)

    def _fragment(self, lane: Expr) -> Fragment:
        plan = self.kernel.plan
        return Fragment(plan.tile_m, plan.tile_n, self.kernel.warp, lane, plan.w_order == "quads")

    def head(self, step: Expr, use: Expr) -> Stages:
        """All passes up to the last exchange, whose partials are on their way then."""
        stages = self._stages(lambda: InAccumulators(self.kernel), step)
        self.kernel.early = self.early
        operands.load_columns(self.kernel, self.columns, step)
        self._await_operands(use, in_head=True)
        for stage in self.spec.stages[: self.cut]:
            self._stage(stages, stage, use)
        if self.cut >= 0:
            stage = self.spec.stages[self.cut]
            self._outputs(stages, stage.outputs, use, late=False)
            number, members = self._round(stage, use)
            reduce_local(self.kernel, stages, members, self._carry(stages, stage), number, self.parked)
        return stages

    def ask(self, step: Expr) -> None:
        """Asks for the early operands of a step that has no main loop beside which to do so."""
        self._load_halves(step, range(self.rows.fragment.half_boxes))

    def row_values(self, stages: Stages, use: Expr) -> None:
        """The last exchange's row values."""
        if self.cut >= 0:
            number, members = self._round(self.spec.stages[self.cut], use)
            reduce_across(self.kernel, stages, members, number)

    def tail(self, stages: Stages, use: Expr) -> None:
        """All passes behind the last exchange, right away."""
        self._await_operands(use, in_head=False)
        late, behind = tail_stages(self.spec)
        self._outputs(stages, late, use, late=True)
        for stage in behind:
            self._stage(stages, stage, use)
        for slot in self.staging.operand_tiles:
            if not self.staging.stored(slot.tile):
                ring.arrive(self.kernel.tile_empty, self.kernel.tile_barrier(self.kernel.group, slot.tile))

    def _stage(self, stages: Stages, stage: Any, use: Expr) -> None:
        """A whole stage: early outputs, carried value, its round, late outputs."""
        self._outputs(stages, stage.outputs, use, late=False)
        actions = self._carry(stages, stage)
        number, members = self._round(stage, use)
        if members:
            reduce_local(self.kernel, stages, members, actions, number)
            reduce_across(self.kernel, stages, members, number)
        else:
            stages.sweep([actions])
        self._outputs(stages, stage.outputs, use, late=True)

    def _carry(self, stages: Stages, stage: Any) -> list[Action]:
        return [stages.carry(self.kernel.blocks[stage.carried])] if stage.carried else []

    def _round(self, stage: Any, use: Expr) -> tuple[Expr, list[Any]]:
        """The number of a stage's exchange in this launch, and its members; [] if the stage has none."""
        for position, members in enumerate(self.rounds):
            if members[0] in stage.reductions:
                return use * len(self.rounds) + position, members
        return use, []

    def _await_operands(self, use: Expr, in_head: bool) -> None:
        """Waits for the tiles of operands that are read first in the head, or only in the tail."""
        names = head_blocks(self.spec) if self.cut >= 0 else frozenset()
        for slot in self.staging.operand_tiles:
            if in_head != names.isdisjoint(slot.readers):
                self.kernel.stamps.begin("operand", use, slot.tile)
                ring.wait(self.kernel.tile_full, self.kernel.tile_barrier(self.kernel.group, slot.tile), use % 2)
                self.kernel.stamps.end("operand", use, slot.tile)

    # --- results ------------------------------------------------------------------------------------------------------

    def _outputs(self, stages: Stages, outputs: Any, use: Expr, late: bool) -> None:
        for output in outputs:
            if output.late == late:
                self.kernel.stamps.begin("output", use, output.index)
                self._send(stages, output, use)
                self.kernel.stamps.end("output", use, output.index)

    def _send(self, stages: Stages, output: Any, use: Expr) -> None:
        """One output, in a pass of its own."""
        kernel, staging = self.kernel, self.staging
        block, buffer = kernel.blocks[output.block], kernel.buffers[output.index]
        if output.kind == "row":
            stages.send_row(block, buffer)
            return
        slot = staging.store_of(output.block)
        if slot is None:
            stages.sweep([[stages.send_global(block, buffer)]])
            return
        nth, again = staging.store_tiles.index(slot), len(staging.store_tiles) - 1
        kernel.stamps.begin("result tile", use, nth)
        if nth > 0:
            ring.wait(kernel.tile_next, kernel.group, (use * again + nth - 1) % 2)
        elif not staging.loaded(slot.tile):
            ring.wait(kernel.tile_empty, kernel.tile_barrier(kernel.group, slot.tile), (use + 1) % 2)
        kernel.stamps.end("result tile", use, nth)
        stages.sweep([[stages.send_tile(block, str(buffer.dtype), slot.tile)]])
        do(T.ptx.fence.proxy.async_.shared__cta())
        ring.arrive(kernel.tile_ready, kernel.group)

    # --- beside the main loop -----------------------------------------------------------------------------------------

    def company(self, step: Expr, use: Expr) -> Company:
        """What runs beside a step's main loop: of the step before, the deferred part; of this step, the first operands of the
        head."""
        last = early_slots(self.kernel.plan, self.spec.k) if self.early else 0
        parts = timetable(self.kernel.plan, self.spec.k) if self.parked else []
        first = partial(self._beside_first, parts, step, use)
        if self.parked is not None:
            at_once = partial(self._load_halves, step, range(self.rows.fragment.half_boxes))
            return Company(len(parts), first, last, at_once, None)
        return Company(len(parts), first, last, _nothing, partial(self._load_early, step, last))

    def _beside_first(self, parts: list[Part], step: Expr, use: Expr, k: Expr) -> None:
        with when(use > 0):
            for slot, part in enumerate(parts):
                if part.busy:
                    with when(k == slot):
                        self._deferred(parts, slot, step - 1, use - 1)

    def _deferred(self, parts: list[Part], slot: int, step: Expr, use: Expr) -> None:
        """A part of the deferred work of a step; what the next part reads is asked for first."""
        parked = self.parked
        assert parked is not None
        held = InWords if self.kernel.plan.packed_tail else InParked
        stages = self._stages(lambda: held(self.kernel, parked), step)
        self.kernel.stamps.begin("tail", use, slot)
        if slot + 1 < len(parts):
            self._load_ahead(parts, slot + 1, step)
        if parts[slot].takes:
            self.row_values(stages, use)
            for output in self._tail_outputs():
                if output.kind == "row":
                    self._send(stages, output, use)
        if parts[slot].tail:
            self.kernel.early = {index: buffers[slot % 2] for index, buffers in self.ahead.items()}
            for buffers in self.kernel.early.values():
                buffers.first = parts[slot].tail[0]
            stages.sweep_part(self._tail_passes(stages), parts[slot].tail)
        self.kernel.stamps.end("tail", use, slot)

    def _load_ahead(self, parts: list[Part], slot: int, step: Expr) -> None:
        """The operands that a part of the tail reads from global memory."""
        for index, buffers in self.ahead.items():
            rows = operands.GlobalRows(self.kernel, self.kernel.tiles[index].buffer, step)
            buffers[slot % 2].first = parts[slot].tail[0] if parts[slot].tail else 0
            buffers[slot % 2].load_groups(rows, parts[slot].tail)

    def last_tail(self, steps: Expr) -> None:
        """The deferred work of the last step, which no main loop follows."""
        if self.parked is not None:
            with when(steps > 0):
                self.parked_tail(steps - 1)

    def parked_tail(self, step: Expr) -> None:
        """The deferred work of a step, if there is any, all at once."""
        if self.parked is None:
            return
        parts = timetable(self.kernel.plan, self.spec.k)
        for slot, part in enumerate(parts):
            if part.busy:
                self._deferred(parts, slot, step, step)

    def _tail_passes(self, stages: Stages) -> list[list[Action]]:
        late, behind = tail_stages(self.spec)
        passes = [self._send_part(stages, output) for output in late]
        for stage in behind:
            early, own_late = ([o for o in stage.outputs if o.late == after] for after in (False, True))
            passes += [self._send_part(stages, output) for output in early]
            passes += [self._carry(stages, stage)]
            passes += [self._send_part(stages, output) for output in own_late]
        return passes

    def _tail_outputs(self) -> list[Any]:
        late, behind = tail_stages(self.spec)
        return [*late, *(output for stage in behind for output in stage.outputs)]

    def _send_part(self, stages: Stages, output: Any) -> list[Action]:
        if output.kind == "row":
            return []
        return [stages.send_global(self.kernel.blocks[output.block], self.kernel.buffers[output.index])]

    def _early_operands(self) -> dict[int, operands.Eights]:
        """Registers for the first operand that the stages behind the main loop read from global memory; there is room for one.

        It is asked for before the main loop's last products are there: their wait hides its latency.
        """
        kernel = self.kernel
        kernel.fragment = self.rows.fragment
        soon = head_blocks(self.spec)
        if self.parked is None:
            soon |= tail_blocks(self.spec)
        for index, operand in enumerate(kernel.tiles):
            if operands.reads_eights(kernel, index) and not soon.isdisjoint(operand.readers):
                dtype, groups = str(operand.buffer.dtype), kernel.plan.tile_n // QUAD_COLUMNS
                return {index: operands.Eights(kernel, dtype, groups, 0)}
        return {}

    def _ahead_operands(self) -> dict[int, list[operands.Eights]]:
        """Registers for what a part of a deferred tail reads from global memory, and for the next part."""
        kernel = self.kernel
        if self.parked is None:
            return {}
        most = max(len(part.tail) for part in timetable(kernel.plan, self.spec.k))
        tail = tail_blocks(self.spec)
        return {
            index: [operands.Eights(kernel, str(operand.buffer.dtype), most, 0) for _ in range(2)]
            for index, operand in enumerate(kernel.tiles)
            if operands.reads_eights(kernel, index) and not tail.isdisjoint(operand.readers)
        }

    def _load_early(self, step: Expr, slots: int, k: Expr) -> None:
        """Asks for the early operands of some boxes, beside the k-th of the last slots: what comes all at once holds up the
        tiles of the ring.

        With a deferred tail that lost: the registers are free two slots before the end at the soonest, and what is asked for
        in the last one comes late.
        """
        halves = self.rows.fragment.half_boxes
        turns = min(slots, math.ceil(halves / 2))
        for slot in range(turns):
            with when(k == slot):
                # whole boxes, of which the last may be half a one
                first, last = (2 * (math.ceil(halves / 2) * nth // turns) for nth in (slot, slot + 1))
                self._load_halves(step, range(first, min(last, halves)))

    def _load_halves(self, step: Expr, halves: range) -> None:
        self._stages(lambda: InAccumulators(self.kernel), step)
        for index, eights in self.early.items():
            rows = operands.GlobalRows(self.kernel, self.kernel.tiles[index].buffer, step)
            eights.load_groups(rows, halves)
