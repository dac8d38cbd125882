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

from tvm_comfuse.schedules.footprint import w_box_rows
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.registers import THREADS_OF_GROUP, role_registers
from tvm_comfuse.schedules.spec import ClusterSpec, normal_forms, rounds
from tvm_comfuse.schedules.split import tail_blocks
from tvm_comfuse.schedules.tails import packed_vectors
from tvm_comfuse.tir_passes.emit import operands, ring
from tvm_comfuse.tir_passes.emit.dsl import Cell, Expr, do, either, loop, named, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.exchange import slots_of_group
from tvm_comfuse.tir_passes.emit.geometry import CtaPlace, Geometry
from tvm_comfuse.tir_passes.emit.handover import Handover
from tvm_comfuse.tir_passes.emit.mma import ALONE, MainLoop
from tvm_comfuse.tir_passes.emit.producer import fill_ring, send_results
from tvm_comfuse.tir_passes.emit.shared import ALIGNMENT, SharedLayout
from tvm_comfuse.tir_passes.emit.staging import StagingTiles
from tvm_comfuse.tir_passes.emit.stamps import FILL, MAIL, MEMORY, MMA, SEND, NoStamps, Stamps
from tvm_comfuse.tir_passes.emit.steps import Steps
from tvm_comfuse.tir_passes.emit.tensormaps import quad_map, tensor_map
from tvm_comfuse.tir_passes.emit.w_tiles import w_tiles
from tvm_comfuse.tir_passes.emit.workspace import Workspace

