"""The kernel of a cluster, from top to bottom.

Warp group 0 moves tiles; the others, two unless the plan says more, multiply and run the stages.  In the memory layout they
only multiply, and the last warp group runs the stages.  See docs/kernel.md for the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as frames

from tvm_comfuse.schedules.analysis import normal_forms
from tvm_comfuse.schedules.footprint import a_box_rows, w_box_rows
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.registers import THREADS_OF_GROUP, role_registers
from tvm_comfuse.schedules.spec import ClusterSpec, rounds
from tvm_comfuse.schedules.split import tail_blocks
from tvm_comfuse.schedules.tails import packed_vectors
from tvm_comfuse.tir_passes.emit import ring, roles
from tvm_comfuse.tir_passes.emit.dsl import Expr, do, either, loop, named, store, u32, when
from tvm_comfuse.tir_passes.emit.exchange import slots_of_group
from tvm_comfuse.tir_passes.emit.geometry import CtaPlace, Geometry
from tvm_comfuse.tir_passes.emit.handover import Handover
from tvm_comfuse.tir_passes.emit.shared import ALIGNMENT, SharedLayout
from tvm_comfuse.tir_passes.emit.staging import StagingTiles
from tvm_comfuse.tir_passes.emit.stamps import NoStamps, Stamps
from tvm_comfuse.tir_passes.emit.tensormaps import quad_map, tensor_map
from tvm_comfuse.tir_passes.emit.w_tiles import w_tiles
from tvm_comfuse.tir_passes.emit.workspace import Workspace

WARP_GROUP = THREADS_OF_GROUP
#: attribute of a function with tags of its launch, and the tag of a cooperative one (names of TVM's runtime)
LAUNCH_PARAMS, COOPERATIVE = "tirx.kernel_launch_params", "tirx.use_cooperative_launch"
#: the tag of a programmatic dependent launch, as TVM's runtime spells it
DEPENDENT = "tirx.use_programtic_dependent_launch"
#: thread that prefetches the tensor maps: one of another warp than the thread that initialises the barriers
PREFETCH_THREAD = 32


@dataclass(frozen=True)
class Home:
    """Where the kernel keeps what a buffer of the scheduled function holds."""

    kind: str  # carried, row_value, tile, col, row, scalar
    name: str
    index: int


class Kernel:
    """One kernel while it is emitted.  The first methods declare; `emit` is the kernel."""

    when = staticmethod(when)

    def __init__(self, func: tirx.PrimFunc, spec: ClusterSpec, plan: Plan, name: str, stamped_steps: int = 0):
        self.func, self.spec, self.plan, self.name = func, spec, plan, name
        self.geometry = Geometry(plan, spec)
        self.registers = role_registers(plan.mma_groups, plan.hands_over)
        self.blocks = normal_forms(func)
        #: what a thread holds of its tile, and operands it has asked for; both are set by Steps
        self.fragment: Any = None
        self.early: dict[int, Any] = {}
        self.rounds = rounds(spec)
        #: blocks whose expressions are computed in packed half precision
        self.packed_blocks = tail_blocks(spec) if plan.packed_tail else frozenset()
        self.staging = StagingTiles.of(spec, plan)
        values = max([len(members) for members in self.rounds], default=0)
        self.layout = SharedLayout(self.geometry, self.staging.count, len(spec.col_operands), values)
        self.workspace = Workspace(name, self.geometry.row_groups * slots_of_group(self))
        self.stamps: NoStamps = Stamps(self, stamped_steps) if stamped_steps else NoStamps()

    # --- what lives where ---------------------------------------------------------------------------------------------

    @cached_property
    def _homes(self) -> dict[Any, Home]:
        homes: dict[Any, Home] = {}
        for name, block in self.blocks.items():
            if name == "gemm" or (name.startswith("stage_") and "_out" not in name):
                homes[block.store.buffer] = Home("carried", name, 0)
            elif name.startswith("reduce_"):
                homes[block.store.buffer] = Home("row_value", name, 0)
        counts: dict[str, int] = {}
        for operand in self.spec.operands:
            index = counts.get(operand.kind, 0)
            counts[operand.kind] = index + 1
            homes[self.func.params[operand.index]] = Home(operand.kind, operand.name, index)
        return homes

    def home(self, buffer: Any) -> Home:
        """The home of a buffer that a stage reads."""
        return self._homes[buffer]

    def inputs(self, kind: str) -> list[Any]:
        """The scheduled function's parameters of one kind of operand, in order."""
        return [self.func.params[operand.index] for operand in self.spec.operands if operand.kind == kind]

    def merge_of(self, block: str) -> str | None:
        """How the reduction that pairs up with `block` merges with it."""
        return next((r.merge for r in self.spec.reductions if r.merge_with == block), None)

    def group_row(self, group: Expr) -> Expr:
        """Row of a warp group in the CTA tile, in tiles."""
        return group // self.plan.groups_n if self.plan.groups_m > 1 else 0

    def group_column(self, group: Expr) -> Expr:
        """Column of a warp group in the CTA tile, in tiles."""
        return group % self.plan.groups_n if self.plan.groups_n > 1 else 0

    def global_row(self, step: Expr, row: int) -> Expr:
        """Row of the result of a thread's row number `row`."""
        return self.place.row(step) + self.group_row(self.group) * self.plan.tile_m + self.fragment.row(row)

    def global_column(self, step: Expr, column: Expr) -> Expr:
        """Column of the result of a column of the warp group's tile."""
        return self.place.column(step) + self.group_column(self.group) * self.plan.tile_n + column

    def inside(self, row: Expr, column: Expr) -> Expr:
        """Whether two neighbours from `column` on lie in the result (N is a multiple of 8)."""
        if self.geometry.ragged_n:
            return T.And(row < self.place.rows, column < self.spec.n)
        return row < self.place.rows

    @property
    def row_part(self) -> Expr:
        """Part of the row this warp group has."""
        return self.place.part * self.plan.groups_n + self.group_column(self.group)

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread."""
        return self.plan.tile_m * self.plan.tile_n // WARP_GROUP

    def tile_barrier(self, group: Expr, tile: int) -> Expr:
        """Index of a staging tile among those of all warp groups."""
        return group * self.staging.count + tile

    # --- the kernel ---------------------------------------------------------------------------------------------------

    def emit(self) -> tirx.PrimFunc:
        """The whole function: host part, then the device part."""
        with IRBuilder() as builder, frames.ir.prim_func():
            frames.ir.func_name(self.name)
            self._parameters()
            self._tensor_maps()
            frames.ir.device_entry()
            with T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}):
                self._identify()
                self.stamps.enter()
                self._declare_shared()
                self._prologue()
                self.stamps.first()
                # one if with a branch for each role: ptxas raises a branch's register limit only in this form
                with either(self.warp_group == 0) as (producer, others):
                    with producer:
                        roles.producer(self)
                    with others:
                        roles.others(self)
                self._epilogue()
                self.stamps.last()
        tags = self._launch_tags()
        return builder.get().with_attr(LAUNCH_PARAMS, tags) if tags else builder.get()

    def _launch_tags(self) -> list[str]:
        """How the kernel is launched.  Cooperatively, all CTAs run at the same time or the launch fails."""
        wanted = {COOPERATIVE: self.plan.exchange == "grid", DEPENDENT: self.plan.dependent_launch}
        return [tag for tag, holds in wanted.items() if holds]

    def _parameters(self) -> None:
        self.buffers = []
        for param in self.func.params:
            handle = frames.ir.arg(f"{param.name}_ptr", T.handle())
            buffer = T.match_buffer(handle, list(param.shape), str(param.dtype), align=16)
            self.buffers.append(named(param.name, buffer))
        x, w = self.buffers[:2]
        self.x, self.w = x, w
        self.stamps.declare()
        self.real = dict(zip(self.func.params, self.buffers, strict=True))
        self.vectors = [self.real[b] for b in self.inputs("col")]

    def _tensor_maps(self) -> None:
        plan = self.plan
        self.a_map = tensor_map("a_map", self.x, a_box_rows(plan))
        w_map = quad_map if plan.w_order == "quads" else tensor_map
        self.w_map = w_map("w_map", self.w, w_box_rows(plan, self.spec.w_layout))
        self.staging.bind(self.real, self.func.params, plan.tile_m)

    @property
    def tensor_maps(self) -> list[Any]:
        """Every tensor map, those that are needed first in front."""
        others = [slot.map for slot in [*self.staging.operands, *self.staging.stores] if slot.map is not None]
        return [self.a_map, self.w_map, *others]

    def _identify(self) -> None:
        size = self.geometry.cluster_size
        if size > 1:
            cluster = named("cluster", T.cluster_id([self.plan.ctas // size]))
            rank = named("rank", T.cta_id_in_cluster([size]))
        else:
            cluster, rank = named("cta", T.cta_id([self.plan.ctas])), T.int32(0)
        self.warp_group = named("warp_group", T.warpgroup_id([self.plan.threads // WARP_GROUP]))
        self.warp = named("warp", T.warp_id_in_wg([4]))
        self.lane = named("lane", T.lane_id([32]))
        self.cta = cluster * size + rank
        self.last_cta = T.And(cluster == self.plan.ctas // size - 1, rank == size - 1)
        self.thread = self.warp * 32 + self.lane
        self.cta_thread = self.warp_group * WARP_GROUP + self.thread
        self.group = self.warp_group - 1
        rows = self.spec.m if self.spec.m is not None else T.cast(self.x.shape[0], "int32")
        self.place = CtaPlace(self.geometry, cluster, rank, T.int32(rows) if isinstance(rows, int) else rows)

    def _declare_shared(self) -> None:
        self.smem = named("smem", T.alloc_buffer([self.layout.total], "uint8", scope="shared.dyn", align=ALIGNMENT))
        tiles = max(self.plan.mma_groups * self.staging.count, 1)
        self.full = ring.barriers("full", self.plan.pipeline_depth)
        self.empty = ring.barriers("empty", self.plan.pipeline_depth)
        self.w_tiles = w_tiles(self)
        self.tile_full = ring.barriers("tile_full", tiles)
        self.tile_empty = ring.barriers("tile_empty", tiles)
        self.tile_ready = ring.barriers("tile_ready", self.plan.mma_groups)
        self.handover = Handover(self) if self.plan.hands_over else None
        self.tile_next = ring.barriers("tile_next", self.plan.mma_groups) if len(self.staging.stores) > 1 else None
        if self.plan.exchange == "grid":
            self.mail_ready = ring.barriers("mail_ready", 1)
            self.tag_word = T.decl_buffer(
                [1], "uint32", data=self.smem.data, scope="shared.dyn", byte_offset=self.layout.mailbox
            )
        packed = packed_vectors(self.plan, self.spec)
        self.vector_views = [
            T.decl_buffer(
                [self.plan.cta_columns],
                self.spec.x_dtype if operand.name in packed else "float32",
                data=self.smem.data,
                scope="shared.dyn",
                byte_offset=self.layout.vector(index),
            )
            for index, operand in enumerate(self.spec.col_operands)
        ]

    def _prologue(self) -> None:
        """Barriers and empty mailboxes; then everybody sees them, in the whole cluster.  Nothing waits for memory here:
        the producer begins to load right behind it.

        In a dependent launch the kernel in front may still run up to here, and the next one may start.
        """
        with when(self.cta_thread == PREFETCH_THREAD):
            if self.plan.dependent_launch:
                do(T.ptx.griddepcontrol.launch_dependents())
            for tensor_map in self.tensor_maps:
                do(T.ptx.prefetch.tensormap(T.address_of(tensor_map)))
        consumers = 1 if self.geometry.pingpong else self.plan.mma_groups
        with when(self.cta_thread == 0):
            for slot in range(self.plan.pipeline_depth):
                ring.init(self.full, slot, 1)
                ring.init(self.empty, slot, consumers * self.geometry.slot_writers)
            self.w_tiles.init()
            if self.handover is not None:
                self.handover.init()
            for group in range(self.plan.mma_groups):
                ring.init(self.tile_ready, group, WARP_GROUP)
                if self.tile_next is not None:
                    ring.init(self.tile_next, group, 1)
                for tile in range(self.staging.count):
                    index = group * self.staging.count + tile
                    ring.init(self.tile_full, index, 1)
                    ring.init(self.tile_empty, index, 1 if self.staging.stored(tile) else WARP_GROUP)
            if self.plan.exchange == "grid":
                ring.init(self.mail_ready, 0, 1)
            do(T.ptx.fence.mbarrier_init.release.cluster())
        self._clear_mailboxes()
        do(T.ptx.fence.proxy.async_.shared__cta())
        self._sync_all()
        if self.plan.dependent_launch:
            do(T.ptx.griddepcontrol.wait())

    def _clear_mailboxes(self) -> None:
        if self.plan.exchange not in ("cta", "cluster"):
            return
        words = self.layout.mailbox_bytes // 8
        box = T.decl_buffer([words], "uint64", data=self.smem.data, scope="shared.dyn", byte_offset=self.layout.mailbox)
        with loop(-(-words // self.plan.threads), "j") as j, when(j * self.plan.threads + self.cta_thread < words):
            store(box, T.uint64(0), j * self.plan.threads + self.cta_thread)

    def _sync_all(self) -> None:
        do(T.cuda.cta_sync())
        if self.geometry.cluster_size > 1:
            do(T.ptx.barrier.cluster.arrive.release.aligned())
            do(T.ptx.barrier.cluster.wait.acquire.aligned())

    def _epilogue(self) -> None:
        """Nobody leaves while others may still write to its shared memory; the last CTA moves the tags on and gives the
        mailboxes away."""
        self._sync_all()
        if self.plan.exchange == "grid":
            most = (self.place.units + (self.geometry.row_groups - 1)) // self.geometry.row_groups
            with when(self.cta_thread == 0):
                self.workspace.leave(self.plan.ctas, u32(most * len(self.rounds) + 1))

    @property
    def tiles(self) -> list[Any]:
        """The [M, N] operands in order, each with its staging tile or NO_TILE."""
        return self.staging.operands

    @property
    def operand_tiles(self) -> list[Any]:
        """The [M, N] operands that TMA brings."""
        return self.staging.operand_tiles

    @property
    def store_tiles(self) -> list[Any]:
        """The results that TMA takes away, in the order they are ready."""
        return self.staging.store_tiles
