"""An estimate of a kernel's time from its plan.

It ranks plans before anything is measured and says where the time goes.  Its form is what was learnt on an H200: a step takes
the tensor cores' time (or that of the loads, if longer) plus the time to issue the stages' instructions, wherever they run;
running them beside the tensor cores hides latencies only.  The constants are fitted to benchmarks/results/h200/forms.json;
those that no measurement stands behind say so.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .device import Device
from .footprint import HALF_BYTES, dtype_bytes, resident_bytes, slot_rows
from .plan import Plan
from .registers import THREADS_OF_GROUP
from .spec import ClusterSpec, Operand, Output, rounds
from .split import head_blocks, tail_blocks, tail_stages
from .tails import in_one_pass
from .timetable import LEAST_EARLY_SLOTS, early_slots
from .walk import most_steps

#: rows assumed for a symbolic M: a batch of 16 sequences of 512
NOMINAL_ROWS = 8192
#: launch, barrier set-up and the first loads, before the first product
FILL_US = 2.4
#: SM clock under sustained load, at the board's power limit
CLOCK_GHZ = 1.64
#: instructions a warp scheduler issues for 32 elements; four of them share an SM's elements
LANES = 128
#: instructions of an operation of a stage: fused operations are fewer, addresses, waits and moves more
INSTRUCTIONS = 1.45
#: operations left of a cluster that has functions, if these are approximate (the soft-capped softmax)
APPROXIMATE = 0.41
#: conversions of an element of a half-precision tensor: two numbers come out of a word by an instruction each, one packs two
UNPACK, PACK = 1.0, 0.5
#: bytes of [M, N] tensors that pass through the L1 cache or a staging tile in a cycle; a lane's two columns alone fill a
#: quarter of what eight do (not measured by itself)
STREAM_BYTES = {"wide": 128.0, "narrow": 32.0}
#: the last products, and each pass that starts behind them: latencies that nothing hides
DRAIN_US = 0.15
PASS_US = 0.1
#: one round of row values, until every part has them
EXCHANGE_US = {"none": 0.0, "warp": 0.0, "cta": 0.5, "cluster": 0.62, "grid": 1.1}
#: a deferred tail that waits for operands of its own
LATE_OPERAND_US = 2.6
#: the same of a tail that is not deferred, whose operands are asked for during the main loop
FAR_OPERAND_US = 0.5
#: a step of deferred kernels in which operands of the head come all at once, and hold up the ring
EARLY_STALL_US = 0.4
#: the same if there is only the last slot for them
LAST_SLOT_STALL_US = 1.6
#: shortest time between two slots of a main loop, and from a load's issue to its data, which slots in flight must cover
SLOT_US = 0.18
LOAD_LATENCY_US = 0.9
#: a wgmma of up to 128 columns reads 96 bytes a cycle or more of shared memory, where one of 256 reads 80, and TMA writes there
NARROW_WGMMA, NARROW_COLUMNS = 1.05, 128
#: between the products of a pingpong tile and those of the next one, by another warp group
PINGPONG_TURN_US = 0.15
#: a tile of the memory warp group, besides its instructions: one warp a scheduler hides little of what it waits for; deferred,
#: the partials of one tile travel during the head of the other
MEMORY_TILE_US = {False: 5.0, True: 3.0}
#: what of a tile's hand-over stands between its products and the next ones; the stages themselves run beside those
HAND_OVER_US = 0.15
#: kernels with thread block clusters that share W against the same without
MULTICAST_FACTOR = 1.04


@dataclass(frozen=True)
class Estimate:
    """Microseconds by part; ``total`` is fill + the longest of (loop, memory) + tail.

    fill      before the first product; the loads of a resident W
    product   tensor core time of the busiest SM
    loads     time its tiles need from L2; the main loop takes the longer of product and loads
    stages    instructions and tensors of the stages of the busiest SM
    exchange  waiting for row values, hidden or not
    exposed   the part of stages and exchange that stands between main loops
    loop      main loops and exposed parts together
    memory    time to move every tensor once
    tail      stages and exchange of the last tile
    total     sum as above, times MULTICAST_FACTOR where CTAs share W
    """

    fill: float
    product: float
    loads: float
    stages: float
    exchange: float
    exposed: float
    loop: float
    memory: float
    tail: float
    total: float

    @property
    def parts(self) -> str:
        """All but the total, for people."""
        return ", ".join(f"{name} {value:.1f}" for name, value in vars(self).items() if name != "total")

    def __str__(self) -> str:
        return f"{self.total:.1f} us ({self.parts})"


@dataclass(frozen=True)
class Account:
    """An estimate and what it was made of.

    tiles         main loops of the busiest CTA: the waves of the grid
    l2_bytes      x and w tiles that the CTAs ask of L2
    memory_bytes  every tensor once
    rows          M that it is for
    """

    estimate: Estimate
    tiles: int
    l2_bytes: int
    memory_bytes: int
    rows: int

    @property
    def lines(self) -> tuple[str, str]:
        """For people: the total with the counts, and the parts in microseconds."""
        tiles = f"{self.tiles} tile{'s' if self.tiles > 1 else ''} a CTA at most"
        moved = f"{self.l2_bytes / 1e6:.1f} MB from L2, {self.memory_bytes / 1e6:.1f} MB of device memory"
        return f"estimate {self.estimate.total:.1f} us for {self.rows} rows: {tiles}, {moved}", self.estimate.parts

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values: the parts in microseconds, with the counts beside them."""
        return {**asdict(self.estimate), **{name: value for name, value in vars(self).items() if name != "estimate"}}


