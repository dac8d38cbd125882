"""Our contender: the kernel of a row's cluster, or the two of its split form, called directly with PyTorch tensors.

The Relax virtual machine is left out of the way: its work on the host would be hidden by CUDA graphs anyhow, and the
direct call writes to a given output, which can be poisoned before the call.  TVM's call takes PyTorch's current stream
from its CUDA arguments, so it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm.target import Target

from tvm_comfuse.bench.chain import kernel_calls
from tvm_comfuse.bench.ops import OPS, torch_dtype
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.target import HOPPER_ARCH, is_cuda


@dataclass(frozen=True)
class Records:
    """Which tuning records give plans, and which form a row gets.

    folder    of a database, None for none
    pretuned  whether those of the package count
    form      as in tvm_comfuse.compile: auto, fused or split
    """

    folder: str | None = None
    pretuned: bool = True
    form: str = "auto"


PACKAGE_RECORDS = Records()


@dataclass(frozen=True)
class OurKernel:
    """A compiled row.

    run   called with the inputs and a preallocated output [M, N]
    plan  the plan as plain JSON values; of a split form {"gemm", "rows"}
    via   "kernel": the fused function alone; "split": two functions
    """

    run: Callable[[list[torch.Tensor], torch.Tensor], None]
    plan: dict[str, Any]
    via: str = "kernel"


def compile_row(row: Row, target: Target, records: Records = PACKAGE_RECORDS) -> OurKernel | Refusal:
    """Find, schedule and compile the cluster of a row, with a plan of these tuning records if one answers.

    A Refusal says why the row is neither one kernel nor the two of a split form.  On an LLVM target the kernel is the
    CPU's, of the clusters and plans of an H200.  Raises ComfuseError for what should have worked.
    """
    from tvm_comfuse.frontend import from_relax
    from tvm_comfuse.fusion import fuse

    module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
    fused, explanation = fuse(
        module, target, tuning_records=records.folder, use_pretuned=records.pretuned, form=records.form
    )
    matmul = explanation.matmuls[0]
    split = matmul.forms is not None and matmul.forms.chosen == "split"
    if matmul.plan is None and not split:
        return matmul.reason
    calls = kernel_calls(fused)
    if calls is None:
        return Refusal("part", f"only {' '.join(matmul.ops)} became kernels: {matmul.reason}")
    kernels = [compile_function(fused[call.name], target) for call in calls]
    between: dict[str, list[torch.Tensor]] = {}

    def run(inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        device = str(out.device)
        if device not in between:
            between[device] = [call.new_output(device) for call in calls[:-1]]
        values = [*inputs, *between[device], out]
        for number, (kernel, call) in enumerate(zip(kernels, calls, strict=True)):
            kernel(*[values[index] for index in call.values], values[len(inputs) + number])

    if matmul.plan is not None:
        return OurKernel(run, matmul.plan.to_dict())
    assert matmul.forms is not None
    return OurKernel(run, matmul.forms.to_dict()["split"], "split")


def compile_function(func: Any, target: Target) -> Callable[..., None]:
    """Compile one scheduled function; the result is called with its parameters in order, outputs last.

    Raises what TVM and the CUDA compiler raise.
    """
    # the device code may be compiled at the first look at it
    with target, own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH))):
        return compile_executable(func, target)["main"]  # type: ignore[no-any-return]


def compile_executable(func: Any, target: Target) -> Any:
    """As compile_function, but gives TVM's executable, with the function as "main"."""
    return compile_module(named_main(func), target)


def named_main(func: Any) -> tvm.IRModule:
    """A module with a function alone, as "main"."""
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


def compile_module(module: tvm.IRModule, target: Target) -> Any:
    """TVM's executable of scheduled functions.  Raises what TVM and the CUDA compiler raise."""
    import tvm_comfuse

    if is_cuda(target):
        tvm_comfuse._autoload()
    pipeline = "comfuse" if is_cuda(target) else "default"
    with target, own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH))):
        return tvm.compile(module, target=target, tir_pipeline=pipeline)


def new_output(row: Row, device: str) -> torch.Tensor:
    """An uninitialised output [M, N] of a row."""
    return torch.empty((row.M, row.N), dtype=torch_dtype(row.dtype), device=device)
