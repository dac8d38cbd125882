"""A small twin of a cluster: the same expressions, plan and code, over a matrix that an interpreter can run.

Tiles, roles, ring, layout, placements and the scope of exchanges stay.  Rows, columns, depth and CTAs become as few as
exercise everything: every warp group does two steps or more, the ring wraps, rows are shared by two CTAs if they are
shared at all (by so many that the lanes of a quad take two partials each, if the kernel has such code), and what is
ragged stays ragged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.row_reducers import REDUCERS
from tvm_comfuse.schedules.analysis import analyze, normal_forms
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.rows import RowsPlan, analyze_rows, is_rows, rows_plan_of, with_rows_plan
from tvm_comfuse.schedules.spec import MERGE, MERGE_WITH, ClusterSpec, RowsSpec
from tvm_comfuse.schedules.timetable import least_slots
from tvm_comfuse.verify.rewrite import map_expr

#: CTAs that share a row, tiles of a row from which on a lane takes more than one partial, and steps of each warp group
PARTS, SECOND_TURN, STEPS = 2, 5, 2
#: CTAs of the twin of a rows kernel
ROWS_CTAS = 2
#: attributes of the original that its twin must not have
_OWN = ("target", "global_symbol", "s_tir")


@dataclass(frozen=True)
class Twin:
    """func: scheduled by plan; rows: M to run it with; reduced: what became smaller, (from, to) by name."""

    func: tirx.PrimFunc
    plan: Plan | RowsPlan
    rows: int
    reduced: dict[str, tuple[Any, Any]]


def twin(func: tirx.PrimFunc, device: Device) -> Twin:
    """The twin of a scheduled cluster, or of a rows function with a plan.

    Raises PlanError if the reduced plan is not legal on the device, LoweringError if the function is not canonical.
    """
    if is_rows(func):
        return _rows_twin(func)
    spec, plan = analyze(func), plan_of(func)
    n, k, small = _columns(plan, spec), _depth(plan, spec), _plan(plan, spec)
    rows = _rows(small, spec)
    canonical = rebuild(func, spec, rows if spec.m is not None else None, n, k)
    scheduled = schedule(canonical, device, small)
    if isinstance(scheduled, Refusal):
        raise PlanError("a reduced plan that is legal", str(scheduled), "verify the kernel at its own size")
    sizes = {"M": (spec.m if spec.m is not None else "symbolic", rows), "N": (spec.n, n), "K": (spec.k, k)}
    sizes |= {name: (getattr(plan, name), getattr(small, name)) for name in ("cluster_n", "ctas")}
    return Twin(scheduled, small, rows, {name: pair for name, pair in sizes.items() if pair[0] != pair[1]})


def _rows_twin(func: tirx.PrimFunc) -> Twin:
    """Two CTAs and fewer rows, not all of them there in the last step."""
    spec, plan = analyze_rows(func), rows_plan_of(func)
    small = replace(plan, ctas=min(plan.ctas, ROWS_CTAS))
    rows = (2 * small.ctas + 1) * small.rows - small.rows // 2
    rows = rows if spec.m is None else min(rows, spec.m)
    made = rebuild(func, spec, rows if spec.m is not None else None, spec.n, 0)
    sizes = {"M": (spec.m if spec.m is not None else "symbolic", rows), "ctas": (plan.ctas, small.ctas)}
    reduced = {name: pair for name, pair in sizes.items() if pair[0] != pair[1]}
    return Twin(with_rows_plan(made, small), small, rows, reduced)


def _parts(plan: Plan, spec: ClusterSpec) -> int:
    parts = -(-spec.n // plan.cta_columns)
    turns = parts * plan.groups_n >= SECOND_TURN and plan.exchange in ("cluster", "grid")
    fewer = min(parts, -(-SECOND_TURN // plan.groups_n) if turns else PARTS)
    whole = plan.cluster_n if plan.exchange != "cluster" else 1  # those that share A stay together
    return -(-fewer // whole) * whole


def _columns(plan: Plan, spec: ClusterSpec) -> int:
    last = spec.n % plan.cta_columns or plan.cta_columns
    return (_parts(plan, spec) - 1) * plan.cta_columns + last


def _depth(plan: Plan, spec: ClusterSpec) -> int:
    # one slot more than the ring has: it wraps within a step; and one more than a deferred tail needs
    enough = max(plan.pipeline_depth, least_slots(plan) if plan.defer else 0) + 1
    slots = min(-(-spec.k // plan.tile_k), enough)
    return (slots - 1) * plan.tile_k + (spec.k % plan.tile_k or plan.tile_k)


def _plan(plan: Plan, spec: ClusterSpec) -> Plan:
    parts = _parts(plan, spec)
    return replace(plan, cluster_n=parts if plan.exchange == "cluster" else plan.cluster_n, ctas=parts * plan.cluster_m)


def _rows(plan: Plan, spec: ClusterSpec) -> int:
    pingpong = plan.layout == "pingpong"
    unit = plan.tile_m if pingpong else plan.cta_rows
    units = STEPS * (plan.mma_groups if pingpong else 1) * plan.cluster_m
    # one step more for some, so that the ends of loops meet both kinds of count
    rows = (units + 1) * unit
    missing = unit // 2 - 1 if spec.m is None else -spec.m % unit
    return rows - missing if spec.m is None else min(spec.m, rows - missing)


def rebuild(func: tirx.PrimFunc, spec: RowsSpec, m: int | None, n: int, k: int) -> tirx.PrimFunc:
    """The canonical function of the same expressions for other extents; m None: symbolic.  Without a product k says nothing.

    Constants equal to 1 / N become those of the new N.
    """
    maker = _Maker(func, spec, tirx.Var("m", "int64") if m is None else m, n, k)
    return maker.make()


class _Maker:
    def __init__(self, func: tirx.PrimFunc, spec: RowsSpec, m: Any, n: int, k: int):
        self.func, self.spec, self.m, self.n, self.k = func, spec, m, n, k
        self.tensors: dict[Any, Any] = {}
        shapes = {"tile": (m, n), "col": (n,), "scalar": (1,)}
        kinds = {operand.index: operand.kind for operand in spec.operands}
        outputs = {output.index for output in spec.outputs}
        for index, param in enumerate(func.params):
            if index in outputs:
                continue
            if index not in kinds:
                shape: Any = (m, k) if index == 0 else ((n, k) if self._transposed else (k, n))
            else:
                shape = shapes.get(kinds[index], (m, 1) if len(param.shape) == 2 else (m,))
            self.tensors[param] = te.placeholder(shape, str(param.dtype), str(param.name))

    @property
    def _transposed(self) -> bool:
        """Whether w is [N, K]."""
        return isinstance(self.spec, ClusterSpec) and self.spec.w_layout == "NK"

    def make(self) -> tirx.PrimFunc:
        """Every block in order."""
        for name, block in normal_forms(self.func).items():
            self.tensors[block.store.buffer] = self._block(name, block)
        made = te.create_prim_func([self.tensors[param] for param in self.func.params])
        attrs = {key: value for key, value in self.func.attrs.items() if key not in _OWN}
        return made.with_attrs({**attrs, "global_symbol": "twin"})

    def _block(self, name: str, block: Any) -> Any:
        if name == "gemm":
            x, w = (self.tensors[param] for param in self.func.params[:2])
            along = te.reduce_axis((0, self.k), "k")
            at = (lambda j: (j, along)) if self._transposed else (lambda j: (along, j))
            return te.compute(
                (self.m, self.n),
                lambda i, j: te.sum(x[i, along].astype("float32") * w[at(j)].astype("float32"), axis=along),
                name=name,
            )
        if block.op is not None:
            column = te.reduce_axis((0, self.n), "j")
            keys = (MERGE, MERGE_WITH)
            attrs = {key: str(block.node.annotations[key]) for key in keys if key in block.node.annotations}
            reduce = REDUCERS[block.op]
            return te.compute(
                (self.m,),
                lambda i: reduce(self._expr(block, i, column.var), axis=column),
                name=name,
                attrs=attrs or None,
            )
        shape = block.store.buffer.shape
        if len(shape) == 1:
            return te.compute((self.m,), lambda i: self._expr(block, i, None), name=name)
        columns = 1 if isinstance(shape[1], tirx.IntImm) and int(shape[1]) == 1 else self.n
        return te.compute((self.m, columns), lambda i, j: self._expr(block, i, j), name=name)

    def _expr(self, block: Any, i: Any, j: Any) -> Any:
        def change(node: Any) -> Any:
            if isinstance(node, tvm.ir.TensorLoad):
                indices = [map_expr(index, change) for index in node.indices]
                return self.tensors[node.source][tuple(indices)]
            if isinstance(node, tirx.Var):
                return i if node.same_as(block.i) else j
            if isinstance(node, tirx.FloatImm) and self._is_reciprocal(float(node.value)):
                return tirx.FloatImm("float32", float(np.float32(1.0 / self.n)))
            return None

        return map_expr(block.value, change)

    def _is_reciprocal(self, value: float) -> bool:
        return np.float32(value) == np.float32(1.0 / self.spec.n)
