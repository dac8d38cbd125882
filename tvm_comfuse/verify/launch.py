"""One careful launch: outputs poisoned and between guard bands, inputs between guard bands and compared afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import tvm
from tvm.target import Target

from tvm_comfuse.schedules.rows import spec_of
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.target import is_cuda
from tvm_comfuse.verify.dynamic import FACTOR, FLOAT32_ERROR, allowed, error, numpy_dtype, random_inputs
from tvm_comfuse.verify.inexact import Inexact, of_model, of_rounded
from tvm_comfuse.verify.reference import reference

#: bytes of a guard band on either side of a tensor; a multiple of what TMA wants of addresses
GUARD_BYTES = 4096
#: what guard bands hold: as bf16, f16 and f32 a number that no kernel writes by chance in a row
PATTERN = 0x5A


@dataclass
class Launch:
    """What a launch left.

    errors, allowed  by output: relative error against float64, and the most it may be
    overrun          tensors beside which something was written
    changed          inputs that are not what they were
    """

    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    overrun: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """What is wrong, in words; "" if nothing is."""
        # written so that NaN, an element that was never stored, is wrong
        off = [
            f"error of {n} is {e:.3g}, allowed {self.allowed[n]:.3g}"
            for n, e in self.errors.items()
            if not e <= self.allowed[n]
        ]
        over = [f"bytes beside {name} were written" for name in self.overrun]
        return "; ".join([*off, *over, *(f"input {name} was written" for name in self.changed)])

    @property
    def worst(self) -> tuple[float, float]:
        """Error and allowed error of the output that is worst for what it may be; a NaN is worse than any number."""
        ratios = {name: error / self.allowed[name] for name, error in self.errors.items()}
        name = max(ratios, key=lambda name: float("inf") if np.isnan(ratios[name]) else ratios[name])
        return self.errors[name], self.allowed[name]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return asdict(self)


class Guarded:
    """A tensor between two guard bands in one allocation."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str):
        size = int(np.prod(shape)) * dtype.itemsize
        # the band behind begins right at the last byte, so that one element too many is seen
        self.memory = torch.full((size + 2 * GUARD_BYTES,), PATTERN, dtype=torch.uint8, device=device)
        self.inside = self.memory[GUARD_BYTES : GUARD_BYTES + size]
        self.tensor = self.inside.view(dtype).view(list(shape))

    def refill(self) -> None:
        """Both bands as they were made."""
        size = self.inside.numel()
        self.memory[:GUARD_BYTES] = PATTERN
        self.memory[GUARD_BYTES + size :] = PATTERN

    @property
    def intact(self) -> bool:
        """Whether both bands hold what they held."""
        size = self.inside.numel()
        bands = torch.cat([self.memory[:GUARD_BYTES], self.memory[GUARD_BYTES + size :]])
        return bool((bands == PATTERN).all().item())


def launch(func: Any, kernel: Callable[..., None], rows: int, seed: int, target: Target) -> Launch:
    """Runs a compiled cluster once on random inputs and looks at everything it may have touched; see Judge."""
    return Judge(func, rows, seed, target).run(kernel)


class Judge:
    """Random inputs of a cluster and what their exact results are, made once for any number of kernels.

    func     its expressions give the float64 reference
    between  the block whose value is rounded between the kernels of a split form; "" if there is none

    An output may have twice the error of rounding the exact result, or twice what it costs to round the product where the model
    does; eager PyTorch's error is neither less than the one nor less than the other.  A split form may have twice what it costs
    to round the value between, which the model rounds as well.
    """

    def __init__(self, func: Any, rows: int, seed: int, target: Target, between: str = ""):
        self._device = "cuda" if is_cuda(target) else "cpu"
        spec = spec_of(func)
        arrays = random_inputs(func, rows, len(spec.outputs), seed)
        self.inputs = {
            str(p.name): _guarded(array, self._device) for p, array in zip(func.params, arrays, strict=False)
        }
        self._before = {name: guarded.inside.clone() for name, guarded in self.inputs.items()}
        self.outputs: dict[str, Guarded] = {}
        for output in spec.outputs:
            param = func.params[output.index]
            shape = [int(e) if isinstance(e, tvm.tirx.IntImm) else rows for e in param.shape]
            self.outputs[str(param.name)] = Guarded(shape, getattr(torch, output.dtype), self._device)
        exact = dict(zip(self.outputs, reference(func, arrays), strict=True))
        least = {
            name: allowed(_rounded(expected, self.outputs[name].tensor.dtype), expected)
            for name, expected in exact.items()
        }

        def besides(inexact: Inexact) -> dict[str, float]:
            rounded = zip(exact.items(), reference(func, arrays, inexact), strict=True)
            return {
                name: max(least[name], FACTOR * error(values, expected) + FLOAT32_ERROR)
                for (name, expected), values in rounded
            }

        self._allowed = self._allowed_split = least
        if isinstance(spec, ClusterSpec):
            self._allowed = besides(of_model(spec))
            self._allowed_split = besides(of_rounded(between, spec)) if between else self._allowed
        # compared where the outputs are: fetching them would take longer than the launch
        self._exact = {name: torch.from_numpy(expected).to(self._device) for name, expected in exact.items()}

    def run(self, kernel: Callable[..., None], split: bool = False) -> Launch:
        """One launch, with outputs poisoned before it.

        kernel  called with the function's parameters in order
        split   whether it is the split form
        Raises what the launch raises.
        """
        self._reset()
        kernel(*(guarded.tensor for guarded in [*self.inputs.values(), *self.outputs.values()]))
        if self._device == "cuda":
            torch.cuda.synchronize()
        result = Launch(allowed=dict(self._allowed_split if split else self._allowed))
        for name, guarded in self.outputs.items():
            result.errors[name] = _error(guarded.tensor, self._exact[name])
        result.overrun = [name for name, g in (self.inputs | self.outputs).items() if not g.intact]
        result.changed = [name for name, g in self.inputs.items() if not torch.equal(g.inside, self._before[name])]
        return result

    def _reset(self) -> None:
        """What the kernel before may have spoilt."""
        for name, guarded in (self.inputs | self.outputs).items():
            guarded.refill()
            if name in self._before:
                guarded.inside.copy_(self._before[name])
        for guarded in self.outputs.values():
            guarded.tensor.fill_(float("nan"))


def _guarded(array: np.ndarray, device: str) -> Guarded:
    half = str(array.dtype) == "bfloat16"
    source = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(array)
    guarded = Guarded(source.shape, source.dtype, device)
    guarded.tensor.copy_(source)
    return guarded


def _error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """As dynamic.error, of tensors on one device."""
    wide, size = output.to(torch.float64), float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(wide - exact)) / size if size else float(wide.abs().max())


def _rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The exact result rounded once to an output's dtype."""
    return values.astype(numpy_dtype(str(dtype).removeprefix("torch.")))
