"""The interpreter: right kernels give right numbers and no findings, in every order of actors."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import canonical_examples
import numpy as np
import pytest
from interpreted_kernels import BASE, KINDS, PLACEMENTS, built, case, check_numbers
from tvm import te

from tvm_comfuse.errors import ComfuseError, LoweringError
from tvm_comfuse.verify.interpreter import Program, interpret

#: actors and copies that are as slow as possible, one at a time
SLOW = [None, "wg0.w0", "wg1", "cta0", "load"]
#: seconds that two CTAs with two tiles per warp group at K = 256 may take, compilation included
TIME_LIMIT = 10.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_in_many_orders(kind: str) -> None:
    given = case("layer_norm", kind)
    seen = set()
    for seed, slow in enumerate(SLOW):
        result = given.program.run(given.arrays, seed=seed, slow=slow)
        assert not result.findings, f"seed {seed}, slow {slow}: {result.findings[0]}"
        check_numbers(result, given.references)
        seen.add(result.interleaving)
    assert len(seen) == len(SLOW)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("cooperative_multicast", "bfloat16"),
        ("pingpong_ragged", "float16"),
        ("pingpong_narrow", "bfloat16"),
        ("pingpong_resident", "bfloat16"),
    ],
)
@pytest.mark.parametrize("example", [name for name in PLACEMENTS if name != "layer_norm"])
def test_every_example(example: str, kind: str, dtype: str) -> None:
    given = case(example, kind, m=257, k=136, dtype=dtype, layout="KN", symbolic=True)
    result = given.program.run(given.arrays, seed=1)
    assert not result.findings, result.findings[0]
    check_numbers(result, given.references)


def test_one_program_runs_with_any_number_of_rows() -> None:
    program = case("rms_residual", "pingpong_multicast", m=300, symbolic=True).program
    for m in (1, 64, 65, 700):
        given = case("rms_residual", "pingpong_multicast", m=m, symbolic=True)
        result = program.run(given.arrays)
        assert not result.findings, result.findings[0]
        check_numbers(result, given.references)


def test_same_seed_same_run() -> None:
    given = case("layer_norm", "pingpong_grid")
    first, again = (given.program.run(given.arrays, seed=4, slow="wg1") for _ in range(2))
    other = given.program.run(given.arrays, seed=5, slow="wg1")
    assert (first.interleaving, first.steps) == (again.interleaving, again.steps)
    assert first.interleaving != other.interleaving
    np.testing.assert_array_equal(first.outputs["stage_2_out0"], again.outputs["stage_2_out0"])


def test_a_second_launch_finds_the_mail_of_the_first() -> None:
    given = case("layer_norm", "cooperative_grid")
    first = given.program.run(given.arrays)
    (words,) = first.statics.state.values()
    # at most two units for each of the row groups: two tags, and the one that closes the launch
    assert words in ([3, 0, 0], [4, 0, 0])
    second = given.program.run(given.arrays, seed=1, statics=first.statics)
    assert not second.findings
    check_numbers(second, given.references)


def test_fast_enough() -> None:
    plan = replace(BASE, layout="pingpong", groups_m=1, tile_n=256, exchange="cluster", cluster_n=2, ctas=2)
    given = built("layer_norm", plan, 512, 256, 256, "bfloat16", "NK", False, 1)
    start = time.process_time()
    result = interpret(given.kernel, given.arrays)
    spent = time.process_time() - start
    assert not result.findings
    check_numbers(result, given.references)
    assert spent < TIME_LIMIT


def test_inputs_by_name_and_wrong_inputs() -> None:
    given = case("bias_gelu", "cooperative_grid", m=64)
    names = [buffer.name for buffer in given.program.kernel.params]
    result = interpret(given.kernel, dict(zip(names, given.arrays, strict=False)))
    check_numbers(result, given.references)
    with pytest.raises(LoweringError, match="parameters"):
        interpret(given.kernel, {"nonsense": given.arrays[0]})
    with pytest.raises(LoweringError, match=r"needed x of bfloat16"):
        interpret(given.kernel, [given.arrays[0].astype("float32"), *given.arrays[1:]])


def test_actors_are_named() -> None:
    names = case("layer_norm", "pingpong_grid").program.actors()
    assert names == ["wg0.w0", "wg0.w1", "wg0.w2", "wg0.w3", "wg1", "wg2", "load", "store"]


def test_a_run_stops_at_its_limit() -> None:
    given = case("bias_gelu", "cooperative_grid", m=64)
    result = given.program.run(given.arrays, max_steps=50)
    assert [finding.code for finding in result.findings] == ["step-limit"]
    assert result.steps == 50


def test_two_stored_outputs_over_a_loaded_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual stream that goes out before and after its norm, through the tile that the residual came in."""

    def make(mk: Any) -> Any:
        r, const = mk.tile("r"), canonical_examples.const
        s0 = mk.stage(0, lambda i, j: mk.gemm[i, j] + r[i, j].astype("float32"))
        stream = mk.out(0, lambda i, j: s0[i, j])
        squares = mk.reduce("reduce_0", te.sum, lambda i, j: s0[i, j] * s0[i, j])
        norm = mk.out(1, lambda i, j: s0[i, j] * te.rsqrt(squares[i] * const(1.0 / mk.n) + const(1e-6)))
        stages = [("stage_0", ["reduce_0"], ["stage_0_out0"]), (None, [], ["stage_1_out0"])]
        return mk.func([stream, norm], "gemm_reduce", stages)

    def reference(x: Any, w: Any, r: Any) -> list[Any]:
        v = x @ w + r
        return [v, v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6)]

    monkeypatch.setitem(canonical_examples.EXAMPLES, "stream", canonical_examples.Example(make, reference))
    plan = replace(BASE, store=("tma", "tma"))
    given = built("stream", plan, 512, 300, 72, "bfloat16", "NK", False, 2)
    for seed, slow in enumerate(SLOW):
        result = given.program.run(given.arrays, seed=seed, slow=slow)
        assert not result.findings, f"seed {seed}, slow {slow}: {result.findings[0]}"
        check_numbers(result, given.references)


def test_program_takes_only_lowered_kernels() -> None:
    with pytest.raises(ComfuseError):
        Program(canonical_examples.EXAMPLES["bias_gelu"].build(64, 128, 64))
