"""Measures the candidates of one task: first whether the numbers are right, then the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import tvm
from tvm.target import Target

from tvm_comfuse.bench.timing import Captured, capture, median, number_of_sets
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.target import HOPPER_ARCH, is_cuda
from tvm_comfuse.tuning.chain import Chain
from tvm_comfuse.verify.launch import Judge

#: the reference kernel is timed before and after each candidate.  At the power limit a GPU's clock changes by 10 % from one
#: moment to the next; if the two times differ by more than this, all is measured again, so often at most
STEADY, TRIES = 0.02, 3
#: seconds of load before a kernel is timed.  From K = 2048 on the board is at its power limit, where plans of less energy win;
#: on a board that has rested one of fewer cycles does: 102 against 99 us there were 111 against 118 under load
LOAD_S = 0.2
#: repetitions of a measurement on a CPU
CPU_REPEATS = 3
_TAIL = 600
_ROTATING = ("tile", "row")


@dataclass(frozen=True)
class Measured:
    """A measurement.

    us            microseconds of a call, one entry a repetition; none if the kernel failed
    reference_us  of the reference kernel, the mean of its times right before and after; None without one
    reason        in a word what failed: load, fault, wrong, hang or died; "" if nothing did
    failure       the same in words
    error         relative error against float64, of the output that is worst for what it may be; None if not checked
    allowed       what that error may be, see verify.launch.Judge
    server        which server of a tracker measured it; "" for this machine
    """

    us: tuple[float, ...] = ()
    reference_us: float | None = None
    reason: str = ""
    failure: str = ""
    error: float | None = None
    allowed: float | None = None
    server: str = ""


class Timer(Protocol):
    """Times one kernel."""

    def load(self, seconds: float) -> None:
        """Keeps the device at work for so long."""

    def times(self) -> tuple[float, ...]:
        """Microseconds of a call, one entry a repetition."""


@dataclass(frozen=True)
class GpuTimer:
    """A CUDA graph of calls, see bench.timing."""

    captured: Captured

    def load(self, seconds: float) -> None:
        """Replays it."""
        self.captured.load(seconds)

    def times(self) -> tuple[float, ...]:
        """One entry."""
        return (self.captured.measure(),)


@dataclass(frozen=True)
class CpuTimer:
    """Calls one after the other."""

    call: Callable[[], None]

    def load(self, seconds: float) -> None:
        """Nothing: a CPU's kernels are not compared with each other."""

    def times(self) -> tuple[float, ...]:
        """CPU_REPEATS entries."""
        found = []
        for _ in range(CPU_REPEATS):
            start = time.perf_counter()
            self.call()
            found.append((time.perf_counter() - start) * 1e6)
        return tuple(found)


class Measurer:
    """A task's inputs and exact results on a device.

    func   the task's canonical function
    rows   M
    chain  its split form, if that is measured too
    """

    def __init__(self, func: Any, rows: int, target: Target, seed: int = 0, chain: Chain | None = None):
        self._target, self._cuda = target, is_cuda(target)
        self._chain = chain
        self._judge = Judge(func, rows, seed, target, chain.between if chain is not None else "")
        self._columns_first = analyze(func).w_layout == "NK"
        self._sets = self._input_sets(func, seed) if self._cuda else []
        self._reference: tuple[str, Callable[..., None]] | None = None

    def measure(self, library: str, reference: str = "", check: bool = True, chained: bool = False) -> Measured:
        """Checks and times the "main" of a library, or the chain's kernels.

        reference  the library of a kernel that is known to be right, to be timed too; "" for none
        check      False to leave out the comparison with float64
        chained    whether the library has the kernels of the chain
        """
        stage = "load"
        try:
            kernel = self._load(library, chained)
            stage = "fault"
            error, allowed = None, None
            if check:
                launched = self._judge.run(kernel, split=chained)
                error, allowed = launched.worst
                if launched.failure:
                    return Measured(reason="wrong", failure=launched.failure, error=error, allowed=allowed)
            us, reference_us = self._time_beside(kernel, reference)
            return Measured(us, reference_us, error=error, allowed=allowed)
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
        captured = capture(lambda x, w, *_: torch.mm(x, w.t() if self._columns_first else w), self._sets)
        try:
            captured.load(LOAD_S)
            return captured.measure()
        finally:
            captured.release()

    def _load(self, library: str, chained: bool = False) -> Callable[..., None]:
        with self._target, own_cuda_compiler(str(self._target.attrs.get("arch", HOPPER_ARCH))):
            module = tvm.runtime.load_module(library)
            return self._chain.bind(module) if chained and self._chain is not None else module["main"]

    @contextmanager
    def _timer(self, kernel: Callable[..., None]) -> Iterator[Timer]:
        """What times a kernel on this device."""
        outputs = [guarded.tensor for guarded in self._judge.outputs.values()]
        if not self._cuda:
            inputs = [guarded.tensor for guarded in self._judge.inputs.values()]
            yield CpuTimer(lambda: kernel(*inputs, *outputs))
            return
        captured = capture(lambda *inputs: kernel(*inputs, *outputs), self._sets)
        try:
            yield GpuTimer(captured)
        finally:
            captured.release()

    def _time_beside(self, kernel: Callable[..., None], library: str) -> tuple[tuple[float, ...], float | None]:
        """Times of a kernel, and that of the reference kernel; of several tries the one in which the latter was steadiest."""
        with self._timer(kernel) as own:
            if not library:
                own.load(LOAD_S)
                return own.times(), None
            if self._reference is None or self._reference[0] != library:
                self._reference = (library, self._load(library))
            with self._timer(self._reference[1]) as beside:
                beside.load(LOAD_S)
                return self._in_between(own, beside)

    def _in_between(self, own: Timer, beside: Timer) -> tuple[tuple[float, ...], float]:
        found = []
        for _ in range(TRIES if self._cuda else 1):
            before, us, after = beside.times(), own.times(), beside.times()
            sides = median(before), median(after)
            found.append((max(sides) / min(sides) - 1.0, us, sum(sides) / 2))
            if found[-1][0] <= STEADY:
                break
        _, us, reference_us = min(found)
        return us, reference_us

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
