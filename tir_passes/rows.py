"""The kernel of a rows function, the second of a split cluster: each row is read once and stays in registers.

A row belongs to one warp or to several of a CTA; a CTA takes every ctas-th group of rows.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as frames

from tvm_comfuse.schedules.analysis import normal_forms
from tvm_comfuse.schedules.rows import CHUNK, LANES, WARPS_OF_GROUP, RowsPlan
from tvm_comfuse.schedules.spec import RowsSpec
from tvm_comfuse.tir_passes.emit.dsl import Expr, loop, named, registers, store
from tvm_comfuse.tir_passes.emit.row_exchange import slots
from tvm_comfuse.tir_passes.emit.row_stages import RowStages
from tvm_comfuse.tir_passes.kernel import Home

#: bytes of a partial row value
PARTIAL = 4
#: threads that an SM should run at once, of 2048, by the most chunks a lane loads: enough have 40 KB or more in flight, and the
#: fewer they are, the more registers each has (80, 96, 128)
RESIDENT = ((4, 768), (8, 640), (math.inf, 512))


class RowsKernel:
    """One kernel while it is emitted."""

    def __init__(self, func: tirx.PrimFunc, spec: RowsSpec, plan: RowsPlan, name: str):
        self.func, self.spec, self.plan, self.name = func, spec, plan, name
        self.blocks = normal_forms(func)
        #: where the kernel keeps what a buffer of the function holds; operands by their number among the parameters
        self._homes = {func.params[op.index]: Home(op.kind, op.name, op.index) for op in spec.operands}
        for block_name, block in self.blocks.items():
            kind = "row_value" if block.nth is not None else "carried"
            self._homes[block.store.buffer] = Home(kind, block_name, 0)

    def home(self, buffer: Any) -> Home:
        """The home of a buffer that a stage reads."""
        return self._homes[buffer]

    def emit(self) -> tirx.PrimFunc:
        """The whole function."""
        with IRBuilder() as builder, frames.ir.prim_func():
            frames.ir.func_name(self.name)
            self.buffers = []
            for param in self.func.params:
                handle = frames.ir.arg(f"{param.name}_ptr", T.handle())
                buffer = T.match_buffer(handle, list(param.shape), str(param.dtype), align=16)
                self.buffers.append(named(param.name, buffer))
            frames.ir.device_entry()
            with T.attr({"tirx.launch_bounds_min_blocks_per_sm": self._ctas_of_sm()}):
                self._identify()
                self._body()
        return builder.get()

    def _ctas_of_sm(self) -> int:
        """CTAs that an SM should run at once: they limit the registers of a thread."""
        chunks = self.plan.chunks * len(self.spec.tile_operands)
        threads = next(threads for most, threads in RESIDENT if chunks <= most)
        return max(1, threads // self.plan.threads)

    def _identify(self) -> None:
        plan, m = self.plan, self.buffers[0].shape[0]
        self.cta = named("cta", T.cta_id([plan.ctas]))
        warp_group = named("warp_group", T.warpgroup_id([plan.threads // (LANES * WARPS_OF_GROUP)]))
        warp = named("warp", T.warp_id_in_wg([WARPS_OF_GROUP]))
        self.lane = named("lane", T.lane_id([LANES]))
        number = warp_group * WARPS_OF_GROUP + warp
        self.row_in_cta, self.part = number // plan.warps, number % plan.warps
        self.first_lane = T.And(self.part == 0, self.lane == 0)
        self.m = T.int32(self.spec.m) if self.spec.m is not None else T.cast(m, "int32")

    def _body(self) -> None:
        plan = self.plan
        count = slots(self)
        if count:
            smem = named("smem", T.alloc_buffer([count * PARTIAL], "uint8", scope="shared.dyn", align=16))
            self.partials = T.decl_buffer([count], "float32", data=smem.data, scope="shared.dyn", byte_offset=0)
        self.scalars = {op.index: self._scalar(op) for op in self.spec.operands if op.kind == "scalar"}
        groups = (self.m + (plan.rows - 1)) // plan.rows
        with loop((groups - self.cta + (plan.ctas - 1)) // plan.ctas, "step") as step:
            row = (self.cta + step * plan.ctas) * plan.rows + self.row_in_cta
            RowStages(self, row, step).emit()

    def _scalar(self, operand: Any) -> Any:
        cell = registers([1], "float32", operand.name)
        store(cell, T.cast(self.buffers[operand.index][0], "float32"), 0)
        return cell

    def column(self, chunk: int) -> Expr:
        """First column of a lane's chunk."""
        return ((chunk * self.plan.warps + self.part) * LANES + self.lane) * CHUNK

    def inside_columns(self, chunk: int) -> Expr | None:
        """Whether a lane's chunk lies in the row; None: it does in every lane."""
        reach = (chunk + 1) * self.plan.warps * LANES * CHUNK
        return None if reach <= self.spec.n else self.column(chunk) < self.spec.n

    def inside(self, row: Expr, chunk: int) -> Expr:
        """Whether a lane's chunk lies in the tensors."""
        columns = self.inside_columns(chunk)
        return row < self.m if columns is None else T.And(row < self.m, columns)
