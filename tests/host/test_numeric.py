"""The numeric check."""

from __future__ import annotations

import math

import pytest
import torch

from tvm_comfuse.verify.numeric import ROWS_AT_A_TIME, check, poison, relative_error, same_nonfinite


def reference(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_relative_error_is_the_ratio_of_norms_also_over_several_pieces() -> None:
    ref = reference(2 * ROWS_AT_A_TIME + 5)
    out = ref + 1e-3 * torch.randn_like(ref)
    assert relative_error(out, ref) == pytest.approx(((out - ref).norm() / ref.norm()).item(), rel=1e-12)
    assert relative_error(ref, ref) == 0.0


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 8)])
def test_relative_error_of_any_shape(shape: tuple[int, ...]) -> None:
    ref = torch.ones(shape, dtype=torch.float64)
    assert relative_error(1.5 * ref, ref) == pytest.approx(0.5 if ref.numel() else 0.0)


def test_relative_error_against_zero_and_between_shapes() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(zero + 1, zero) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(zero, torch.zeros(5))


def test_check_allows_a_multiple_of_eagers_error() -> None:
    ref = reference()
    noise = torch.randn_like(ref)
    assert check(ref + 1.9e-3 * noise, ref, ref + 1e-3 * noise).passed
    failed = check(ref + 2.1e-3 * noise, ref, ref + 1e-3 * noise)
    assert not failed.passed
    assert "WRONG" in str(failed)
    assert check(ref + 2.1e-3 * noise, ref, ref + 1e-3 * noise, factor=3.0).passed
    assert check(ref + 1e-3 * noise, ref, 1.0).passed


def test_exact_eager_asks_for_an_exact_result() -> None:
    ref = reference()
    assert check(ref, ref, ref).passed
    assert not check(ref + 1e-12, ref, ref).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_never_passes(bad: float) -> None:
    ref = reference()
    out = ref.clone()
    out[3, 5] = bad
    report = check(out, ref, 1e9)
    assert not report.passed
    assert report.nonfinite == 1
    assert report.worst == (3, 5)
    assert not check(ref, out, 1e9).passed
    assert not check(out, out, 1e9).passed
    assert not check(ref, ref, math.nan).passed


def test_worst_element_is_named() -> None:
    ref = reference(ROWS_AT_A_TIME + 3)
    out = ref.clone()
    out[ROWS_AT_A_TIME + 1, 7] += 5
    report = check(out, ref, 1e-9)
    assert report.worst == (ROWS_AT_A_TIME + 1, 7)
    assert report.worst_value[0] - report.worst_value[1] == pytest.approx(5)
    assert str(list(report.worst)) in str(report)
    assert report.to_json()["worst"] == list(report.worst)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_poison_makes_an_unwritten_element_fail(dtype: torch.dtype) -> None:
    ref = reference()
    out = poison(torch.empty(64, 32, dtype=dtype))
    assert out.isnan().all()
    out[:, :31] = ref[:, :31].to(dtype)
    assert not check(out, ref, 1.0).passed
    with pytest.raises(ValueError, match="no NaN"):
        poison(torch.empty(3, dtype=torch.int32))


def test_same_nonfinite() -> None:
    left = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert same_nonfinite(left, torch.tensor([2.0, math.nan, math.inf, -math.inf]))
    assert not same_nonfinite(left, torch.tensor([math.nan, 1.0, math.inf, -math.inf]))
    assert not same_nonfinite(left, torch.tensor([1.0, math.nan, -math.inf, math.inf]))
