"""The cost model and its features; how well it ranks what was really measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tuning_examples import TARGET, made_up, space_of, task

from tvm_comfuse.errors import ModelError
from tvm_comfuse.schedules.cost import estimate
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.tuning.features import ESTIMATE, PlanFeatures, numbers, roofline
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.metaschedule import tune_context
from tvm_comfuse.tuning.model import PlanModel
from tvm_comfuse.tuning.quality import Measurements, best_of_top, compare, pairwise_accuracy
from tvm_comfuse.tuning.strategy import candidate_for

LAYOUTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200" / "layouts.json"


def context_of(what: Any) -> Any:
    return tune_context(what.workload, target=TARGET, num_threads=1)


@pytest.mark.parametrize("m", [16384, None])
def test_features_join_the_stock_ones_with_the_plans(m: int | None) -> None:
    what = task("layer_norm", m)
    space, context, extractor = space_of(what), context_of(what), PlanFeatures(H200)
    plans = list(space.legal)[::97]
    candidates = [candidate_for(what.workload, space, plan) for plan in plans]
    joined = [array.numpy() for array in extractor.extract_from(context, candidates)]
    stock = [array.numpy() for array in ms.feature_extractor.PerStoreFeature().extract_from(context, candidates)]
    for plan, both, theirs in zip(plans, joined, stock, strict=True):
        own = numbers(plan, space.spec, H200)
        assert next(iter(own)) == ESTIMATE
        assert own[ESTIMATE] == pytest.approx(math.log(estimate(plan, space.spec, H200).total))
        assert np.isfinite(both).all()
        np.testing.assert_array_equal(both[:, len(own) :], theirs)
        np.testing.assert_array_equal(both[:, : len(own)], np.tile(list(own.values()), (len(theirs), 1)))
    # without a schedule they are the same
    for one, other in zip(joined, extractor.of_plans(context, space, plans), strict=True):
        np.testing.assert_array_equal(one, other)


def test_numbers_tell_every_legal_plan_from_the_others() -> None:
    space = space_of(task())
    rows = {tuple(numbers(plan, space.spec, H200).values()) for plan in space.legal}
    assert len(rows) == len(space.legal)


def test_without_measurements_the_estimate_ranks() -> None:
    what = task()
    space, context = space_of(what), context_of(what)
    plans = list(space.legal)
    scores = PlanModel(H200).rank(context, space, plans)
    totals = [estimate(plan, space.spec, H200).total for plan in plans]
    np.testing.assert_allclose(scores, roofline(space.spec, H200) / np.array(totals), rtol=1e-5)
    assert ((scores > 0) & (scores < 1)).all()


def taught(seed: int = 0, count: int = 48) -> tuple[PlanModel, Any, Any, Any]:
    what = task()
    space, context = space_of(what), context_of(what)
    us = made_up(space.spec, seed)
    plans = list(space.legal)[:: len(space.legal) // count]
    model = PlanModel(H200)
    Measurements(context, space, tuple(plans), tuple(us(plan) for plan in plans)).teach(model)
    return model, context, space, us


def test_learns_and_carries_over_to_another_task() -> None:
    model, context, space, _ = taught()
    for where, place in ((context, space), (context_of(task(n=1024, k=1024)), space_of(task(n=1024, k=1024)))):
        times = made_up(place.spec, 0)
        held = [plan for number, plan in enumerate(place.legal) if number % 5 == 1]
        real = [times(plan) for plan in held]
        before, after = (
            pairwise_accuracy(list(scorer.rank(where, place, held)), real) for scorer in (PlanModel(H200), model)
        )
        assert after[0] / after[1] > before[0] / before[1] + 0.05


def test_failures_teach_nothing() -> None:
    model, context, space, _ = taught()
    plans = list(space.legal)[:20]
    before = model.rank(context, space, plans)
    failed = [ms.runner.RunnerResult(None, "hang")] * 3
    model.update(context, [candidate_for(context.mod, space, plan) for plan in plans[:3]], failed)
    np.testing.assert_allclose(model.rank(context, space, plans), before)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    model, context, space, _ = taught()
    path = tmp_path / "model.json"
    model.save(str(path))
    again = PlanModel(H200)
    again.load(str(path))
    plans = list(space.legal)
    np.testing.assert_array_equal(model.rank(context, space, plans), again.rank(context, space, plans))
    # one that knows nothing can be saved, too
    PlanModel(H200).save(str(path))
    again.load(str(path))
    assert again.booster is None


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99, "groups": {}}', '{"version": 1}'])
def test_other_files_are_no_models(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="a cost model of an earlier search"):
        PlanModel(H200).read(path)
    with pytest.raises(RuntimeError, match="a cost model of an earlier search"):
        PlanModel(H200).load(str(path))


def test_rankings_are_judged() -> None:
    us = [10.0, 10.1, 20.0, 40.0]
    assert pairwise_accuracy([4, 3, 2, 1], us) == (5, 5)
    assert pairwise_accuracy([1, 2, 3, 4], us) == (0, 5)
    assert pairwise_accuracy([4, 3, 1, 2], us) == (4, 5)
    assert best_of_top([1, 2, 3, 4], us, top=2) == 0.5
    assert best_of_top([4, 3, 2, 1], us, top=1) == 1.0


def measured_layouts() -> list[Measurements]:
    """The layouts measured on an H200, as far as they are in the space."""
    groups: dict[Any, dict[Any, float]] = {}
    tasks, spaces = {}, {}
    for row in json.loads(LAYOUTS.read_text())["rows"]:
        key = (row["M"], row["N"], row["K"])
        if key not in tasks:
            tasks[key] = task("layer_norm", *key)
            spaces[key] = space_of(tasks[key])
        layout, _, groups_text = row["layout"].partition(" ")
        groups_m, groups_n = map(int, (groups_text or "1x1").split("x"))
        wanted = {
            **{name: row[name] for name in ("tile_m", "tile_n", "pipeline_depth", "cluster_m", "ctas")},
            "layout": layout,
            "groups_m": groups_m,
            "groups_n": groups_n,
            "exchange": row["exchange"].split()[0],
        }
        legal = spaces[key].legal
        plan = next((p for p in legal if all(getattr(p, name) == value for name, value in wanted.items())), None)
        if plan is not None:
            groups.setdefault(key, {})[plan] = row["us"]
    return [Measurements.of(tasks[key].workload, TARGET, H200, times) for key, times in groups.items()]


def test_ranks_measured_layouts_of_a_task_that_it_has_not_seen() -> None:
    quality = {line.model: line for line in compare(measured_layouts(), H200, across=True)}
    assert quality["plan"].candidates >= 24
    assert quality["plan"].pairs > 0.75
    assert quality["plan"].pairs >= quality["estimate"].pairs - 0.05
    assert quality["plan"].pairs >= quality["stock"].pairs
    assert quality["plan"].pairs > quality["random"].pairs + 0.1
    assert quality["plan"].best_of >= 0.98


def test_ranks_the_other_half_better_than_the_stock_features() -> None:
    what = task()
    space, times = space_of(what), made_up(space_of(what).spec, 3)
    some = {plan: times(plan) for number, plan in enumerate(space.legal) if number % 9 == 0}
    quality = {
        line.model: line for line in compare([Measurements.of(what.workload, TARGET, H200, some)], H200, across=False)
    }
    assert quality["plan"].pairs > max(quality[name].pairs for name in ("random", "estimate", "stock"))
    assert quality["plan"].candidates == len(some) // 2


def test_equal_loops_are_looked_at_once() -> None:
    what = task()
    space, context, extractor = space_of(what), context_of(what), PlanFeatures(H200)
    extractor.of_plans(context, space, space.legal)
    loops = {(plan.cta_rows, plan.cta_columns, plan.tile_k) for plan in space.legal}
    assert len(extractor._inst._known) == len(loops)
    assert tvm_ffi.structural_hash(context.mod) in {key[0] for key in extractor._inst._known}
