"""Seeded faults: what is put into correct kernels is found, and what is not found is listed with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from verified_kernels import NAMES, ROOT, case, cases_for

from tvm_comfuse.schedules.device import H200
from tvm_comfuse.verify.dynamic import explore, interleavings
from tvm_comfuse.verify.faults import FAULTS, detect
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.rewrite import map_exprs, rewrite
from tvm_comfuse.verify.static import check
from tvm_comfuse.verify.static.index import index_of

STATIC = [name for name, fault in FAULTS.items() if fault.detector == "static"]
DYNAMIC = [name for name, fault in FAULTS.items() if fault.detector != "static" and not fault.unseen]
UNSEEN = [name for name, fault in FAULTS.items() if fault.unseen]
LEAST, SHARE = 40, 0.95
#: families that go through every order here; those of test_interpreter.py go through as many
THOROUGH = ("pingpong_cluster", "staged_ragged", "softmax")


def test_enough_faults_and_nearly_all_found() -> None:
    assert len(FAULTS) >= LEAST
    assert len(STATIC) + len(DYNAMIC) >= SHARE * len(FAULTS)


@pytest.mark.parametrize("name", STATIC)
def test_found_by_a_static_check(name: str) -> None:
    cases = cases_for(FAULTS[name].apply, 2)
    assert cases, "no family has a place for it"
    for _, mutated in cases:
        findings = check(mutated, H200)
        assert findings
        assert all(finding.text and finding.where for finding in findings)


@pytest.mark.parametrize("name", DYNAMIC)
def test_found_by_a_run(name: str) -> None:
    ((given, mutated),) = cases_for(FAULTS[name].apply, 1)
    assert detect(mutated, H200, given.inputs, given.references, seeds=(0,))


@pytest.mark.parametrize("name", UNSEEN)
def test_not_found_and_listed_with_the_reason(name: str) -> None:
    """If one of these is found one day, it belongs to the others."""
    ((given, mutated),) = cases_for(FAULTS[name].apply, 1)
    assert detect(mutated, H200, given.inputs, given.references, seeds=(0,)) == []
    assert f"`{name}`" in (ROOT / "docs" / "verify.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_correct_kernels_pass_every_interleaving(name: str) -> None:
    given = case(name)
    orders = list(interleavings(Program(given.kernel), index_of(given.kernel).ctas, (0,)))
    roles = set() if name.startswith("rows_") else {"wg1", "load"}
    assert {order.slow for order in orders} >= {None, "cta0", *roles}
    orders = orders if name in THOROUGH else orders[:2]
    result = explore(given.kernel, given.inputs, given.references, orders)
    assert result.findings == [], result.interleaving
    assert result.runs == len(orders)
    assert all(0 < result.errors[output] <= result.allowed[output] for output in result.errors)


def test_exploration_ends_with_the_first_run_that_finds_something() -> None:
    given = case("cooperative_cluster")
    mutated = FAULTS["mailbox-parity"].apply(given.kernel)
    assert mutated is not None
    orders = list(interleavings(Program(mutated), 2, (0,)))
    result = explore(mutated, given.inputs, given.references, orders)
    assert result.interleaving == orders[result.runs - 1]
    assert str(result.interleaving) == "seed 0, cta0 slow"


def test_wrong_numbers_are_a_finding() -> None:
    given = case("cooperative_warp")
    wrong = [reference * 1.02 for reference in given.references]
    (finding,) = detect(given.kernel, H200, given.inputs, wrong)
    assert finding.code == "numbers"
    assert finding.numbers["error"] == pytest.approx(0.02, rel=0.1)
    nan = [np.full_like(reference, np.nan) for reference in given.references]
    assert [f.code for f in detect(given.kernel, H200, given.inputs, nan)] == ["numbers"]


def test_a_result_that_was_not_computed_has_no_error() -> None:
    given = case("cooperative_warp")
    stuck = FAULTS["arrive-tile_ready-missing-ready"].apply(given.kernel)
    assert stuck is not None
    result = explore(stuck, given.inputs, given.references, list(interleavings(Program(stuck), 1, (0,))))
    assert result.findings
    assert all(np.isnan(error) for error in result.errors.values())


def test_faults_leave_their_kernel_alone() -> None:
    kernel = case("pingpong_multicast").kernel
    before = kernel.script()
    for fault in FAULTS.values():
        mutated = fault.apply(kernel)
        assert mutated is None or not tvm_ffi.structural_equal(mutated, kernel), fault.name
    assert kernel.script() == before


def test_rewriting_keeps_what_it_does_not_change() -> None:
    kernel = case("cooperative_grid").kernel
    assert rewrite(kernel, lambda node, around: None) is None
    assert map_exprs(kernel, lambda node: None, lambda node: True) is None

    def again(node: tirx.Stmt, around: tuple[tirx.Stmt, ...]) -> list[tirx.Stmt] | None:
        return [node] if isinstance(node, tirx.Evaluate) else None

    copy = rewrite(kernel, again)
    assert copy is not None
    tvm.ir.assert_structural_equal(copy, kernel)
    # every expression taken apart and put together again, numbers included
    rebuilt = map_exprs(kernel, lambda node: node if isinstance(node, tirx.IntImm) else None, lambda node: True)
    tvm.ir.assert_structural_equal(rebuilt, kernel)
    given = case("cooperative_grid")
    assert (
        explore(rebuilt, given.inputs, given.references, list(interleavings(Program(rebuilt), 0, (3,)))[:1]).findings
        == []
    )
