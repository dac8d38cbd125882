"""Launches of kernels whose CTAs wait for each other across the grid: tags of the launch, and launches at the same time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from verified_kernels import Case, case

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.dynamic import compare, random_inputs
from tvm_comfuse.verify.faults import FAULTS
from tvm_comfuse.verify.faults.clusters import enter_by_first
from tvm_comfuse.verify.interpreter import Program, Result, run_together
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check

COOPERATIVE, DEPENDENT = "tirx.use_cooperative_launch", "tirx.use_programtic_dependent_launch"
TARGET = parse_target("h200")
ORDERS = [(0, None), (1, None), (2, "launch2"), (3, "cta0"), (4, "launch2.cta1"), (5, "w2")]


def tags_of_device_function(kernel: tirx.PrimFunc, pipeline: str) -> list[str]:
    """The launch tags of the device function when the module has gone through all passes."""
    tags: list[str] = []

    @tvm.ir.instrument.pass_instrument
    class Collect:
        def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
            for gvar, func in mod.functions_items():
                if gvar.name_hint.endswith("_kernel") and "tirx.kernel_launch_params" in func.attrs:
                    tags[:] = [str(tag) for tag in func.attrs["tirx.kernel_launch_params"]]

    with tvm.transform.PassContext(instruments=[Collect()]), TARGET:
        tvm.compile(tvm.IRModule({"main": kernel}), target=TARGET, tir_pipeline=pipeline)
    return tags


@pytest.mark.parametrize("pipeline", ["tirx", "comfuse"])
@pytest.mark.parametrize("name", ["cooperative_grid", "cooperative_multicast"])
def test_the_tag_reaches_the_device_function(name: str, pipeline: str) -> None:
    tags = tags_of_device_function(case(name).kernel, pipeline)
    assert COOPERATIVE in tags
    # the others are what they are without it; TVM wants the one of dynamic shared memory last
    assert {"blockIdx.x", "threadIdx.x"} <= set(tags)
    assert ("clusterCtaIdx.x" in tags) == (name == "cooperative_multicast")
    assert tags[-1] == "tirx.use_dyn_shared_memory"


def test_a_dependent_launch_beside_a_cooperative_one() -> None:
    tags = tags_of_device_function(case("dependent_ragged").kernel, "comfuse")
    assert {COOPERATIVE, DEPENDENT} <= set(tags)
    assert DEPENDENT not in tags_of_device_function(case("global_ragged").kernel, "comfuse")


def test_a_dependent_kernel_waits_before_it_reads() -> None:
    """In the interpreter too: every warp that reads or writes global memory has waited itself."""
    given = case("dependent_ragged")
    mutated = FAULTS["dependency-missing"].apply(given.kernel)
    assert mutated is not None
    found = {finding.code for finding in Program(mutated).run(given.inputs).findings}
    assert "dependency-not-awaited" in found
    # the same kernel in a launch that begins when the one in front has ended
    plain = mutated.without_attr("tirx.kernel_launch_params")
    assert Program(plain).run(given.inputs).findings == []


def test_operands_of_a_dependent_kernel_are_not_taken_for_constant() -> None:
    """The CUDA compiler turns plain loads of operands into loads of constant data, which it may move above the wait."""
    given = case("global_ragged")
    kernel = given.kernel.with_attr("tirx.kernel_launch_params", [DEPENDENT])
    codes = {finding.code for finding in check(kernel, H200)}
    assert codes == {"dependent-wait", "dependent-load"}


def test_other_kernels_are_launched_as_ever() -> None:
    for name in ("cooperative_cluster", "cooperative_cta", "elementwise"):
        assert COOPERATIVE not in tags_of_device_function(case(name).kernel, "tirx")


def test_a_library_keeps_the_tag(tmp_path: Path) -> None:
    def exported(n: int) -> bytes:
        module = OPS["layer_norm"].relax_module(4096, n, 128)
        path = tmp_path / f"n{n}.so"
        tvm_comfuse.compile(module, "h200").export_library(str(path))
        return path.read_bytes()

    assert COOPERATIVE.encode() in exported(1024)
    # a row that one warp group holds needs nobody else
    assert COOPERATIVE.encode() not in exported(64)


@cache
def other_inputs(name: str) -> tuple[list[Any], list[Any]]:
    given = case(name)
    inputs = random_inputs(given.func, given.inputs[0].shape[0], len(given.references), seed=7)
    return inputs, reference(given.func, inputs)


def at_once(
    given: Case, name: str, kernel: tirx.PrimFunc, order: tuple[int, str | None], **kwargs: Any
) -> list[Result]:
    """Two launches with different inputs."""
    inputs = [given.inputs, other_inputs(name)[0]]
    return run_together([Program(kernel), Program(kernel)], inputs, seed=order[0], slow=order[1], **kwargs)


@pytest.mark.parametrize("resident", [None, 3], ids=["both", "not-all-at-first"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_two_launches_take_turns(order: tuple[int, str | None], resident: int | None) -> None:
    """Also if the second launch gets SMs for a part of its CTAs before the first has left."""
    given = case("cooperative_grid")
    results = at_once(given, "cooperative_grid", given.kernel, order, resident=resident)
    for result, expected in zip(results, [given.references, other_inputs("cooperative_grid")[1]], strict=True):
        assert result.findings == []
        assert compare(result.outputs, expected) == []
    (words,) = results[0].statics.state.values()
    # nobody owns the mailboxes, and the tags have moved on twice
    assert words[1:] == [0, 0]
    assert words[0] % 2 == 0 < words[0]


def test_without_turns_they_take_each_others_values() -> None:
    """What the owner is for: launches that all have the same name, as without a cooperative launch."""
    given = case("cooperative_grid")
    wrong = 0
    for order in ORDERS[:3]:
        programs = [_Nameless(given.kernel), _Nameless(given.kernel)]
        inputs = [given.inputs, other_inputs("cooperative_grid")[0]]
        first, second = run_together(programs, inputs, seed=order[0], slow=order[1])
        expected = other_inputs("cooperative_grid")[1]
        wrong += bool(first.findings or compare(first.outputs, given.references) or compare(second.outputs, expected))
    assert wrong


class _Nameless(Program):
    """A program that every launch of has the number of the first."""

    def machine(self, *arguments: Any) -> Any:
        machine = super().machine(*arguments)
        machine.number = 1
        return machine


def test_the_first_cta_must_not_take_the_mailboxes() -> None:
    """It may run when there is no SM for the others of its launch, while a launch that has all its SMs waits for its turn."""
    kernel = enter_by_first(case("cooperative_grid").kernel)
    assert kernel is not None
    given = case("cooperative_grid")
    runs = [at_once(given, "cooperative_grid", kernel, (seed, None), resident=3)[0] for seed in range(4)]
    assert {finding.code for run in runs for finding in run.findings} == {"deadlock"}


def test_a_launch_after_a_launch_has_new_tags() -> None:
    given = case("cooperative_grid")
    first = Program(given.kernel).run(given.inputs)
    (before,) = (list(words) for words in first.statics.state.values())
    second = Program(given.kernel).run(other_inputs("cooperative_grid")[0], statics=first.statics)
    (after,) = second.statics.state.values()
    assert after[0] == 2 * before[0]
    assert second.findings == []
    np.testing.assert_equal(compare(second.outputs, other_inputs("cooperative_grid")[1]), [])
