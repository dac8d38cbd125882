"""The instrumented kernel on a GPU, under the load that the bench times kernels with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch

from tvm_comfuse.bench.ours import compile_executable, compile_function
from tvm_comfuse.bench.report import commit, device_name, environment
from tvm_comfuse.bench.timing import time_call
from tvm_comfuse.cuda import compile_cubin, sources
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.errors import TargetError
from tvm_comfuse.profile.report import Profile, ProfileError, kept
from tvm_comfuse.profile.subject import Subject
from tvm_comfuse.profile.summary import summarize
from tvm_comfuse.profile.timeline import decode
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.target import HOPPER_ARCH
from tvm_comfuse.tir_passes.instrument import instrumented
from tvm_comfuse.tir_passes.lower import verify_or_raise

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

HOPPER = (9, 0)


def require_gpu() -> None:
    """Raises TargetError without a GPU that kernels run on."""
    hint = "run it on an H100 or H200; --from FILE redraws a profile anywhere"
    if not torch.cuda.is_available():
        raise TargetError("a Hopper GPU to profile on", "no CUDA GPU that PyTorch can use", hint)
    if torch.cuda.get_device_capability() != HOPPER:
        raise TargetError("a Hopper GPU to profile on", torch.cuda.get_device_name(), hint)


def measure(subject: Subject, target: Target) -> Profile:
    """Times the kernel without and with stamps, and reads those of the last launch under load.

    Raises TargetError without a GPU, ProfileError if the stamps change a result, and what compilers and launches raise.
    """
    require_gpu()
    with target:
        kernel, layout = instrumented(subject.func, subject.rows)
        verify_or_raise(kernel)
    plain, (stamped, spilled) = compile_function(subject.func, target), _compile_stamped(kernel, target)
    sets = subject.inputs(torch.cuda.get_device_properties(0).L2_cache_size)
    expected, outputs = subject.outputs(), subject.outputs()
    stamps = torch.zeros(layout.shape, dtype=torch.int32, device="cuda")
    us = time_call(lambda *inputs: plain(*inputs, *expected), sets)
    us_instrumented = time_call(lambda *inputs: stamped(*inputs, *outputs, stamps), sets)
    timelines = decode(stamps.cpu().numpy(), layout)
    plain(*sets[0], *expected)
    stamped(*sets[0], *outputs, stamps)
    torch.cuda.synchronize()
    if not all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True)):
        raise ProfileError("the results of the kernel without stamps", "others", "report this: stamps change nothing")
    return Profile(
        device=device_name(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit(),
        versions=environment(),
        name=subject.name,
        shape=subject.shape,
        plan=plan_of(subject.func).to_dict(),
        us=us,
        us_instrumented=us_instrumented,
        spilled=spilled,
        left_out=layout.left_out,
        timelines=kept(timelines),
        summary=summarize(timelines),
    )


def _compile_stamped(kernel: PrimFunc, target: Target) -> tuple[Callable[..., None], int]:
    """The instrumented kernel, and the bytes it spills."""
    arch = str(target.attrs.get("arch", HOPPER_ARCH))
    with target, own_cuda_compiler(arch):
        executable = compile_executable(kernel, target)
        # found in the cache: it is the source that was compiled
        spilled = sum(compile_cubin(source, arch).spill_stores for source in sources(executable))
        return executable["main"], spilled
