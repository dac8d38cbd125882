"""What is computed less exactly than float32 arithmetic does, in a form that verify.reference takes.

The difference to the exact reference is the error that a plan's choices bring; rounding in float32 comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.split import last_round, parking_offset, tail_blocks

Array = np.ndarray
#: relative error of tanh.approx (PTX ISA)
TANH_ERROR = 2.0**-11
#: spreads the bits of a number (Knuth, The Art of Computer Programming, 6.4)
HASH = 2654435761


@dataclass(frozen=True)
class Parking:
    """A carried value that waits for some blocks, in half precision, less an offset of each row and part of it: for a deferred
    tail, or for the memory warp group.

    block    that makes the carried value
    readers  blocks that find it so
    merge    the kind of the pair of reductions of the carried value whose first gives the offset; None: there is none
    """

    block: str
    readers: frozenset[str]
    merge: str | None
    tile_n: int
    dtype: str

    def kept(self, value: Array) -> Array:
        """`value` [M, N] as the readers find it."""
        from tvm_comfuse.verify.dynamic import numpy_dtype

        kept = np.empty_like(value)
        for start in range(0, value.shape[1], self.tile_n):
            part = np.s_[:, start : start + self.tile_n]
            offset: Any = 0.0
            if self.merge is not None:
                offset = (np.mean if self.merge == "moments" else np.max)(value[part], axis=1, keepdims=True)
                offset = np.where(np.isfinite(offset), offset, 0.0)
                if self.merge == "moments":
                    # rows around zero are parked as they are
                    spread = np.var(value[part], axis=1, keepdims=True)
                    offset = np.where(offset**2 <= spread, 0.0, offset)
            kept[part] = (value[part] - offset).astype(numpy_dtype(self.dtype)).astype(np.float64) + offset
        return kept


@dataclass(frozen=True)
class Packing:
    """Blocks whose sums and products are each rounded to half precision."""

    blocks: frozenset[str] = frozenset()
    dtype: str = ""

    def rounded(self, value: Any) -> Any:
        """An intermediate result, if it differs from column to column."""
        from tvm_comfuse.verify.dynamic import numpy_dtype

        if np.ndim(value) < 2 or np.shape(value)[1] == 1:
            return value
        return np.asarray(value).astype(numpy_dtype(self.dtype)).astype(np.float64)


@dataclass(frozen=True)
class Inexact:
    """calls: functions in the place of exact ones, by name; parkings: a later one finds what an earlier one has kept."""

    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parkings: tuple[Parking, ...] = ()
    packing: Packing = field(default_factory=Packing)


def of_plan(plan: Plan, spec: ClusterSpec) -> Inexact:
    """What a plan asks for: fast_math, defer, packed_tail, and the memory layout."""
    return Inexact(
        {"tanh": _coarse_tanh} if plan.fast_math else {},
        (*_handing_over(plan, spec), *_parking(plan, spec)),
        Packing(tail_blocks(spec), spec.x_dtype) if plan.packed_tail else Packing(),
    )


def of_model(spec: ClusterSpec) -> Inexact:
    """What the model itself rounds: its product, unless that is in float32."""
    return Inexact() if spec.wide_product else of_rounded("gemm", spec)


def of_rounded(block: str, spec: ClusterSpec) -> Inexact:
    """The value of a block that makes a carried value, or of ``gemm``, in the dtype of x for whoever reads it."""
    readers = frozenset(name for blocks in spec.passes for name in blocks) - {block}
    return Inexact(parkings=(Parking(block, readers, None, spec.n, spec.x_dtype),))


def of_float32(blocks: Iterable[str]) -> Inexact:
    """What float32 brings: where a model subtracts numbers that are nearly the same, more than a rounding of the result."""
    return Inexact(packing=Packing(frozenset(blocks), "float32"))


def of_llvm() -> Inexact:
    """TVM computes tanh x for LLVM as (1 - t) / (1 + t) with t = exp(-2 x), which cancels for small x: its relative error is
    that of t divided by x."""
    return Inexact({"tanh": _cancelling_tanh})


def _parking(plan: Plan, spec: ClusterSpec) -> Iterator[Parking]:
    if not plan.defer:
        return
    carried = ["gemm", *(stage.carried for stage in spec.stages[: last_round(spec) + 1] if stage.carried)]
    first = parking_offset(spec)
    merge = next((each.merge for each in spec.reductions if first and each.merge_with == first.block), None)
    yield Parking(carried[-1], tail_blocks(spec), merge, plan.tile_n, spec.x_dtype)


def _handing_over(plan: Plan, spec: ClusterSpec) -> Iterator[Parking]:
    if plan.hands_over:
        every = frozenset(block for blocks in spec.passes for block in blocks)
        yield Parking("gemm", every, None, plan.tile_n, spec.x_dtype)


def _coarse_tanh(value: Array) -> Array:
    """With the largest error, of another sign for about every fourth value, by a hash of its bits.

    Neither a sum over a row nor what differs between its values is spared; and two functions of one element, which a model
    may divide by each other, do not err the same way.
    """
    bits = np.asarray(value, np.float32).view(np.uint32)
    odd = (bits * np.uint32(HASH)) >> np.uint32(30) == 0
    return np.tanh(value) * (1.0 + np.where(odd, -TANH_ERROR, TANH_ERROR))


def _cancelling_tanh(value: Array) -> Array:
    power = np.exp(-2.0 * np.abs(value)).astype(np.float32).astype(np.float64)
    return np.sign(value) * (1.0 - power) / (1.0 + power)
