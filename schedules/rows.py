"""The rows function: what a split cluster computes behind its product, and the plan of its kernel.

It is a canonical function without a block gemm: kind ``rows``, parameters v [M, N], operands, outputs.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx

from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal

from .analysis import Analysis, analyze
from .apply import plan_of
from .cost import CLOCK_GHZ
from .cost import LANES as ISSUE_LANES
from .device import Device
from .footprint import dtype_bytes
from .normal_form import not_canonical
from .plan import Plan
from .spec import RowsSpec

KIND, ROWS = "comfuse.kind", "rows"
#: attribute of a function: its plan as JSON
ROWS_PLAN = "comfuse.rows_plan"
#: columns that a lane loads with one access of 16 bytes of half precision
CHUNK = 8
LANES = 32
#: warps that may share a row, and the most chunks of a lane: where more warps would do, and at all (half the registers)
WARPS, CHUNKS, MOST_CHUNKS = (1, 2, 4, 8, 16), 5, 8
#: a CTA is whole warp groups
WARPS_OF_GROUP = 4
#: rows are spread over more warps until an SM has so many of them
BUSY_WARPS = 8
#: CTAs an SM gets where M is not known; more bring nothing but starts
CTAS_OF_SM = 8
#: from the end of the kernel in front to the first loads, and the latency of the last row
LAUNCH_US = 2.0
#: instructions of an element for each that cost.stage_time counts: conversions, and functions without approximation.  Both
#: from what TorchInductor's kernels take beside the bare product (benchmarks/results/h200/post_norm.json, row_stages.json)
INSTRUCTIONS = 1.2


@dataclass(frozen=True)
class RowsPlan:
    """How the kernel of a rows function is laid out.

    warps   that share a row
    chunks  of eight columns that each lane has of it
    rows    a CTA works on at a time
    ctas    of the grid; each takes every ctas-th group of rows
    """

    warps: int
    chunks: int
    rows: int
    ctas: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * self.rows * LANES

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def short(self) -> str:
        """For people."""
        return (
            f"{self.rows} row{'s' if self.rows > 1 else ''} a CTA, {self.warps} x {LANES} lanes x {self.chunks} chunks"
        )


def is_rows(func: tirx.PrimFunc) -> bool:
    """Whether a function is the second of a split form."""
    return str((func.attrs or {}).get(KIND, "")) == ROWS


def analyze_rows(func: tirx.PrimFunc) -> RowsSpec:
    """The spec of a rows function.  Raises LoweringError, naming the clause, for any other."""
    return _RowsAnalysis(func).rows()


def spec_of(func: tirx.PrimFunc) -> RowsSpec:
    """Of a rows function its spec, of another canonical function that of its cluster.  Raises LoweringError."""
    return analyze_rows(func) if is_rows(func) else analyze(func)


class _RowsAnalysis(Analysis):
    first, base = 0, ""

    def rows(self) -> RowsSpec:
        if "gemm" in self.blocks or not self.params or len(self.params[0].shape) != 2:
            raise not_canonical("a function of v [M, N] without a product", f"blocks {sorted(self.blocks)}")
        m, n = self.params[0].shape
        if not isinstance(n, tirx.IntImm):
            raise not_canonical("static N", str(n))
        return self._rows(m, int(n))


def rows_plan(spec: RowsSpec, device: Device, ctas: int | None = None) -> RowsPlan | Refusal:
    """The plan of a rows function.

    ctas  of the grid, if not as many as there are groups of rows
    """
    most = WARPS[-1] * LANES * MOST_CHUNKS * CHUNK
    if spec.n % CHUNK or spec.n > most:
        numbers = {"N": spec.n, "multiple": CHUNK, "most": most}
        return Refusal("rows-length", "a row must be in the registers of a CTA", numbers, "pad N, or make it shorter")
    warps = next((w for w in WARPS if _chunks(spec.n, w) <= CHUNKS), WARPS[-1])
    while spec.m is not None and spec.m * warps < device.sms * BUSY_WARPS and _chunks(spec.n, warps) > 1:
        if warps == WARPS[-1]:
            break
        warps *= 2
    rows = max(1, WARPS_OF_GROUP // warps)
    groups = math.ceil(spec.m / rows) if spec.m is not None else device.sms * CTAS_OF_SM
    return RowsPlan(warps, _chunks(spec.n, warps), rows, groups if ctas is None else ctas)


def schedule_rows(func: tirx.PrimFunc, device: Device) -> tirx.PrimFunc | Refusal:
    """A rows function with its plan.  Raises LoweringError if it is none."""
    plan = rows_plan(analyze_rows(func), device)
    return plan if isinstance(plan, Refusal) else with_rows_plan(func, plan)


def with_rows_plan(func: tirx.PrimFunc, plan: RowsPlan) -> tirx.PrimFunc:
    """A rows function with a plan."""
    return func.with_attr(ROWS_PLAN, plan.to_json())


def has_rows_plan(func: tirx.PrimFunc) -> bool:
    """Whether a function is a rows function with a plan."""
    return func.attrs is not None and ROWS_PLAN in func.attrs


def rows_plan_of(func: tirx.PrimFunc) -> RowsPlan:
    """The plan of a rows function.  Raises PlanError if it has none."""
    if not has_rows_plan(func):
        raise PlanError("a rows function with a plan", "none", "use schedules.rows.schedule_rows first")
    return RowsPlan(**json.loads(str(func.attrs[ROWS_PLAN])))


def kernel_plan_of(func: tirx.PrimFunc) -> Plan | RowsPlan:
    """The plan of a scheduled cluster or of a rows function.  Raises PlanError if it has none."""
    return rows_plan_of(func) if is_rows(func) else plan_of(func)


def rows_estimate(spec: RowsSpec, device: Device, rows: int) -> float:
    """Microseconds of the kernel with this many rows: a launch, and the longer of moving every [M, N] tensor once and of the
    stages' instructions."""
    streams: list[Any] = [*spec.tile_operands, *spec.tile_outputs]
    elements = rows * spec.n
    memory = elements * sum(dtype_bytes(tensor.dtype) for tensor in streams) / (device.hbm_gbps * 1e3)
    operations = sum(stage.operations for stage in spec.stages) * INSTRUCTIONS
    return LAUNCH_US + max(memory, operations * elements / (ISSUE_LANES * device.sms * CLOCK_GHZ * 1e3))


def _chunks(n: int, warps: int) -> int:
    return math.ceil(n / (warps * LANES * CHUNK))