def account(plan: Plan, spec: ClusterSpec, device: Device) -> Account:
    """The estimate of a legal plan with its counts; a symbolic M counts as NOMINAL_ROWS."""
    moved = l2_bytes(plan, spec), bytes_moved(spec)
    return Account(estimate(plan, spec, device), tiles_of_cta(plan, spec), *moved, rows_of(spec))


def estimate(plan: Plan, spec: ClusterSpec, device: Device) -> Estimate:
    """Time of the kernel of a legal plan; a symbolic M counts as NOMINAL_ROWS."""
    tiles = tiles_of_cta(plan, spec)
    product, loads = _main_loop(plan, spec, device)
    main = max(product, loads)
    stages = stage_time(plan, spec)
    exchange = EXCHANGE_US[plan.exchange] * len(rounds(spec))
    behind = stages + _latency(plan, spec, spec.passes) + exchange
    if plan.layout == "pingpong":
        # the stages of some groups run beside the main loops of others, but each instruction takes its time
        exposed = max(stages, (main + behind) / plan.mma_groups - main)
    elif plan.hands_over:
        # its tiles come one after the other
        behind = plan.mma_groups * _memory_tile(plan, spec)
        exposed = max(HAND_OVER_US, behind - main)
    elif plan.defer:
        tail = tail_blocks(spec)
        exposed = stages + _latency(plan, spec, [blocks for blocks in spec.passes if not tail.issuperset(blocks)])
    else:
        exposed = behind
    # the last tile's stages are the tail, so they are not exposed a second time
    loop = tiles * main + (tiles - 1) * exposed
    memory = bytes_moved(spec) / (device.hbm_gbps * 1e3)
    fill = FILL_US + resident_bytes(plan, spec) / (device.l2_to_sm_gbps * 1e3 / device.sms)
    factor = MULTICAST_FACTOR if plan.cluster_m > 1 else 1.0
    return Estimate(
        fill=fill,
        product=tiles * product,
        loads=tiles * loads,
        stages=tiles * stages,
        exchange=tiles * exchange,
        exposed=(tiles - 1) * exposed,
        loop=loop,
        memory=memory,
        tail=behind,
        total=(fill + max(loop, memory) + behind) * factor,
    )


def rows_of(spec: ClusterSpec) -> int:
    """M, or NOMINAL_ROWS if it is symbolic."""
    return NOMINAL_ROWS if spec.m is None else spec.m


def row_tiles(plan: Plan, spec: ClusterSpec) -> int:
    """Row tiles of the result, each the work of one main loop, filled up to whole cluster_m."""
    count = math.ceil(rows_of(spec) / slot_rows(plan)[0])
    return math.ceil(count / plan.cluster_m) * plan.cluster_m


def tiles_of_cta(plan: Plan, spec: ClusterSpec) -> int:
    """Tiles that the busiest CTA works through, one main loop each."""
    return most_steps(plan, spec, row_tiles(plan, spec))


def stage_time(plan: Plan, spec: ClusterSpec) -> float:
    """Microseconds an SM takes for the instructions of a tile's stages, and to move its [M, N] tensors."""
    rows, columns = slot_rows(plan)
    cycles = _instructions(plan, spec) * rows * columns / LANES
    for tensor, where in zip(_streams(spec), plan.operands + plan.store, strict=True):
        width = "wide" if where == "tma" or plan.w_order == "quads" else "narrow"
        cycles += rows * columns * dtype_bytes(tensor.dtype) / STREAM_BYTES[width]
    return cycles / (CLOCK_GHZ * 1e3)


def _memory_tile(plan: Plan, spec: ClusterSpec) -> float:
    """Microseconds in which the memory warp group runs the stages of one MMA warp group's tile.

    It waits for every round but the last one of a deferred plan right away; only clusters of one round have been measured.
    """
    elements = plan.tile_m * plan.tile_n / THREADS_OF_GROUP
    more_rounds = max(0, len(rounds(spec)) - 1) * (EXCHANGE_US[plan.exchange] + PASS_US)
    return MEMORY_TILE_US[plan.defer] + more_rounds + _instructions(plan, spec) * elements / (CLOCK_GHZ * 1e3)


