"""Mistakes that once cost a run on the GPU.  Each is found by name, with the numbers that explain it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from canonical_examples import EXAMPLES
from tvm import tirx
from verified_kernels import case

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.faults import FAULTS
from tvm_comfuse.verify.faults.changes import argument, number
from tvm_comfuse.verify.faults.phases import on
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.interpreter import interpret
from tvm_comfuse.verify.rewrite import with_extent
from tvm_comfuse.verify.static import check

WIDE = Plan(64, 256, 64, 3, "pingpong", 1, 1, "grid", 1, 1, 120, ("tma",), ("tma",))


def kernel_of(plan: Plan, m: int = 16384, n: int = 1024, k: int = 512) -> tirx.PrimFunc:
    scheduled = schedule(EXAMPLES["layer_norm"].build(m, n, k, "bfloat16"), H200, plan)
    assert not isinstance(scheduled, Refusal), str(scheduled)
    return lower(scheduled, "historic")


def finding(kernel: Any, code: str) -> Finding:
    found = {f.code: f for f in check(kernel, H200)}
    assert code in found, sorted(found)
    return found[code]


def test_register_budget() -> None:
    """setmaxnreg over 64K registers: 2 x 128 x 240 + 128 x 40.  The kernel hung, without an error."""
    correct = kernel_of(WIDE)
    assert check(correct, H200) == []
    found = finding(FAULTS["registers-too-many"].apply(correct), "register-budget")
    assert found.numbers == {"limits": [40, 240, 240], "used": 66560, "registers": 64512}
    assert "128 x 40 + 128 x 240 + 128 x 240 = 66560" in found.text


def test_phase_aliasing_between_two_consumer_groups_on_one_ring() -> None:
    """The later group waited for a parity that the slot's previous use already satisfied, and read stale data."""
    correct = kernel_of(WIDE)
    found = finding(FAULTS["order-missing"].apply(correct), "phase-aliasing")
    assert found.numbers["warp_groups"] == [1, 2]
    assert found.numbers["slots"] == 3
    assert found.numbers["slots_of_a_turn"] == 8
    assert "the parity of a phase that is over" in found.text
    # and it is not only a rule: a run reads what it must not
    small = case("pingpong_grid")
    result = interpret(FAULTS["order-missing"].apply(small.kernel), small.inputs, seed=0)
    assert result.findings


def test_two_waves_of_clusters() -> None:
    """32 clusters of 4 where 30 fit: the second wave took as long as the first."""
    plan = replace(
        WIDE, layout="cooperative", groups_m=2, exchange="cluster", cluster_n=4, store=("global",), operands=("global",)
    )
    correct = kernel_of(plan)
    assert check(correct, H200) == []
    found = finding(with_extent(correct, "cluster", 32), "two-waves")
    assert found.numbers == {"clusters": 32, "cluster_size": 4, "resident": 30, "waves": 2}
    assert "32 clusters of 4 CTAs are launched and h200 runs 30 at once: 2 waves" in found.text


def test_two_waves_hang_with_an_exchange_over_the_grid() -> None:
    found = finding(with_extent(kernel_of(WIDE), "cta", 136), "two-waves")
    assert "it hangs" in found.text


def test_registers_at_entry() -> None:
    """A wgmma of 128 accumulators in a kernel of 512 threads, which start with 128 registers."""
    found = finding(with_extent(kernel_of(WIDE), "warp_group", 4), "registers-at-entry")
    assert found.numbers == {"accumulators": 128, "entry": 128}
    assert "128 + 26 = 154" in found.text


def test_accumulators_in_a_loop_that_is_not_unrolled() -> None:
    assert finding(FAULTS["loop-not-unrolled"].apply(kernel_of(WIDE)), "accumulator-index").where == "acc"


def test_shared_memory_is_counted_before_a_launch() -> None:
    kernel = kernel_of(WIDE)
    small = replace(H200, shared_memory=100 * 1024)
    (found,) = (f for f in check(kernel, small) if f.code == "shared-memory")
    assert found.numbers["dynamic"] > found.numbers["limit"] == 100 * 1024


def test_bytes_that_do_not_land() -> None:
    wrong = argument(on("full", "mbarrier_arrive_expect_tx"), 1, number(lambda size: size + 1024))(kernel_of(WIDE))
    found = finding(wrong, "mbarrier-bytes")
    assert found.numbers["expected"] - found.numbers["landed"] > 0
    assert "the phase never completes" in found.text
