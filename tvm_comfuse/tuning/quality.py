"""How well a cost model ranks candidates that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm_ffi
from tvm.target import Target

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.metaschedule import tune_context
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.record import Record
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.strategy import candidate_for

#: candidates whose times differ by less are equal: measurements repeat within 1 %
TIE = 0.02
#: what is measured of a ranking in one batch of a search
TOP = 8


@dataclass(frozen=True)
class Quality:
    """One model on held-out candidates.

    pairs      share of the pairs, ties left out, that are in the right order; NaN without pairs
    best_of    time of the best candidate over that of the best among the TOP first ones, so 1 is perfect
    candidates that were ranked
    """

    model: str
    pairs: float
    best_of: float
    candidates: int


@dataclass(frozen=True)
class Measurements:
    """The measured candidates of one workload; us in the order of plans."""

    context: Any
    space: Space
    plans: tuple[Plan, ...]
    us: tuple[float, ...]

    @staticmethod
    def of(workload: Any, target: Target, device: Device, times: dict[Plan, float]) -> Measurements:
        """Of times in microseconds by plan; plans that the space does not have now are left out."""
        space = Space.of(analyze(workload["main"]), device)
        assert isinstance(space, Space)
        known = {plan: us for plan, us in times.items() if plan in space.legal}
        context = tune_context(workload, target=target, num_threads=1)
        return Measurements(context, space, tuple(known), tuple(known.values()))

    def some(self, chosen: Sequence[int]) -> Measurements:
        """Those at some positions."""
        plans, us = tuple(self.plans[n] for n in chosen), tuple(self.us[n] for n in chosen)
        return Measurements(self.context, self.space, plans, us)

    @cached_property
    def candidates(self) -> list[Any]:
        """MetaSchedule's candidates."""
        return [candidate_for(self.context.mod, self.space, plan) for plan in self.plans]

    def teach(self, model: Any) -> None:
        """Shows a cost model all of them."""
        results = [ms.runner.RunnerResult([us * 1e-6], None) for us in self.us]
        model.update(self.context, self.candidates, results)


def measurements(records: Sequence[Record], device: Device) -> list[Measurements]:
    """The measurements in records, by workload."""
    groups: dict[Any, tuple[Record, dict[Plan, float]]] = {}
    for record in records:
        _, times = groups.setdefault(tvm_ffi.structural_hash(record.workload), (record, {}))
        times[record.plan] = min(record.us, times.get(record.plan, record.us))
    return [Measurements.of(first.workload, first.target, device, times) for first, times in groups.values()]


def compare(measured: Sequence[Measurements], device: Device, *, across: bool, seed: int = 0) -> list[Quality]:
    """Four models on held-out candidates: random, the estimate, TVM's model with TVM's features, and ours.

    across  True: each workload is held out in turn, the models see the others; False: they see half of each workload
    """
    makers: dict[str, Callable[[], Any]] = {
        "random": lambda: _Random(seed),
        "estimate": lambda: _Untaught(PlanModel(device)),
        "stock": _stock,
        "plan": lambda: PlanModel(device),
    }
    splits = list(_across(measured)) if across else [_halves(measured, random.Random(seed))]
    return [_quality(name, make, splits) for name, make in makers.items()]


def _stock() -> Any:
    # by default it goes on for 50 rounds after the last gain, which on some dozens of samples takes longer than they did
    return ms.cost_model.XGBModel(num_warmup_samples=0, early_stopping_rounds=5, num_tuning_cores=1)


def pairwise_accuracy(scores: Sequence[float], us: Sequence[float]) -> tuple[int, int]:
    """Pairs in the right order, and pairs in all; a higher score should have the smaller time."""
    right = count = 0
    for first in range(len(us)):
        for second in range(first):
            if abs(us[first] / us[second] - 1.0) > TIE:
                count += 1
                right += (scores[first] > scores[second]) == (us[first] < us[second])
    return right, count


def best_of_top(scores: Sequence[float], us: Sequence[float], top: int = TOP) -> float:
    """The best time over the best among the `top` highest scores."""
    first = sorted(range(len(us)), key=lambda n: -scores[n])[:top]
    return min(us) / min(us[n] for n in first)


class _Random:
    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)

    def update(self, *_: Any) -> None:
        """Learns nothing."""

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """A number for each."""
        return self._random.random(len(candidates))


class _Untaught:
    def __init__(self, model: Any):
        self.predict = model.predict

    def update(self, *_: Any) -> None:
        """Learns nothing."""


Split = tuple[Sequence[Measurements], Sequence[Measurements]]


def _across(measured: Sequence[Measurements]) -> Sequence[Split]:
    return [([*measured[:n], *measured[n + 1 :]], [measured[n]]) for n in range(len(measured))]


def _halves(measured: Sequence[Measurements], chance: random.Random) -> Split:
    seen, held = [], []
    for group in measured:
        order = list(range(len(group.plans)))
        chance.shuffle(order)
        seen.append(group.some(order[::2]))
        held.append(group.some(order[1::2]))
    return seen, held


def _quality(name: str, make: Callable[[], Any], splits: Sequence[Split]) -> Quality:
    right = count = ranked = 0
    bests = []
    for seen, held in splits:
        model = make()
        for group in seen:
            group.teach(model)
        for group in held:
            scores = [float(score) for score in model.predict(group.context, group.candidates)]
            found, pairs = pairwise_accuracy(scores, group.us)
            right, count, ranked = right + found, count + pairs, ranked + len(scores)
            bests.append(best_of_top(scores, group.us))
    return Quality(name, right / count if count else float("nan"), float(np.mean(bests)), ranked)
