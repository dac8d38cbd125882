"""What the cost model sees of a candidate: TVM's features of its loops, and numbers of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.ir.utils import derived_object

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.cost import bytes_moved, estimate, l2_bytes, row_tiles, rows_of, tiles_of_cta
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.footprint import HALF_BYTES, row_parts, shared_memory, slot_rows
from tvm_comfuse.schedules.legality import THREADS_OF_GROUP
from tvm_comfuse.schedules.plan import EXCHANGE_SCOPES, LAYOUTS, PLACEMENTS, W_ORDERS, WALKS, Plan
from tvm_comfuse.schedules.spec import ClusterSpec, rounds
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.space import Space

#: words of a field, in an order: each is a column of its own
WORDS = {
    "exchange": EXCHANGE_SCOPES,
    "layout": LAYOUTS,
    "operands": PLACEMENTS,
    "store": PLACEMENTS,
    "w_order": W_ORDERS,
    "walk": WALKS,
}
#: the first column of a plan's numbers: log of the cost model's estimate in microseconds
ESTIMATE = "estimate.total"


def numbers(plan: Plan, spec: ClusterSpec, device: Device) -> dict[str, float]:
    """A plan's numbers by name, ESTIMATE first.  Sizes and times are logarithms, so that ratios are differences."""
    parts = vars(estimate(plan, spec, device))
    values = {ESTIMATE: math.log(parts["total"])}
    values |= {f"estimate.{name}": math.log1p(value) for name, value in parts.items() if name != "total"}
    values |= {f"plan.{name}": value for name, value in _fields(plan)}
    values |= {f"shared.{name}": math.log1p(size) for name, size in shared_memory(plan, spec).items()}
    return values | _work(plan, spec, device)


def roofline(spec: ClusterSpec, device: Device) -> float:
    """Microseconds that no kernel of a cluster can beat: tensor cores or memory, whichever takes longer."""
    return max(product_time(spec, device), bytes_moved(spec) / (device.hbm_gbps * 1e3))


def product_time(spec: ClusterSpec, device: Device) -> float:
    """Microseconds of the product alone at the device's rate."""
    return 2 * rows_of(spec) * spec.n * spec.k / (device.dense_tflops * 1e6)


def _fields(plan: Plan) -> Iterable[tuple[str, float]]:
    """Every field of a plan, also one added later: numbers as they are, words one column each."""
    for name in (f.name for f in fields(plan)):
        value = getattr(plan, name)
        if name in WORDS:
            words = value if isinstance(value, tuple) else (value,)
            yield from ((f"{name}.{word}", float(words.count(word))) for word in WORDS[name])
        elif isinstance(value, (bool, int)):
            yield name, float(value)


def _work(plan: Plan, spec: ClusterSpec, device: Device) -> dict[str, float]:
    """Waves, bytes by level, registers, exchange, rooflines, sizes."""
    tiles, parts = tiles_of_cta(plan, spec), row_parts(plan, spec)
    rows, columns = slot_rows(plan)
    slots = math.ceil(spec.k / plan.tile_k)
    whole = row_tiles(plan, spec) * parts
    product, memory = product_time(spec, device), bytes_moved(spec) / (device.hbm_gbps * 1e3)
    return {
        "waves": float(tiles),
        "waves.idle": tiles * plan.ctas / whole - 1.0,
        "padding.columns": parts * plan.cta_columns / spec.n - 1.0,
        "parts": float(parts),
        "sms.idle": 1.0 - plan.ctas / device.sms,
        "bytes.memory": math.log(bytes_moved(spec)),
        "bytes.l2": math.log(l2_bytes(plan, spec)),
        "bytes.in_flight": math.log((plan.pipeline_depth - 1) * (rows + columns) * plan.tile_k * HALF_BYTES),
        "registers.accumulators": plan.tile_m * plan.tile_n / THREADS_OF_GROUP,
        "exchange.rounds": float(len(rounds(spec))),
        "exchange.messages": math.log1p(parts * plan.groups_n * plan.tile_m * len(spec.reductions)),
        "roofline.product": math.log(product),
        "roofline.memory": math.log(memory),
        "roofline.ratio": math.log(product / memory),
        "size.m": math.log(rows_of(spec)),
        "size.n": math.log(spec.n),
        "size.k": math.log(spec.k),
        "slots": float(slots),
        "operations": float(sum(stage.operations for stage in spec.stages)),
    }


@derived_object
class PlanFeatures(ms.feature_extractor.PyFeatureExtractor):
    """MetaSchedule's feature extractor: TVM's row for each store, with the plan's numbers in front of it.

    stock  False leaves TVM's columns out, ours False the plan's numbers; a comparison wants that
    Plans that differ in annotations alone have the same loops, so TVM's part is computed once for all of them.
    """

    def __init__(self, device: Device, *, ours: bool = True, stock: bool = True):
        super().__init__()
        self.device, self.ours, self.stock = device, ours, stock
        self._stock = ms.feature_extractor.PerStoreFeature()
        self._known: dict[Any, np.ndarray] = {}

    def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
        """Arrays [stores, columns] of scheduled candidates of the context's workload."""
        (func,) = (func for _, func in context.mod.functions_items())
        spec = analyze(func)
        plans = [plan_of(candidate.sch.mod["main"]) for candidate in candidates]
        schedules = [partial(getattr, candidate, "sch") for candidate in candidates]
        return [tvm.runtime.tensor(row) for row in self._rows(context, spec, plans, schedules)]

    def of_plans(self, context: Any, space: Space, plans: Iterable[Plan]) -> list[np.ndarray]:
        """The same arrays for legal plans of a space that have not been scheduled."""
        from tvm_comfuse.tuning.rules import schedule_at

        plans = list(plans)
        schedules = [partial(schedule_at, context.mod, space, space.legal[plan]) for plan in plans]
        return self._rows(context, space.spec, plans, schedules)

    def columns(self, plan: Plan, spec: ClusterSpec) -> list[str]:
        """Names of the plan's columns."""
        return list(numbers(plan, spec, self.device)) if self.ours else []

    def _rows(
        self, context: Any, spec: ClusterSpec, plans: list[Plan], schedules: Sequence[Callable[[], Any]]
    ) -> list[np.ndarray]:
        workload = tvm_ffi.structural_hash(context.mod) if self.stock else 0
        rows = []
        for plan, schedule in zip(plans, schedules, strict=True):
            own = list(numbers(plan, spec, self.device).values()) if self.ours else []
            loops = self._loops(context, workload, plan, schedule) if self.stock else np.zeros((1, 0))
            rows.append(np.concatenate([np.tile(np.array(own), (loops.shape[0], 1)), loops], axis=1))
        return rows

    def _loops(self, context: Any, workload: int, plan: Plan, schedule: Callable[[], Any]) -> np.ndarray:
        """TVM's features: an array [stores, columns]."""
        # what tile_gemm and fuse_stages split by
        key = (workload, plan.cta_rows, plan.cta_columns, plan.tile_k)
        if key not in self._known:
            candidate = ms.MeasureCandidate(schedule(), [])
            self._known[key] = self._stock.extract_from(context, [candidate])[0].numpy()
        return self._known[key]
