"""The design space of a cluster: what may be chosen, and which combinations are legal.

The choices are those of ``schedules.choose``: whatever field of a plan takes several values among its candidates is an
axis here, so a new field of Plan becomes a choice as soon as the enumeration tries it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.choose import candidates, default_plan, persistent_ctas
from tvm_comfuse.schedules.cost import row_tiles, tiles_of_cta
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.footprint import row_parts
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import W_ORDERS, Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.walk import in_turn, walks

#: fields that are chosen together: most combinations of their values mean nothing
TOGETHER = (("tile_m", "tile_n"), ("layout", "groups_m", "groups_n", "mma_groups"), ("operands", "store"))
#: fields that follow from the others and the grid
DERIVED = ("cluster_n", "ctas", "dependent_launch")
#: all values of fields of which the enumeration takes the likely combinations only; a measurement tells of the others
MORE: dict[str, tuple[Any, ...]] = {"defer": (False, True), "w_order": W_ORDERS, "packed_tail": (False, True)}
#: the same where a stage has a function that it makes cheaper: it is less exact, which a measurement looks at
WITH_FUNCTIONS: dict[str, tuple[Any, ...]] = {"fast_math": (False, True)}
#: CTAs of the persistent grid: all that run at once, or the fewest that need no more rounds of tiles, so that none idles
#: in the last one
GRID = "grid"
GRIDS = ("full", "even")


@dataclass(frozen=True)
class Axis:
    """One choice: the fields it sets, and its values, each one entry a field."""

    fields: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        """The fields, joined; unique in a space."""
        return "+".join(self.fields)

    @property
    def ordered(self) -> bool:
        """Whether neighbouring values are alike, as neighbouring numbers are."""
        return all(type(entry) is int for value in self.values for entry in value)


@dataclass(frozen=True)
class Space:
    """All choices for one cluster on one device.

    fixed   fields that have one value only
    A point is a tuple of indices, one into the values of each axis.
    """

    spec: ClusterSpec
    device: Device
    axes: tuple[Axis, ...]
    fixed: tuple[tuple[str, Any], ...]
    refused: Counter[str] = field(default_factory=Counter, compare=False, hash=False)

    @staticmethod
    @lru_cache(maxsize=64)
    def of(spec: ClusterSpec, device: Device) -> Space | Refusal:
        """The space whose axes have the values of the enumeration's candidates and MORE; a Refusal if there is no candidate.

        Equal arguments give the same object, as its legal plans take a second to find.
        """
        plans = candidates(spec, device)
        if not plans:
            refusal = default_plan(spec, device)
            assert isinstance(refusal, Refusal)
            return refusal
        grouped = {name: group for group in TOGETHER for name in group}
        more = (
            MORE | (WITH_FUNCTIONS if any(stage.approximable for stage in spec.stages) else {}) | {"walk": walks(spec)}
        )
        groups = dict.fromkeys(grouped.get(f.name, (f.name,)) for f in fields(Plan) if f.name not in DERIVED)
        axes, fixed = [], list[tuple[str, Any]]()
        for names in groups:
            found = dict.fromkeys(tuple(getattr(plan, name) for name in names) for plan in plans)
            found |= dict.fromkeys((value,) for name in names for value in more.get(name, ()))
            values = tuple(sorted(found)) if all(type(v) is int for value in found for v in value) else tuple(found)
            if len(values) == 1:
                fixed += zip(names, values[0], strict=True)
            else:
                axes.append(Axis(names, values))
        axes.append(Axis((GRID,), tuple((word,) for word in GRIDS)))
        return Space(spec, device, tuple(axes), tuple(fixed))

    def __len__(self) -> int:
        """Points, legal or not."""
        return math.prod(len(axis.values) for axis in self.axes)

    def plan(self, point: Sequence[int]) -> Plan:
        """The plan of a point, legal or not."""
        chosen = dict(self.fixed)
        for axis, index in zip(self.axes, point, strict=True):
            chosen.update(zip(axis.fields, axis.values[index], strict=True))
        grid = chosen.pop(GRID)
        plan = Plan(**chosen, cluster_n=1, ctas=1, dependent_launch=True)
        if plan.exchange == "cluster":
            plan = replace(plan, cluster_n=row_parts(plan, self.spec))
        full = replace(plan, ctas=persistent_ctas(plan, self.spec, self.device))
        return replace(full, ctas=_even_ctas(full, self.spec)) if grid == "even" else full

    def point(self, plan: Plan) -> tuple[int, ...] | None:
        """The point of a plan; None if the space does not contain it."""
        indices = []
        for axis in self.axes[:-1]:
            value = tuple(getattr(plan, name) for name in axis.fields)
            if value not in axis.values:
                return None
            indices.append(axis.values.index(value))
        points = (tuple([*indices, grid]) for grid in range(len(self.axes[-1].values)))
        return next((point for point in points if self.plan(point) == plan), None)

    @cached_property
    def legal(self) -> dict[Plan, tuple[int, ...]]:
        """Every legal plan with its first point, in the order of the points.

        Filling it counts the refusals by code in ``refused``, once for each point with the full grid; other grids change
        nothing about a plan that is not legal.
        """
        found: dict[Plan, tuple[int, ...]] = {}
        for base in product(*(range(len(axis.values)) for axis in self.axes[:-1])):
            full = self.plan([*base, 0])
            refusals = legality(full, self.spec, self.device)
            if refusals:
                self.refused.update({refusal.code for refusal in refusals})
                continue
            found.setdefault(full, (*base, 0))
            for grid in range(1, len(self.axes[-1].values)):
                plan = self.plan([*base, grid])
                if plan not in found and not legality(plan, self.spec, self.device):
                    found[plan] = (*base, grid)
        return found

    @cached_property
    def default(self) -> Plan:
        """The plan without tuning."""
        plan = default_plan(self.spec, self.device)
        assert isinstance(plan, Plan)  # there is a space because there is a candidate
        return plan

    def points(self) -> Iterator[tuple[int, ...]]:
        """All points."""
        yield from product(*(range(len(axis.values)) for axis in self.axes))

    def table(self) -> str:
        """The axes and fixed fields as one line of JSON, from which `read` makes the same space again."""
        axes = [[list(axis.fields), [list(value) for value in axis.values]] for axis in self.axes]
        return json.dumps({"axes": axes, "fixed": [list(pair) for pair in self.fixed]})

    @staticmethod
    def read(table: str, spec: ClusterSpec, device: Device) -> Space:
        """The space of a table.  Raises PlanError for a text that is none, or of other fields than Plan has now."""
        try:
            values = json.loads(table)
            axes = tuple(Axis(tuple(names), _plain(found)) for names, found in values["axes"])
            fixed = tuple((name, _plain(value)) for name, value in values["fixed"])
            space = Space(spec, device, axes, fixed)
            space.plan([0] * len(axes))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            hint = "a record of another version of this package cannot be varied; its plan can still be applied"
            raise PlanError("the table of a design space", f"{type(error).__name__}: {error}", hint) from error
        return space


def _plain(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(_plain(entry) for entry in value) if isinstance(value, list) else value


def _even_ctas(plan: Plan, spec: ClusterSpec) -> int:
    """The fewest CTAs, in whole rows and clusters, whose busiest one has no more tiles than with all CTAs of a plan."""
    parts = row_parts(plan, spec)
    if in_turn(plan):
        clusters = math.ceil(row_tiles(plan, spec) // plan.cluster_m * parts / tiles_of_cta(plan, spec))
        return min(plan.ctas, clusters * plan.cluster_m)
    if plan.ctas < parts * plan.cluster_m:
        return plan.ctas
    teams = math.ceil(row_tiles(plan, spec) / tiles_of_cta(plan, spec))
    return min(plan.ctas, math.ceil(teams / plan.cluster_m) * plan.cluster_m * parts)
