"""What each warp group does, from its first instruction to its last.

Warp group 0 is the producer.  The others are MMA warp groups, which multiply and run the stages; in the memory layout they only
multiply, and the last warp group runs the stages of their tiles.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.registers import THREADS_OF_GROUP
from tvm_comfuse.tir_passes.emit import operands, ring
from tvm_comfuse.tir_passes.emit.dsl import Cell, Expr, do, either, loop, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.mma import ALONE, MainLoop
from tvm_comfuse.tir_passes.emit.producer import fill_ring, send_results
from tvm_comfuse.tir_passes.emit.stamps import FILL, MAIL, MEMORY, MMA, SEND
from tvm_comfuse.tir_passes.emit.steps import Steps

#: named barriers from 1 on, one for each MMA warp group, order the main loops of the pingpong layout (0 is the CTA's); each
#: has the threads of the warp group that gives the turn and of the one that waits for it
ORDER_BARRIER, TURN_THREADS = 1, 2 * THREADS_OF_GROUP
#: warp of the producer that waits for the mailboxes in global memory
MAIL_WARP = 2


def producer(kernel: Any) -> None:
    """The life of warp group 0: a thread of each warp moves tiles, or waits for the mailboxes."""
    do(T.ptx.setmaxnreg.dec.sync.aligned.u32(kernel.registers.producer))
    with when(kernel.lane == 0):
        with when(kernel.warp == 0):
            kernel.stamps.role(FILL)
            fill_ring(kernel)
        if kernel.staging.store_tiles:
            with when(kernel.warp == 1):
                kernel.stamps.role(SEND)
                send_results(kernel)
        if kernel.plan.exchange == "grid":
            with when(kernel.warp == MAIL_WARP):
                kernel.stamps.role(MAIL)
                _await_mailboxes(kernel)
    do(T.cuda.warp_sync())


def _await_mailboxes(kernel: Any) -> None:
    """Until this launch owns the mailboxes; the MMA warp groups find the tag base in shared memory."""
    kernel.stamps.begin("mailboxes", 0)
    base = Cell("uint32", "entered", kernel.workspace.enter(kernel.last_cta))
    kernel.stamps.end("mailboxes", 0)
    store(kernel.tag_word, base.value, 0)
    ring.arrive(kernel.mail_ready, 0)


def others(kernel: Any) -> None:
    """The lives of the other warp groups."""
    if kernel.handover is None:
        _mma(kernel)
        return
    with either(kernel.warp_group <= kernel.plan.mma_groups) as (mma, memory):
        with mma:
            _multiply(kernel)
        with memory:
            _memory(kernel)


def _mma(kernel: Any) -> None:
    """A warp group's life: its steps, each a main loop and the stages."""
    do(T.ptx.setmaxnreg.inc.sync.aligned.u32(kernel.registers.mma))
    kernel.stamps.role(MMA, kernel.group)
    stride = kernel.geometry.steps_of_group
    kernel.acc = registers([kernel.accumulators], "float32", "acc")
    _load_inputs(kernel)
    _fill_vectors(kernel, kernel.group, kernel.plan.mma_groups)
    cursor = ring.Cursor(kernel.plan.pipeline_depth, 0, "read")
    main_loop = MainLoop(kernel, kernel.group_row(kernel.group), kernel.group_column(kernel.group))
    for group in range(1, stride):
        with when(kernel.group == group):
            cursor.advance(group * kernel.geometry.k_slots)
    first = kernel.group if kernel.geometry.pingpong else T.int32(0)
    steps = Steps(kernel)
    with loop((kernel.place.steps - first + (stride - 1)) // stride, "use") as use:
        step = use * stride + first
        _await_turn(kernel, step)
        kernel.stamps.begin("main loop", use)
        main_loop.run(cursor, step, lambda: _give_turn(kernel, step), steps.company(step, use))
        kernel.stamps.end("main loop", use)
        if kernel.geometry.pingpong:
            cursor.advance((stride - 1) * kernel.geometry.k_slots)
        _await_tags(kernel, use)
        _stages(kernel, steps, step, use)
    steps.last_tail(kernel.place.steps)


def _await_turn(kernel: Any, step: Expr) -> None:
    """Pingpong: the main loops of the warp groups in front come first, or this one would wait two phases ahead."""
    if kernel.geometry.pingpong:
        with when(step > 0):
            kernel.stamps.begin("turn", step // kernel.geometry.steps_of_group)
            do(T.ptx.barrier.cta.sync.aligned(u32(ORDER_BARRIER + kernel.group), u32(TURN_THREADS)))
            kernel.stamps.end("turn", step // kernel.geometry.steps_of_group)


def _give_turn(kernel: Any, step: Expr) -> None:
    if kernel.geometry.pingpong:
        with when(step + 1 < kernel.place.steps):
            after = ORDER_BARRIER + (kernel.group + 1) % kernel.plan.mma_groups
            do(T.ptx.barrier.cta.arrive.aligned(u32(after), u32(TURN_THREADS)))


def _multiply(kernel: Any) -> None:
    """The life of an MMA warp group that hands its tiles over."""
    assert kernel.handover is not None
    do(T.ptx.setmaxnreg.inc.sync.aligned.u32(kernel.registers.mma))
    kernel.stamps.role(MMA, kernel.group)
    kernel.acc = registers([kernel.accumulators], "float32", "acc")
    cursor = ring.Cursor(kernel.plan.pipeline_depth, 0, "read")
    main_loop = MainLoop(kernel, kernel.group_row(kernel.group), kernel.group_column(kernel.group))
    with loop(kernel.place.steps, "use") as use:
        kernel.stamps.begin("main loop", use)
        main_loop.run(cursor, use, lambda: None, ALONE)
        kernel.stamps.end("main loop", use)
        kernel.stamps.begin("hand over", use)
        kernel.handover.give(use)
        kernel.stamps.end("hand over", use)


def _memory(kernel: Any) -> None:
    """The life of the memory warp group: of every step the tiles of all MMA warp groups, one after the other."""
    assert kernel.handover is not None
    do(T.ptx.setmaxnreg.inc.sync.aligned.u32(kernel.registers.memory))
    kernel.acc = registers([kernel.accumulators], "float32", "products")
    _load_inputs(kernel)
    _fill_vectors(kernel, T.int32(0), 1)
    tiles = [Steps(kernel) for _ in range(kernel.plan.mma_groups)]
    with loop(kernel.place.steps, "use") as use:
        for group, steps in enumerate(tiles):
            _stand_for(kernel, group)
            steps.ask(use)
            kernel.stamps.begin("hand over", use)
            kernel.handover.take(use)
            kernel.stamps.end("hand over", use)
            if group == 0:
                _await_tags(kernel, use)
            _stages(kernel, steps, use, use)
        # deferred: all partials are on their way before the first ones are waited for
        for group, steps in enumerate(tiles):
            _stand_for(kernel, group)
            steps.parked_tail(use)


def _stand_for(kernel: Any, group: int) -> None:
    """The memory warp group works on the tile of an MMA warp group."""
    kernel.group = T.int32(group)
    kernel.stamps.role(MEMORY, kernel.group)


def _load_inputs(kernel: Any) -> None:
    kernel.scalars = [kernel.real[b] for b in kernel.inputs("scalar")]
    kernel.columns = [kernel.real[b] for b in kernel.inputs("row")]
    kernel.scalar_cells = operands.load_scalars(kernel)


def _fill_vectors(kernel: Any, number: Expr, groups: int) -> None:
    """The warp groups that run the stages, of which this is one, bring the vectors while the first slots are under way."""
    if kernel.vectors:
        threads, behind_turns = THREADS_OF_GROUP * groups, ORDER_BARRIER + kernel.plan.mma_groups
        operands.fill_vectors(kernel, threads, number * THREADS_OF_GROUP + kernel.thread)
        do(T.ptx.barrier.cta.sync.aligned(u32(behind_turns), u32(threads)))


def _await_tags(kernel: Any, use: Expr) -> None:
    """In front of a warp group's first exchange: until its launch owns the mailboxes in global memory and the tag base
    is known.  In the exchange itkernel there is no register left for a wait."""
    if kernel.plan.exchange == "grid":
        with when(use == 0):
            kernel.stamps.begin("mailboxes", use)
            ring.wait(kernel.mail_ready, 0, 0)
            kernel.stamps.end("mailboxes", use)


def _stages(kernel: Any, steps: Steps, step: Expr, use: Expr) -> None:
    """The stages of a step, but what is deferred."""
    kernel.stamps.begin("head", use)
    stages = steps.head(step, use)
    kernel.stamps.end("head", use)
    if not kernel.plan.defer:
        kernel.stamps.begin("tail", use)
        steps.row_values(stages, use)
        steps.tail(stages, use)
        kernel.stamps.end("tail", use)