def _instructions(plan: Plan, spec: ClusterSpec) -> float:
    """Instructions of an element's stages."""
    _, behind = tail_stages(spec)
    last = sum(stage.operations for stage in behind) if plan.packed_tail else 0
    operations = sum(stage.operations for stage in spec.stages) - last
    if in_one_pass(plan):
        # the mean is not subtracted from each element
        operations -= sum(reduction.merge == "moments" for reduction in spec.reductions)
    count = operations * INSTRUCTIONS * (APPROXIMATE if plan.fast_math else 1.0)
    packed = tail_blocks(spec) if plan.packed_tail else frozenset()
    for operand in spec.tile_operands:
        count += UNPACK * (dtype_bytes(operand.dtype) == HALF_BYTES and not packed.issuperset(operand.readers))
    for output in spec.tile_outputs:
        count += PACK * (dtype_bytes(output.dtype) == HALF_BYTES and output.block not in packed)
    if plan.packed_tail:
        # one instruction for two elements; the scale has two parts
        count += (last * INSTRUCTIONS + 1) / 2 + (0 if plan.defer else PACK)
    if plan.hands_over:
        count += PACK + UNPACK
    if plan.defer:
        count += PACK + (0 if plan.packed_tail else UNPACK)
    return count


def bytes_moved(spec: ClusterSpec) -> int:
    """Bytes of every tensor, moved once."""
    rows = rows_of(spec)
    streams = sum(dtype_bytes(tensor.dtype) for tensor in _streams(spec))
    return HALF_BYTES * (rows * spec.k + spec.n * spec.k) + streams * rows * spec.n


def l2_bytes(plan: Plan, spec: ClusterSpec) -> int:
    """Bytes of x and w tiles that all CTAs ask of L2; what CTAs share by multicast is asked for once."""
    rows, columns = slot_rows(plan)
    own_rows = rows / plan.cluster_n if plan.share_a else rows
    tiles = row_tiles(plan, spec) * math.ceil(spec.n / plan.cta_columns)
    deep = math.ceil(spec.k / plan.tile_k) * plan.tile_k
    return round(tiles * deep * (own_rows + columns / plan.cluster_m) * HALF_BYTES)


def _latency(plan: Plan, spec: ClusterSpec, passes: list[tuple[str, ...]]) -> float:
    """Microseconds of a tile in which neither the tensor cores nor a scheduler work: passes wait for loads and shuffles."""
    return DRAIN_US + len(passes) * PASS_US + _operand_latency(plan, spec)


def _operand_latency(plan: Plan, spec: ClusterSpec) -> float:
    """What a tile waits for operands that are read from global memory."""
    far = [operand for operand, where in zip(spec.tile_operands, plan.operands, strict=True) if where == "global"]
    late = any(not tail_blocks(spec).isdisjoint(operand.readers) for operand in far)
    if not plan.defer:
        return late * FAR_OPERAND_US
    early = any(not head_blocks(spec).isdisjoint(operand.readers) for operand in far)
    stall = EARLY_STALL_US if early_slots(plan, spec.k) > LEAST_EARLY_SLOTS else LAST_SLOT_STALL_US
    return late * LATE_OPERAND_US + early * stall


def _main_loop(plan: Plan, spec: ClusterSpec, device: Device) -> tuple[float, float]:
    """Microseconds of tensor cores and of loads for one CTA tile, on one SM."""
    rows, columns = slot_rows(plan)
    slots = math.ceil(spec.k / plan.tile_k)
    depth_of_k = slots * plan.tile_k
    product = 2 * rows * columns * depth_of_k / (device.dense_tflops * 1e6 / device.sms)
    product *= NARROW_WGMMA if plan.tile_n <= NARROW_COLUMNS else 1.0
    # what is shared by multicast arrives in every SM all the same
    elements = (rows + (0 if plan.w_resident else columns)) * depth_of_k
    loads = elements * HALF_BYTES / (device.l2_to_sm_gbps * 1e3 / device.sms)
    # with too few slots in flight each load's latency shows
    latency = slots * LOAD_LATENCY_US / (plan.pipeline_depth - 1)
    turn = PINGPONG_TURN_US if plan.layout == "pingpong" else 0.0
    return product + turn, max(loads, latency, slots * SLOT_US) + turn


def _streams(spec: ClusterSpec) -> list[Operand | Output]:
    """The [M, N] tensors besides the product."""
    return [*spec.tile_operands, *spec.tile_outputs]
