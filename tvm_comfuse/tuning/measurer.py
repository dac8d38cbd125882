"""Measures the candidates of one task: first whether the numbers are right, then the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm.target import Target

from tvm_comfuse.bench.timing import number_of_sets, time_call
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.schedules.spec import analyze
from tvm_comfuse.target import HOPPER_ARCH, is_cuda
from tvm_comfuse.verify.launch import Judge

#: measurements after which the reference kernel is measured again: an H200's clock drifts by some percent a minute
REFERENCE_EVERY = 4
#: repetitions of a measurement on a CPU
CPU_REPEATS = 3
_TAIL = 600
_ROTATING = ("tile", "row")


@dataclass(frozen=True)
class Measured:
    """A measurement.

    us            microseconds of a call, one entry a repetition; none if the kernel failed
    reference_us  of the reference kernel, measured in the same minute; None without one
    reason        in a word what failed: load, fault, wrong, hang or died; "" if nothing did
    failure       the same in words
    error         relative error against float64, of the output that is worst for what it may be; None if not checked
    allowed       what that error may be: twice that of rounding the exact result once, which eager PyTorch never beats
    server        which server of a tracker measured it; "" for this machine
    """

    us: tuple[float, ...] = ()
    reference_us: float | None = None
    reason: str = ""
    failure: str = ""
    error: float | None = None
    allowed: float | None = None
    server: str = ""


class Measurer:
    """A task's inputs and exact results on a device.

    func  the task's canonical function
    rows  M
    """

    def __init__(self, func: Any, rows: int, target: Target, seed: int = 0):
        self._target, self._cuda = target, is_cuda(target)
        self._judge = Judge(func, rows, seed, target)
        self._columns_first = analyze(func).w_layout == "NK"
        self._sets = self._input_sets(func, seed) if self._cuda else []
        self._reference: tuple[str, Callable[..., None]] | None = None
        self._reference_us: float | None = None
        self._since = 0

    def measure(self, library: str, reference: str = "", check: bool = True) -> Measured:
        """Checks and times the "main" of a library.

        reference  the library of a kernel that is known to be right; it is measured now and then
        check      False to leave out the comparison with float64
        """
        stage = "load"
        try:
            kernel = self._load(library)
            stage = "fault"
            error, allowed = None, None
            if check:
                launched = self._judge.run(kernel)
                error, allowed = launched.worst
                if launched.failure:
                    return Measured(reason="wrong", failure=launched.failure, error=error, allowed=allowed)
            reference_us = self._time_reference(reference)
            return Measured(self._time(kernel), reference_us, error=error, allowed=allowed)
        except Exception as problem:  # a fault is this candidate's result; the caller ends the process
            text = f"{type(problem).__name__}: {str(problem).strip()[-_TAIL:]}"
            return Measured(reason=stage, failure=text)

    @property
    def device_name(self) -> str:
        """As the driver calls the device; the processor's name on a CPU."""
        return str(torch.cuda.get_device_name(0)) if self._cuda else str(self._target.attrs.get("mcpu", "cpu"))

    def product_us(self) -> float | None:
        """Microseconds of the bare product by cuBLAS; None on a CPU."""
        if not self._cuda:
            return None
        return time_call(lambda x, w, *_: torch.mm(x, w.t() if self._columns_first else w), self._sets)

    def _load(self, library: str) -> Callable[..., None]:
        with self._target, own_cuda_compiler(str(self._target.attrs.get("arch", HOPPER_ARCH))):
            return tvm.runtime.load_module(library)["main"]  # type: ignore[no-any-return]

    def _time(self, kernel: Callable[..., None]) -> tuple[float, ...]:
        outputs = [guarded.tensor for guarded in self._judge.outputs.values()]
        if self._cuda:
            return (time_call(lambda *inputs: kernel(*inputs, *outputs), self._sets),)
        inputs = [guarded.tensor for guarded in self._judge.inputs.values()]
        times = []
        for _ in range(CPU_REPEATS):
            start = time.perf_counter()
            kernel(*inputs, *outputs)
            times.append((time.perf_counter() - start) * 1e6)
        return tuple(times)

    def _time_reference(self, library: str) -> float | None:
        if not library:
            return None
        if self._reference is None or self._reference[0] != library:
            self._reference, self._reference_us = (library, self._load(library)), None
        if self._reference_us is None or self._since >= REFERENCE_EVERY:
            times = self._time(self._reference[1])
            self._reference_us, self._since = sorted(times)[len(times) // 2], 0
        self._since += 1
        return self._reference_us

    def _input_sets(self, func: Any, seed: int) -> list[Sequence[torch.Tensor]]:
        """Input sets that together exceed the L2 cache; weights and vectors are the same in all, as in a model."""
        kinds = {operand.index: operand.kind for operand in analyze(func).operands}
        first = [guarded.tensor for guarded in self._judge.inputs.values()]
        rotates = [index == 0 or kinds.get(index) in _ROTATING for index in range(len(first))]
        size = sum(value.nbytes for value, moving in zip(first, rotates, strict=True) if moving)
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        sets: list[Sequence[torch.Tensor]] = [first]
        for _ in range(number_of_sets(size, l2_bytes) - 1):
            sets.append(
                [
                    torch.empty_like(value).normal_(generator=generator) if moving else value
                    for value, moving in zip(first, rotates, strict=True)
                ]
            )
        return sets
