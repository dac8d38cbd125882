"""The float64 reference and the twin that is interpreted in a large kernel's place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from canonical_examples import EXAMPLES, Maker, inputs, references
from tvm import te

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.timetable import least_slots
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.api import verify, verify_kernel
from tvm_comfuse.verify.dynamic import random_inputs
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check
from tvm_comfuse.verify.twin import twin


def scheduled(name: str, m: Any, n: int, k: int, layout: str = "NK", plan: Plan | None = None) -> Any:
    result = schedule(EXAMPLES[name].build(m, n, k, "bfloat16", layout), H200, plan)
    assert not isinstance(result, Refusal), str(result)
    return result


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_reference_is_the_hand_written_one(name: str, layout: str) -> None:
    func = EXAMPLES[name].build(None, 96, 72, "float16", layout)
    arrays = inputs(func, len(analyze(func).outputs), 70)
    for ours, expected in zip(reference(func, arrays), references(EXAMPLES[name], arrays, layout), strict=True):
        assert ours.dtype == np.float64
        # the expressions hold 1 / N as float32
        assert np.allclose(ours, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("m", "n", "k", "layout"), [(None, 1000, 520, "NK"), (16384, 4096, 1024, "KN")])
@pytest.mark.parametrize("name", EXAMPLES)
def test_twin_is_the_same_cluster(name: str, m: Any, n: int, k: int, layout: str) -> None:
    func = scheduled(name, m, n, k, layout)
    small = twin(func, H200)
    spec, original = analyze(small.func), analyze(func)
    assert [stage.reductions for stage in spec.stages] == [stage.reductions for stage in original.stages]
    assert [(o.kind, o.dtype) for o in spec.operands] == [(o.kind, o.dtype) for o in original.operands]
    assert (spec.m is None) == (m is None)
    assert small.reduced["N"] == (n, spec.n)
    assert (spec.n % small.plan.cta_columns == 0) == (n % small.plan.cta_columns == 0)
    assert small.rows <= 2048
    assert check(lower(small.func, "twin"), H200) == []
    # its constants are those of the new N: it is right by the hand-written reference too
    arrays = random_inputs(small.func, small.rows, len(spec.outputs), 0)
    for ours, expected in zip(reference(small.func, arrays), references(EXAMPLES[name], arrays, layout), strict=True):
        assert np.allclose(ours, expected, rtol=1e-6, atol=1e-5)


def test_a_row_in_many_parts_keeps_the_code_of_the_second_turn() -> None:
    plan = Plan(64, 128, 64, 3, "cooperative", 2, 1, "cluster", 1, 8, 64, ("tma",), ("tma",))
    small = twin(scheduled("layer_norm", 8192, 1024, 256, plan=plan), H200)
    assert small.plan.cluster_n == 5
    assert small.reduced["cluster_n"] == (8, 5)


def test_a_resident_w_stays_resident_and_meets_a_ring_that_wraps() -> None:
    plan = Plan(64, 128, 64, 4, "pingpong", 1, 1, "grid", 1, 1, 132, ("tma",), ("tma",), w_resident=True)
    small = twin(scheduled("layer_norm", 16384, 512, 512, plan=plan), H200)
    assert small.plan.w_resident
    assert small.reduced["K"] == (512, 5 * 64)
    assert check(lower(small.func, "twin"), H200) == []


def test_every_one_of_three_groups_works_twice() -> None:
    plan = Plan(64, 128, 64, 6, "pingpong", 1, 1, "grid", 1, 1, 132, ("tma",), ("tma",), mma_groups=3, w_resident=True)
    small = twin(scheduled("layer_norm", 16384, 512, 512, plan=plan), H200)
    assert small.plan.mma_groups == 3
    assert small.rows > 6 * 64
    assert check(lower(small.func, "twin"), H200) == []


def test_a_kernel_is_verified() -> None:
    name = "gate_two_outputs"
    result = verify_kernel("some_kernel", scheduled(name, None, 1000, 520), H200, seeds=(0,))
    assert result.passed, result.findings or result.unsupported
    assert result.shape == ("symbolic", 1000, 520)
    assert result.interleavings > 5
    assert len(result.errors) == len(analyze(scheduled(name, None, 1000, 520)).outputs)
    assert all(error <= result.allowed[output] for output, error in result.errors.items())


DEFERRED = Plan(
    64, 128, 64, 3, "cooperative", 2, 1, "grid", 1, 1, 128, ("global",), ("global",), defer=True, w_order="quads"
)


@pytest.mark.parametrize(("tile_n", "depth", "k"), [(128, 3, 7 * 64), (64, 9, 10 * 64)])
def test_a_deferred_tail_has_the_slots_it_needs_and_a_ring_that_wraps(tile_n: int, depth: int, k: int) -> None:
    plan = replace(DEFERRED, tile_n=tile_n, pipeline_depth=depth)
    small = twin(scheduled("layer_norm", 16384, 1024, 4096, plan=plan), H200)
    assert (small.plan.defer, small.plan.w_order) == (True, "quads")
    assert small.reduced["K"] == (4096, k)
    assert k // 64 == max(least_slots(plan), depth) + 1
    # a step behind whose tail runs beside a main loop, and one behind whose nothing follows
    assert small.rows == 3 * plan.cta_rows
    assert check(lower(small.func, "twin"), H200) == []


def test_a_deferred_kernel_is_verified() -> None:
    func = scheduled("rms_residual", None, 1024, 1096, plan=replace(DEFERRED, fast_math=True, dependent_launch=True))
    result = verify_kernel("deferred", func, H200, seeds=(0,))
    assert result.passed, result.findings or result.unsupported
    assert result.plan.defer
    assert result.reduced["K"] == (1096, 6 * 64 + 1096 % 64)


def test_the_error_of_fast_math_is_no_finding_in_a_float32_output() -> None:
    plan = Plan(64, 128, 64, 3, "cooperative", 2, 1, "none", 1, 1, 128, (), ("global",))
    results = []
    for fast_math in (False, True):
        make = Maker(4096, 1024, 256, "bfloat16", "NK")
        out = make.out(0, lambda i, j, make=make: te.tanh(make.gemm[i, j]), dtype="float32")
        tanh = make.func([out], "gemm_elementwise", [(None, [], ["stage_0_out0"])])
        func = schedule(tanh, H200, replace(plan, fast_math=fast_math))
        assert not isinstance(func, Refusal), str(func)
        results.append(verify_kernel("tanh", func, H200, seeds=(0,)))
    exact, fast = results
    assert exact.passed
    assert fast.passed, fast.findings
    (name,) = exact.errors
    assert exact.errors[name] < exact.allowed[name] < 2e-5
    # tanh.approx is off by up to 2**-11
    assert 1e-4 < fast.errors[name] < 2.0**-11 < fast.allowed[name] < 2.0**-9


class Offset(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 128, dtype=torch.bfloat16), torch.nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).float() + 1000.0)


def test_what_float32_loses_in_a_model_is_no_finding() -> None:
    """The variance of numbers near 1,000 with a spread of 1: float32 has them to 2**-14."""
    report = verify(Offset().eval(), "h200", example_args=(torch.randn(128, 64).bfloat16(),), seeds=(0,))
    (kernel,) = report.kernels
    assert kernel.passed, kernel.findings
    (error,), (allowed,) = kernel.errors.values(), kernel.allowed.values()
    assert 1e-5 < error < allowed < 1e-3
