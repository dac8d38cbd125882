"""An estimate of a kernel's time from its plan.

It ranks plans before anything is measured and says where the time goes.  Every constant has its source; the ones that
no measurement stands behind say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .device import Device
from .footprint import HALF_BYTES, dtype_bytes, resident_bytes, row_parts, slot_rows
from .plan import Plan
from .spec import ClusterSpec, Operand, Output, rounds

#: rows assumed for a symbolic M: a batch of 16 sequences of 512
NOMINAL_ROWS = 8192
#: launch, barrier set-up and the first loads, before the first product
FILL_US = 3.0
#: one round of row values, until every part has them
EXCHANGE_US = {"none": 0.0, "warp": 0.0, "cta": 1.8, "cluster": 2.1, "grid": 2.5}
#: LayerNorm (10 operations an element, one [M, N] operand, one output): stages and exchange of a 64 x 256 tile together
#: take 7 us beside a second warp group that does the same (benchmarks/results/h200/layouts.json, cooperative 2x1)
STAGE_ELEMENTS = 64 * 256
OPERATION_US = 0.19
STREAM_US = 1.26
#: a tensor that does not go through TMA costs address arithmetic and half-used sectors as well (a store from registers,
#: two bytes a time, cost 13 times as much; four bytes a time are assumed to cost five)
GLOBAL_STREAM = 5.0
#: from a load's issue to its data, under load; slots in flight must cover it (layouts.json, pingpong at K = 4096)
LOAD_LATENCY_US = 1.0
#: a pingpong main loop has one warp group to keep the tensor cores busy (layouts.json, 128 x 128 tiles)
PINGPONG_MAIN_LOOP = 1.4
#: kernels with thread block clusters against the same without, by layout (layouts.json)
CLUSTER_FACTOR = {"cooperative": 1.03, "pingpong": 1.09}


@dataclass(frozen=True)
class Estimate:
    """Microseconds by part; ``total`` is fill + the longest of (loop, memory) + tail.

    fill      before the first product, and the loads of a W that stays
    product   tensor core time of the busiest SM
    loads     time its tiles need from L2; the main loop takes the longer of product and loads
    stages    stages and stores of the busiest SM, hidden or not
    exchange  waiting for row values, hidden or not
    exposed   the part of stages and exchange that no main loop hides
    loop      main loops and exposed parts together
    memory    time to move every tensor once
    tail      stages and exchange of the last tile
    total     sum as above, times CLUSTER_FACTOR in a cluster
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

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in vars(self).items() if name != "total")
        return f"{self.total:.1f} us ({parts})"


def estimate(plan: Plan, spec: ClusterSpec, device: Device) -> Estimate:
    """Time of the kernel of a legal plan; a symbolic M counts as NOMINAL_ROWS."""
    tiles = tiles_of_cta(plan, spec)
    product, loads = _main_loop(plan, spec, device)
    main = max(product, loads)
    stages = stage_time(plan, spec)
    exchange = EXCHANGE_US[plan.exchange] * len(rounds(spec))
    # In pingpong G groups do a tile each in the time of main loop, stages and exchange, unless their main loops take longer.
    exposed = stages + exchange
    if plan.layout == "pingpong":
        exposed = max(0.0, (main + exposed) / plan.mma_groups - main)
    # The last tile's stages are the tail, so they are not exposed a second time.
    loop = tiles * main + (tiles - 1) * exposed
    memory = bytes_moved(spec) / (device.hbm_gbps * 1e3)
    tail = stages + exchange
    # The first main loop waits for W at the pace of its loads; later ones find it there.
    fill = FILL_US + resident_bytes(plan, spec) / _bytes_per_us(device)
    factor = CLUSTER_FACTOR[plan.layout] if plan.cluster_m * plan.cluster_n > 1 else 1.0
    return Estimate(
        fill=fill,
        product=tiles * product,
        loads=tiles * loads,
        stages=tiles * stages,
        exchange=tiles * exchange,
        exposed=(tiles - 1) * exposed,
        loop=loop,
        memory=memory,
        tail=tail,
        total=(fill + max(loop, memory) + tail) * factor,
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
    return math.ceil(row_tiles(plan, spec) / (plan.ctas // row_parts(plan, spec)))


def stage_time(plan: Plan, spec: ClusterSpec) -> float:
    """Microseconds one warp group takes for the stages and stores of its tile."""
    operations = sum(stage.operations for stage in spec.stages)
    streams = 0.0
    for tensor, where in zip(_streams(spec), plan.operands + plan.store, strict=True):
        width = dtype_bytes(tensor.dtype) / HALF_BYTES
        streams += width * (1.0 if where == "tma" else GLOBAL_STREAM)
    share = plan.tile_m * plan.tile_n / STAGE_ELEMENTS
    return share * (operations * OPERATION_US + streams * STREAM_US)


def bytes_moved(spec: ClusterSpec) -> int:
    """Bytes of every tensor, moved once."""
    rows = rows_of(spec)
    streams = sum(dtype_bytes(tensor.dtype) for tensor in _streams(spec))
    return HALF_BYTES * (rows * spec.k + spec.n * spec.k) + streams * rows * spec.n


def _main_loop(plan: Plan, spec: ClusterSpec, device: Device) -> tuple[float, float]:
    """Microseconds of tensor cores and of loads for one CTA tile, on one SM."""
    rows, columns = slot_rows(plan)
    depth_of_k = math.ceil(spec.k / plan.tile_k) * plan.tile_k
    product = 2 * rows * columns * depth_of_k / (device.dense_tflops * 1e6 / device.sms)
    # Multicast: CTAs along M share w.  Outputs go the other way.
    from_w = 0.0 if plan.w_resident else columns / plan.cluster_m
    elements = (rows + from_w) * depth_of_k
    streams = sum(dtype_bytes(operand.dtype) for operand in spec.tile_operands)
    traffic = elements * HALF_BYTES + rows * columns * streams
    loads = traffic / _bytes_per_us(device)
    slots = depth_of_k / plan.tile_k
    # With too few slots in flight each load's latency shows.
    latency = slots * LOAD_LATENCY_US / (plan.pipeline_depth - 1)
    alone = PINGPONG_MAIN_LOOP if plan.layout == "pingpong" else 1.0
    return product * alone, max(loads * alone, latency)


def _bytes_per_us(device: Device) -> float:
    """What one SM takes in from L2."""
    return device.l2_to_sm_gbps * 1e3 / device.sms


def _streams(spec: ClusterSpec) -> list[Operand | Output]:
    """The [M, N] tensors besides the product."""
    return [*spec.tile_operands, *spec.tile_outputs]
