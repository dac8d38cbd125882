"""The first launches of kernels, in a child process with a time limit.

A kernel that hangs or faults takes its process along; what is left is a report with the plan and the emitted source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tvm

from tvm_comfuse.schedules.rows import kernel_plan_of
from tvm_comfuse.worker import Limits, Worker, first_launch

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

__all__ = ["FirstLaunch", "FirstLaunches", "Limits", "first_launches"]
CHILD = (sys.executable, "-m", "tvm_comfuse.verify.gpu_child")


@dataclass
class FirstLaunch:
    """One kernel's first launch.

    failure  what went wrong: a hang, a fault, wrong numbers, bytes written beside a tensor; "" if nothing did
    errors   relative error of each output against float64
    plan     of the kernel
    source   CUDA source, if it was compiled for a GPU
    """

    name: str
    rows: int
    failure: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def report(self) -> str:
        """Everything a person needs who was not there."""
        verdict = f"FAILED: {self.failure}" if self.failure else "ok"
        head = f"{self.name}, {self.rows} rows: {verdict}\nplan: {self.plan}"
        return f"{head}\n{self.source}" if self.failure and self.source else head


class FirstLaunches:
    """A context manager; one child for all kernels until one of them fails, then a new one."""

    def __init__(self, target: str = "cuda", limits: Limits | None = None, command: Sequence[str] = CHILD):
        self._target, self._limits = target, limits or Limits(launch=30.0)
        self._worker = Worker(command)

    def __enter__(self) -> FirstLaunches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def check(self, name: str, func: PrimFunc, rows: int, seed: int = 0) -> FirstLaunch:
        """Launches a scheduled cluster with `rows` rows.  Never raises for what the child does."""
        result = FirstLaunch(name, rows, plan=kernel_plan_of(func).to_dict())

        def built(message: dict[str, Any]) -> None:
            result.source = message["source"]

        request = {"func": tvm.ir.save_json(func), "rows": rows, "seed": seed, "target": self._target}
        message, result.failure = first_launch(self._worker, self._limits, request, "end after its launch", built)
        if message is not None:
            result.failure, result.errors = message["failure"], message.get("errors", {})
        if result.failure:
            # a faulting kernel leaves its process without a usable GPU, so never go on with the same one
            self._worker.end()
        return result


def first_launches(model: Any, target: str | dict[str, Any] | Target = "cuda") -> Iterator[FirstLaunch]:
    """Each kernel of a model: its twin, and only if that is right the kernel at its own size.

    The errors are those of ``tvm_comfuse.compile``.
    """
    from tvm_comfuse.build import to_module
    from tvm_comfuse.errors import TargetError
    from tvm_comfuse.fusion import fuse
    from tvm_comfuse.schedules.device import device_of
    from tvm_comfuse.schedules.rows import spec_of
    from tvm_comfuse.target import name_of, parse_target
    from tvm_comfuse.tir_passes.lower import is_cluster
    from tvm_comfuse.verify.twin import twin

    parsed = parse_target(target)
    device = device_of(parsed)
    if device is None:
        raise TargetError("a Hopper GPU", name_of(parsed), "run it on a machine that has one")
    fused, _ = fuse(to_module(model), parsed)
    with FirstLaunches(name_of(parsed)) as launches:
        for gvar, func in fused.functions_items():
            if is_cluster(func):
                small = twin(func, device)
                first = launches.check(f"{gvar.name_hint}_twin", small.func, small.rows)
                yield first
                if not first.failure:
                    yield launches.check(gvar.name_hint, func, spec_of(func).m or small.rows)