WARP_GROUP = THREADS_OF_GROUP
#: named barriers from 1 on, one for each MMA warp group, order the main loops of the pingpong layout (0 is the CTA's); each
#: has the threads of the warp group that gives the turn and of the one that waits for it
ORDER_BARRIER, TURN_THREADS = 1, 2 * WARP_GROUP
#: warp of the producer that waits for the mailboxes in global memory
MAIL_WARP = 2
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
                        self._producer()
                    with others:
                        self._others()
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
        self.a_map = tensor_map("a_map", self.x, self.geometry.unit_rows)
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
                ring.init(self.empty, slot, consumers * self.plan.cluster_m)
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

    def _producer(self) -> None:
        do(T.ptx.setmaxnreg.dec.sync.aligned.u32(self.registers.producer))
        with when(self.lane == 0):
            with when(self.warp == 0):
                self.stamps.role(FILL)
                fill_ring(self)
            if self.staging.store_tiles:
                with when(self.warp == 1):
                    self.stamps.role(SEND)
                    send_results(self)
            if self.plan.exchange == "grid":
                with when(self.warp == MAIL_WARP):
                    self.stamps.role(MAIL)
                    self._await_mailboxes()
        do(T.cuda.warp_sync())

    def _await_mailboxes(self) -> None:
        """Until this launch owns the mailboxes; the MMA warp groups find the tag base in shared memory."""
        self.stamps.begin("mailboxes", 0)
        base = Cell("uint32", "entered", self.workspace.enter(self.last_cta))
        self.stamps.end("mailboxes", 0)
        store(self.tag_word, base.value, 0)
        ring.arrive(self.mail_ready, 0)

    def _others(self) -> None:
        if self.handover is None:
            self._mma()
            return
        with either(self.warp_group <= self.plan.mma_groups) as (mma, memory):
            with mma:
                self._multiply()
            with memory:
                self._memory()

    def _multiply(self) -> None:
        """The life of an MMA warp group that hands its tiles over."""
        assert self.handover is not None
        do(T.ptx.setmaxnreg.inc.sync.aligned.u32(self.registers.mma))
        self.stamps.role(MMA, self.group)
        self.acc = registers([self.accumulators], "float32", "acc")
        cursor = ring.Cursor(self.plan.pipeline_depth, 0, "read")
        main_loop = MainLoop(self, self.group_row(self.group), self.group_column(self.group))
        with loop(self.place.steps, "use") as use:
            self.stamps.begin("main loop", use)
            main_loop.run(cursor, use, lambda: None, ALONE)
            self.stamps.end("main loop", use)
            self.stamps.begin("hand over", use)
            self.handover.give(use)
            self.stamps.end("hand over", use)

    def _memory(self) -> None:
        """The life of the memory warp group: of every step the tiles of all MMA warp groups, one after the other."""
        assert self.handover is not None
        do(T.ptx.setmaxnreg.inc.sync.aligned.u32(self.registers.memory))
        self.acc = registers([self.accumulators], "float32", "products")
        self._load_inputs()
        self._fill_vectors(T.int32(0), 1)
        tiles = [Steps(self) for _ in range(self.plan.mma_groups)]
        with loop(self.place.steps, "use") as use:
            for group, steps in enumerate(tiles):
                self._stand_for(group)
                steps.ask(use)
                self.stamps.begin("hand over", use)
                self.handover.take(use)
                self.stamps.end("hand over", use)
                if group == 0:
                    self._await_tags(use)
                self._stages(steps, use, use)
            # deferred: all partials are on their way before the first ones are waited for
            for group, steps in enumerate(tiles):
                self._stand_for(group)
                steps.parked_tail(use)

    def _stand_for(self, group: int) -> None:
        """The memory warp group works on the tile of an MMA warp group."""
        self.group = T.int32(group)
        self.stamps.role(MEMORY, self.group)

    def _load_inputs(self) -> None:
        self.scalars = [self.real[b] for b in self.inputs("scalar")]
        self.columns = [self.real[b] for b in self.inputs("row")]
        self.scalar_cells = operands.load_scalars(self)

    def _stages(self, steps: Steps, step: Expr, use: Expr) -> None:
        """The stages of a step, but what is deferred."""
        self.stamps.begin("head", use)
        stages = steps.head(step, use)
        self.stamps.end("head", use)
        if not self.plan.defer:
            self.stamps.begin("tail", use)
            steps.row_values(stages, use)
            steps.tail(stages, use)
            self.stamps.end("tail", use)

    def _mma(self) -> None:
        """A warp group's life: its steps, each a main loop and the stages."""
        do(T.ptx.setmaxnreg.inc.sync.aligned.u32(self.registers.mma))
        self.stamps.role(MMA, self.group)
        stride = self.geometry.steps_of_group
        self.acc = registers([self.accumulators], "float32", "acc")
        self._load_inputs()
        self._fill_vectors(self.group, self.plan.mma_groups)
        cursor = ring.Cursor(self.plan.pipeline_depth, 0, "read")
        main_loop = MainLoop(self, self.group_row(self.group), self.group_column(self.group))
        for group in range(1, stride):
            with when(self.group == group):
                cursor.advance(group * self.geometry.k_slots)
        first = self.group if self.geometry.pingpong else T.int32(0)
        steps = Steps(self)
        with loop((self.place.steps - first + (stride - 1)) // stride, "use") as use:
            step = use * stride + first
            self._await_turn(step)
            self.stamps.begin("main loop", use)
            main_loop.run(cursor, step, lambda: self._give_turn(step), steps.company(step, use))
            self.stamps.end("main loop", use)
            if self.geometry.pingpong:
                cursor.advance((stride - 1) * self.geometry.k_slots)
            self._await_tags(use)
            self._stages(steps, step, use)
        steps.last_tail(self.place.steps)

    def _fill_vectors(self, number: Expr, groups: int) -> None:
        """The warp groups that run the stages, of which this is one, bring the vectors while the first slots are under way."""
        if self.vectors:
            threads, behind_turns = WARP_GROUP * groups, ORDER_BARRIER + self.plan.mma_groups
            operands.fill_vectors(self, threads, number * WARP_GROUP + self.thread)
            do(T.ptx.barrier.cta.sync.aligned(u32(behind_turns), u32(threads)))

    def _await_tags(self, use: Expr) -> None:
        """In front of a warp group's first exchange: until its launch owns the mailboxes in global memory and the tag base
        is known.  In the exchange itself there is no register left for a wait."""
        if self.plan.exchange == "grid":
            with when(use == 0):
                self.stamps.begin("mailboxes", use)
                ring.wait(self.mail_ready, 0, 0)
                self.stamps.end("mailboxes", use)

    def _await_turn(self, step: Expr) -> None:
        """Pingpong: the main loops of the warp groups in front come first, or this one would wait two phases ahead."""
        if self.geometry.pingpong:
            with when(step > 0):
                self.stamps.begin("turn", step // self.geometry.steps_of_group)
                do(T.ptx.barrier.cta.sync.aligned(u32(ORDER_BARRIER + self.group), u32(TURN_THREADS)))
                self.stamps.end("turn", step // self.geometry.steps_of_group)

    def _give_turn(self, step: Expr) -> None:
        if self.geometry.pingpong:
            with when(step + 1 < self.place.steps):
                after = ORDER_BARRIER + (self.group + 1) % self.plan.mma_groups
                do(T.ptx.barrier.cta.arrive.aligned(u32(after), u32(TURN_THREADS)))

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
