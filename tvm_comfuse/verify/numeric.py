"""Is a result right?  Relative error against float64, judged by the error of eager PyTorch in the same dtype.

A kernel that forgets to write an element leaves whatever was there before, which may be the right answer of an earlier
run.  So outputs are filled with NaN before a kernel runs (`poison`), and NaN never passes a check.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

#: the error a kernel may have, as a multiple of the error of eager PyTorch
DEFAULT_FACTOR = 2.0
#: rows compared at a time: a float64 copy of 16384 x 8192 at once would take 1 GiB
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class NumericReport:
    """What `check` found.

    error        ||out - ref|| / ||ref|| in float64 (NaN if anything is not finite)
    eager_error  the same for eager PyTorch
    factor       error may be at most factor * eager_error
    nonfinite    elements of out that are NaN or infinite
    worst        index of the element with the largest absolute deviation, () for an empty tensor
    worst_value  out and ref at that index
    passed       the verdict
    """

    error: float
    eager_error: float
    factor: float
    nonfinite: int
    worst: tuple[int, ...]
    worst_value: tuple[float, float]
    passed: bool

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "WRONG"
        text = f"{verdict}: error {self.error:.3g}, eager {self.eager_error:.3g}, allowed {self.factor:g}x"
        if self.nonfinite:
            text += f"; {self.nonfinite} elements are not finite"
        if not self.passed and self.worst:
            text += f"; worst at {list(self.worst)}: {self.worst_value[0]:.6g} instead of {self.worst_value[1]:.6g}"
        return text

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        values = asdict(self)
        return {**values, "worst": list(self.worst), "worst_value": list(self.worst_value)}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point tensor with NaN, in place, and return it.

    Raises ValueError for dtypes that have no NaN.
    """
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{tensor.dtype} has no NaN to poison with")
    return tensor.fill_(float("nan"))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN as soon as one element of either is not finite.

    Of an all-zero reference the error is 0 if out is zero too and infinite otherwise; of an empty one it is 0.
    Raises ValueError if the shapes differ.
    """
    if out.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(out.shape)} and {tuple(reference.shape)}")
    difference = torch.zeros((), dtype=torch.float64, device=reference.device)
    size = torch.zeros_like(difference)
    for piece, ref in _pieces(out, reference):
        difference += (piece - ref).square().sum()
        size += ref.square().sum()
    top, bottom = difference.sqrt().item(), size.sqrt().item()
    # inf - inf is NaN, but a finite out against an infinite reference gives inf / inf: both end as NaN
    if bottom == 0.0 and top == top:
        return 0.0 if top == 0.0 else float("inf")
    return top / bottom if top != float("inf") and bottom != float("inf") else float("nan")


def check(
    out: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor | float, factor: float = DEFAULT_FACTOR
) -> NumericReport:
    """Judge `out` against the float64 `reference` by the error of `eager` (a tensor, or its error if known already).

    Passes if error <= factor * eager_error.  NaN and infinities in out or in the reference never pass: for inputs that
    are not finite use `same_nonfinite`.  Raises ValueError if shapes differ.
    """
    error = relative_error(out, reference)
    eager_error = eager if isinstance(eager, float) else relative_error(eager, reference)
    nonfinite = int((~torch.isfinite(out)).sum().item())
    worst, value = _worst(out, reference)
    # written so that a NaN on either side is a failure
    passed = nonfinite == 0 and error <= factor * eager_error
    return NumericReport(error, eager_error, factor, nonfinite, worst, value, bool(passed))


def same_nonfinite(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether NaN, +inf and -inf stand at the same places in both tensors.

    Raises ValueError if shapes differ.
    """
    if out.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(out.shape)} and {tuple(expected.shape)}")
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(torch.equal(kind(out), kind(expected)) for kind in kinds)


def _pieces(out: torch.Tensor, reference: torch.Tensor) -> Any:
    flat, ref = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 and t.numel() else t for t in (out, reference))
    for start in range(0, flat.shape[0] if flat.dim() else 0, ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        yield flat[rows].double(), ref[rows].double()
    if not flat.dim():
        yield flat.double(), ref.double()


def _worst(out: torch.Tensor, reference: torch.Tensor) -> tuple[tuple[int, ...], tuple[float, float]]:
    if not out.numel():
        return (), (0.0, 0.0)
    best, where, offset = -1.0, 0, 0
    for piece, ref in _pieces(out, reference):
        # a NaN is worse than any finite deviation
        deviation = (piece - ref).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).flatten()
        position = int(deviation.argmax().item())
        if deviation[position].item() > best:
            best, where = deviation[position].item(), offset + position
        offset += deviation.numel()
    index, rest = [], where
    for extent in reversed(out.shape):
        index.append(rest % extent)
        rest //= extent
    place = tuple(reversed(index))
    return place, (float(out[place].item()), float(reference[place].item()))
