"""What the tests of tuning share: small tasks, made-up times, and builders and runners that make them up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from canonical_examples import EXAMPLES

import tvm_comfuse
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.cost import estimate
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tuning.build import Built
from tvm_comfuse.tuning.database.database import Database
from tvm_comfuse.tuning.database.workload import workload_module
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.measurer import Measured
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.record import DatabaseStore, MemoryStore, Store
from tvm_comfuse.tuning.search import Search, Settings
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.task import Task

TARGET = tvm_comfuse.parse_target("h200")


def task(name: str = "layer_norm", m: int | None = 16384, n: int = 768, k: int = 768, label: str = "mm") -> Task:
    func = EXAMPLES[name].build(m=m, n=n, k=k, dtype="bfloat16")
    return Task(workload_module(func), m or 4096, [label])


def space_of(what: Task) -> Space:
    space = Space.of(analyze(what.func), H200)
    assert isinstance(space, Space)
    return space


def made_up(spec: ClusterSpec, seed: int, noise: float = 0.03) -> Callable[[Plan], float]:
    """Microseconds by plan: the estimate, off by factors that the cost model cannot know, and noise, all by the seed."""

    def factor(key: Any, spread: float) -> float:
        return math.exp(random.Random(f"{seed} {key}").gauss(0.0, spread))

    def us(plan: Plan) -> float:
        traits = (
            (plan.layout, plan.groups_m),
            (plan.exchange,),
            (plan.tile_m, plan.tile_n),
            (plan.layout, plan.tile_n),
            ("depth", plan.pipeline_depth),
            ("cluster", plan.cluster_m),
            (plan.operands, plan.store),
        )
        hidden = math.prod(factor(trait, 0.1) for trait in traits)
        return float(estimate(plan, spec, H200).total) * hidden * factor(plan.to_json(), noise)

    return us


class InstantBuilder:
    """Builds nothing: the library is the plan as JSON.  failing: reasons by plan."""

    parallel = 4

    def __init__(self, failing: dict[Plan, str] | None = None):
        self.failing, self.built = failing or {}, list[Plan]()

    def submit(self, func: Any) -> Future[Built]:
        from tvm_comfuse.schedules.apply import plan_of

        plan = plan_of(func)
        self.built.append(plan)
        reason = self.failing.get(plan, "")
        return done(Built(reason=reason, failure=reason) if reason else Built(plan.to_json()))

    def discard(self, library: str) -> None:
        """There is no file."""


class MadeUpRunner:
    """Times by a function of the plan and the number of the measurement."""

    def __init__(self, us: Callable[[Plan, int], float], failing: dict[Plan, str] | None = None):
        self.us, self.failing = us, failing or {}
        self.products: dict[str, float] = {}
        self.device_name = "made up"
        self.measured: list[Plan] = []
        self.references: list[str] = []

    def prepare(self, what: Task) -> None:
        self.products[what.key] = 1.0

    def submit(self, what: Task, library: str, reference: str = "", check: bool = True) -> Future[Measured]:
        plan = Plan.from_dict(json.loads(library))
        self.measured.append(plan)
        self.references.append(reference)
        if plan in self.failing:
            return done(Measured(reason=self.failing[plan], failure=self.failing[plan]))
        number = len(self.measured)
        other = self.us(Plan.from_dict(json.loads(reference)), number) if reference else None
        error, allowed = (1e-3, 2e-3) if check else (None, None)
        return done(Measured((self.us(plan, number),), other, error=error, allowed=allowed))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def search(
    builder: Any,
    runner: Any,
    store: Store | None = None,
    folder: Path | None = None,
    model: PlanModel | None = None,
    **settings: Any,
) -> Search:
    default = DatabaseStore(Database.open(folder)) if folder is not None else MemoryStore()
    kept = store if store is not None else default
    return Search(TARGET, H200, kept, builder, runner, model or PlanModel(H200), Settings(**settings), Log(folder))
