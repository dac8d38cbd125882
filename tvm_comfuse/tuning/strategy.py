"""Which candidates to measure next.

A cluster has some hundreds of legal plans, so all of them are ranked by the cost model each time: no population, no
generations.  Most of a batch are the best ones of different families; the rest explore families never measured.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from tvm.ir.utils import derived_object

from tvm_comfuse.errors import PlanError
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.rules import plan_in, schedule_at
from tvm_comfuse.tuning.space import Space

#: share of a batch that explores
EPSILON = 0.25
#: plans of one family in a batch: their times differ little, so measuring more of them tells little
OF_A_FAMILY = 2

T = TypeVar("T", bound=Hashable)
#: plans in each batch that differ from the best one so far in depth and grid only: its family is worth knowing well
KIN = 2
#: from plans by promise, plans that are not to be taken, a number, chance and the best plan so far: which ones to measure
Choice = Callable[[Sequence[Plan], Sequence[Plan], int, random.Random, Plan | None], list[Plan]]


@lru_cache(maxsize=2**15)
def family(plan: Plan) -> Plan:
    """The plan without what changes its time least: depth and number of CTAs."""
    return replace(plan, pipeline_depth=2, ctas=1)


def pick(
    ranked: Sequence[T],
    measured: Sequence[T],
    family_of: Callable[[T], Hashable],
    size: int,
    chance: random.Random,
    epsilon: float = EPSILON,
) -> list[T]:
    """Up to `size` of `ranked`, which is sorted by promise, that are not `measured`.

    1 - epsilon of them are the most promising, with OF_A_FAMILY to a family.  The others are the most promising of random
    families without a measurement, or anything if there is no such family.
    """
    known = set(measured)
    open_ = [plan for plan in ranked if plan not in known]
    explored = round(size * epsilon)
    families: Counter[Hashable] = Counter()
    chosen: list[T] = []
    for plan in open_:
        if len(chosen) < size - explored and families[family_of(plan)] < OF_A_FAMILY:
            families[family_of(plan)] += 1
            chosen.append(plan)
    seen = {family_of(plan) for plan in [*measured, *chosen]}
    heads = list({family_of(plan): plan for plan in reversed(open_) if family_of(plan) not in seen}.values())
    chance.shuffle(heads)
    chosen += heads[:explored]
    taken = set(chosen)
    rest = [plan for plan in open_ if plan not in taken]
    return chosen + chance.sample(rest, min(size - len(chosen), len(rest)))


def promising(
    ranked: Sequence[Plan], known: Sequence[Plan], size: int, chance: random.Random, best: Plan | None
) -> list[Plan]:
    """The search: the kin of the best plan, then `pick` by families of plans."""
    taken = set(known)
    own = None if best is None else family(best)
    kin = [plan for plan in ranked if family(plan) == own and plan not in taken][: min(KIN, size)]
    return kin + pick(ranked, [*known, *kin], family, size - len(kin), chance)


def at_random(
    ranked: Sequence[Plan], known: Sequence[Plan], size: int, chance: random.Random, best: Plan | None
) -> list[Plan]:
    """What the search is compared with: any plans."""
    taken = set(known)
    rest = [plan for plan in ranked if plan not in taken]
    return chance.sample(rest, min(size, len(rest)))


@derived_object
class RankedSearch(ms.search_strategy.PySearchStrategy):
    """MetaSchedule's search strategy for spaces of `rules.space_generator`.

    The first candidate is the default plan, unless the database has it: all others are compared with it.
    """

    def __init__(self, device: Device, model: PlanModel, seed: int = 0, choose: Choice = promising):
        super().__init__()
        self._device, self._model, self._seed, self._choose = device, model, seed, choose
        self._context: Any = None
        self._best: tuple[float, Plan] | None = None

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Remembers the context."""
        self._context = context

    def pre_tuning(
        self, max_trials: int, num_trials_per_iter: int, design_spaces: list[Any], database: Any = None, _: Any = None
    ) -> None:
        """Starts a search; plans that the database has for this workload are not proposed again."""
        (func,) = (func for _, func in self._context.mod.functions_items())
        space = Space.of(analyze(func), self._device)
        if not isinstance(space, Space):
            raise PlanError("a cluster that has a legal plan", str(space), "do not tune it")
        self._space, self._left, self._size = space, max_trials, num_trials_per_iter
        self._chance = random.Random(self._seed)
        self._plans = list(space.legal)
        self._first = [space.default]
        self._features = self._model.matrix(self._context, space, self._plans)
        self._proposed = _known_plans(database, self._context.mod)

    def post_tuning(self) -> None:
        """Nothing to let go of."""

    def generate_measure_candidates(self) -> list[Any] | None:
        """The next batch; None when the trials or the plans are used up."""
        size = min(self._size, self._left)
        scores = self._model.scores(self._context, self._features)
        order = sorted(range(len(scores)), key=lambda n: -scores[n])
        leading = [plan for plan in self._first[:size] if plan not in self._proposed]
        ranked = [self._plans[n] for n in order]
        known = [*self._proposed, *leading]
        best = self._best[1] if self._best else None
        chosen = leading + self._choose(ranked, known, size - len(leading), self._chance, best)
        self._proposed += chosen
        self._left -= len(chosen)
        return [candidate_for(self._context.mod, self._space, plan) for plan in chosen] or None

    def notify_runner_results(self, measure_candidates: list[Any], results: list[Any]) -> None:
        """Remembers the best plan; the cost model learns of them by itself."""
        for candidate, result in zip(measure_candidates, results, strict=True):
            if result.run_secs is None or (plan := plan_in(candidate.sch.trace)) is None:
                continue
            seconds = statistics.median(map(float, result.run_secs))
            if self._best is None or seconds < self._best[0]:
                self._best = (seconds, plan)

    def clone(self) -> Any:
        """One for another task."""
        return RankedSearch(self._device, self._model, self._seed, self._choose)

    def exclude(self, plans: Sequence[Plan]) -> None:
        """Plans that are not to be proposed, after pre_tuning."""
        self._proposed += plans


def candidate_for(mod: Any, space: Space, plan: Plan) -> Any:
    """MetaSchedule's measure candidate of a legal plan."""
    return ms.MeasureCandidate(schedule_at(mod, space, space.legal[plan]), [])


def _known_plans(database: Any, mod: Any) -> list[Plan]:
    """The plans that a database has for a workload."""
    if database is None or not database.has_workload(mod):
        return []
    records = database.get_top_k(database.commit_workload(mod), len(database))
    return [plan for record in records if (plan := plan_in(record.trace)) is not None]
