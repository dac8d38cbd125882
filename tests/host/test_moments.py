"""Moments in one pass: right around zero, and right far from it by the second pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from verified_kernels import case

from tvm_comfuse.profile.timeline import decode
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.instrument import instrumented
from tvm_comfuse.verify.dynamic import compare
from tvm_comfuse.verify.families import FAMILIES
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.reference import reference

NAMES = ["cooperative_cta", "cooperative_warp", "quads_grid", "deferred_grid", "packed_grid", "global_ragged"]
#: mean of the residual's rows, in units of its spread; bfloat16 has it to an eighth
FAR = 40.0
PASS = "second pass"


@cache
def stamped(name: str) -> tuple[Any, Any]:
    (family,) = (family for family in FAMILIES if family.name == name)
    return instrumented(family.cluster(parse_target("h200")), family.m)


def moved(name: str, by: float, rows: slice) -> tuple[list[Any], list[Any]]:
    """Inputs of a family without means, the residual's rows moved from there; and the reference."""
    given = case(name)
    inputs = [(each.astype(np.float32) - each.astype(np.float32).mean()).astype(each.dtype) for each in given.inputs]
    (residual,) = (n for n, each in enumerate(inputs) if n > 1 and each.ndim == 2)
    inputs[residual][rows] = (inputs[residual][rows].astype(np.float32) + by).astype(inputs[residual].dtype)
    return inputs, reference(given.func, inputs)


def second_passes(name: str, inputs: list[Any], expected: list[Any]) -> list[int]:
    """Steps of the first MMA warp group's first warp in which a kernel with stamps makes the second pass, for each CTA."""
    kernel, layout = stamped(name)
    result = Program(kernel).run(inputs)
    assert not result.findings, result.findings[0]
    assert compare(result.outputs, expected) == []
    assert result.stamps is not None
    return [sum(span.kind == PASS for span in cta.spans) for cta in decode(result.stamps, layout)]


@pytest.mark.parametrize("name", NAMES)
def test_rows_around_zero_take_one_pass(name: str) -> None:
    assert sum(second_passes(name, *moved(name, 0.0, slice(None)))) == 0


@pytest.mark.parametrize("name", NAMES)
def test_rows_far_from_zero_take_two_and_are_as_exact(name: str) -> None:
    """Squares about zero would lose eleven bits of the variance."""
    assert min(second_passes(name, *moved(name, FAR, slice(None)))) > 0


@pytest.mark.parametrize("name", NAMES)
def test_one_row_is_enough_for_its_warp_and_costs_no_other(name: str) -> None:
    """The stamps are of each group's first warp, which has rows 0 to 15 of the group's tile."""
    here = sum(second_passes(name, *moved(name, FAR, slice(3, 4))))
    other_warp = sum(second_passes(name, *moved(name, FAR, slice(16, 17))))
    assert here > other_warp == 0
