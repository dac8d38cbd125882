"""Static checks: silent on every correct kernel, fast, and part of every build."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import tvm
from canonical_examples import EXAMPLES
from tvm import tirx
from verified_kernels import NAMES, case

import tvm_comfuse
from tests.host.relax_models import bias_residual_layer_norm, build
from tvm_comfuse.errors import LoweringError, VerifyError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.choose import candidates
from tvm_comfuse.schedules.device import H100, H200
from tvm_comfuse.tir_passes import lower as lowering
from tvm_comfuse.verify.faults import FAULTS
from tvm_comfuse.verify.static import CHECKS, check, verify_or_raise
from tvm_comfuse.verify.static.evaluate import AXES, UnknownValueError, along, evaluate, total
from tvm_comfuse.verify.static.index import index_of
from tvm_comfuse.verify.static.scene import scenes

#: seconds a kernel may take at every build
LIMIT = 0.2


@pytest.mark.parametrize("name", NAMES)
def test_correct_kernels_are_not_blamed(name: str) -> None:
    kernel = case(name).kernel
    for device in (H200, H100):
        assert check(kernel, device) == []
    verify_or_raise(kernel, H200)


@pytest.mark.parametrize("example", EXAMPLES)
def test_candidate_plans_are_not_blamed(example: str) -> None:
    rng = random.Random(example)
    m, n, k = rng.choice([None, 100, 4097]), rng.choice([96, 768, 1000, 2048]), rng.choice([72, 512])
    func = EXAMPLES[example].build(m, n, k, "bfloat16", rng.choice(["NK", "KN"]))
    plans = candidates(analyze(func), H200)
    for plan in rng.sample(plans, min(2, len(plans))):
        scheduled = schedule(func, H200, plan)
        assert not isinstance(scheduled, Refusal)
        assert check(lowering.lower(scheduled, "candidate"), H200) == [], plan


def test_fast_enough_for_every_build() -> None:
    kernel = case("pingpong_multicast").kernel
    times = []
    for _ in range(3):
        start = time.perf_counter()
        check(kernel, H200)
        times.append(time.perf_counter() - start)
    assert min(times) < LIMIT


def test_a_build_fails_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = lowering.lower

    def wrong(func: tirx.PrimFunc, name: str | None = None) -> Any:
        return FAULTS["registers-too-many"].apply(correct(func, name))

    monkeypatch.setattr(lowering, "lower", wrong)
    with pytest.raises(VerifyError, match=r"128 x 40 \+ 128 x 240 \+ 128 x 240 = 66560 registers") as caught:
        tvm_comfuse.compile(build(bias_residual_layer_norm, "bfloat16", 256), "h200")
    assert "register-budget" in caught.value.found
    assert caught.value.hint


def test_without_a_target_there_is_no_device_to_check_against() -> None:
    mutated = FAULTS["registers-too-many"].apply(case("cooperative_cluster").kernel)
    lowering.verify_or_raise(mutated)
    with tvm_comfuse.parse_target("h200"), pytest.raises(VerifyError):
        lowering.verify_or_raise(mutated)


def test_counts_are_those_of_an_execution() -> None:
    """Executions of every instruction, against a plain enumeration of threads and iterations."""
    index = index_of(case("pingpong_grid").kernel)
    scene, _ = scenes(index)
    checked = 0
    for instruction in index.instructions:
        if not instruction.guards or len(instruction.loops) > 2 or any(loop.unrolled for loop in instruction.loops):
            continue
        factors = scene.factors(instruction.nest)
        shape = np.broadcast_shapes(*(f.shape for f in factors), (1, 3, 4, 32, *[1] * (AXES - 4)))
        for loop in instruction.loops:
            trips = int(scene.trips(loop).max())
            shape = (*shape[: 4 + loop.depth], trips, *shape[5 + loop.depth :])
        counted = np.ones(shape, dtype=np.int64)
        for factor in factors:
            counted = counted * factor
        assert scene.count(instruction, ()).item() == counted.sum()
        checked += 1
    assert checked > 20


def test_evaluation_is_numpy() -> None:
    lane, k, cell = tirx.Var("lane", "int32"), tirx.Var("k", "int32"), tirx.Var("m", "int32")
    env = {lane: along(3, np.arange(32)), k: along(4, np.arange(5))}
    expr = tirx.Select(lane % 4 < 2, (lane // 8) ^ k, tirx.Max(lane - k * 3, 0))
    lanes, ks = np.meshgrid(np.arange(32), np.arange(5), indexing="ij")
    expected = np.where(lanes % 4 < 2, (lanes // 8) ^ ks, np.maximum(lanes - ks * 3, 0))
    assert np.array_equal(evaluate(expr, env).reshape(32, 5), expected)
    weights = [along(3, np.arange(32) % 3), along(4, np.arange(5)), evaluate(lane < k, env)]
    brute = (np.arange(32)[:, None] % 3 * np.arange(5) * (lanes < ks)).sum()
    assert total(weights, (), {4: 5}).item() == brute
    assert total([along(3, np.arange(3))], (), {4: 7}).item() == 21
    with pytest.raises(UnknownValueError):
        evaluate(cell + 1, env)


def test_unknown_statements_are_refused() -> None:
    kernel = case("cooperative_cta").kernel
    loop = tirx.While(tirx.IntImm("bool", 1), tirx.Evaluate(tirx.IntImm("int32", 0)))
    with pytest.raises(LoweringError, match="While"):
        index_of(tirx.PrimFunc(kernel.params, tirx.SeqStmt([kernel.body, loop]), kernel.ret_type, kernel.attrs))


def test_every_check_runs_alone() -> None:
    index = index_of(case("cooperative_multicast").kernel)
    small, large = scenes(index)
    for name, run in CHECKS.items():
        assert list(run(index, small, large, H200)) == [], name


def test_a_scheduled_function_is_no_kernel() -> None:
    with pytest.raises((LoweringError, tvm.error.InternalError)):
        check(case("cooperative_cta").func, H200)


@pytest.mark.parametrize(("fault", "key"), [("quad-stride", "strides"), ("quad-part", "box")])
def test_a_map_of_parts_must_name_each_row_once(fault: str, key: str) -> None:
    mutated = FAULTS[fault].apply(case("quads_grid").kernel)
    assert mutated is not None
    found = [finding for finding in check(mutated, H200) if finding.code == "tma-parts"]
    assert found
    assert found[0].where == "tensor map w_map"
    assert found[0].numbers["parts"] == [2, 4, 4]
    assert key in found[0].numbers


def test_two_parts_may_change_places() -> None:
    """Each row still comes once, so only numbers tell."""
    mutated = FAULTS["quad-strides-swapped"].apply(case("quads_grid").kernel)
    assert check(mutated, H200) == []
