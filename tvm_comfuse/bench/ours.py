"""Our contender: the one kernel of a row's cluster, called directly with PyTorch tensors.

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
from tvm import relax
from tvm.target import Target

from tvm_comfuse.bench.ops import OPS, torch_dtype
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.target import HOPPER_ARCH, is_cuda


@dataclass(frozen=True)
class Records:
    """Which tuning records give plans.

    folder    of a database, None for none
    pretuned  whether those of the package count
    """

    folder: str | None = None
    pretuned: bool = True


PACKAGE_RECORDS = Records()


@dataclass(frozen=True)
class OurKernel:
    """A compiled row.

    run   called with the inputs and a preallocated output [M, N]
    plan  the plan as plain JSON values
    via   "kernel": the fused function alone
    """

    run: Callable[[list[torch.Tensor], torch.Tensor], None]
    plan: dict[str, Any]
    via: str = "kernel"


def compile_row(row: Row, target: Target, records: Records = PACKAGE_RECORDS) -> OurKernel | Refusal:
    """Find, schedule and compile the cluster of a row, with a plan of these tuning records if one answers.

    A Refusal says why the row is not one kernel.  On an LLVM target the kernel is the CPU's, of the clusters and plans
    of an H200.  Raises ComfuseError for what should have worked.
    """
    from tvm_comfuse.frontend import from_relax
    from tvm_comfuse.fusion import fuse

    module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
    fused, explanation = fuse(module, target, tuning_records=records.folder, use_pretuned=records.pretuned)
    matmul = explanation.matmuls[0]
    if matmul.plan is None:
        return matmul.reason
    call = only_kernel(fused)
    if call is None:
        return Refusal("part", f"only {' '.join(matmul.ops)} became one kernel: {matmul.reason}")
    name, order = call
    kernel = compile_function(fused[name], target)

    def run(inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        kernel(*[inputs[index] for index in order], out)

    return OurKernel(run, matmul.plan.to_dict())


def compile_function(func: Any, target: Target) -> Callable[..., None]:
    """Compile one scheduled function; the result is called with its parameters in order, outputs last.

    Raises what TVM and the CUDA compiler raise.
    """
    # the device code may be compiled at the first look at it
    with target, own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH))):
        return compile_executable(func, target)["main"]  # type: ignore[no-any-return]


def compile_executable(func: Any, target: Target) -> Any:
    """As compile_function, but gives TVM's executable, with the function as "main"."""
    import tvm_comfuse

    if is_cuda(target):
        tvm_comfuse._autoload()
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    pipeline = "comfuse" if is_cuda(target) else "default"
    with target, own_cuda_compiler(str(target.attrs.get("arch", HOPPER_ARCH))):
        return tvm.compile(module, target=target, tir_pipeline=pipeline)


def only_kernel(module: tvm.IRModule) -> tuple[str, list[int]] | None:
    """The name of the only kernel of `main`, and which of main's parameters it takes, in the kernel's order.

    None if main does anything else than to call one kernel with its parameters and return the output.
    """
    main = module["main"]
    meaning: dict[Any, int] = {param: index for index, param in enumerate(main.params)}
    result: Any = None
    call: tuple[str, list[int]] | None = None
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Var) and value in meaning:
                meaning[binding.var] = meaning[value]
            elif isinstance(value, relax.Var) and value.same_as(result):
                result = binding.var
            elif _is_call_tir(value) and call is None:
                arguments = list(value.args[1].fields)
                if not all(isinstance(a, relax.Var) and a in meaning for a in arguments):
                    return None
                call = (value.args[0].name_hint, [meaning[a] for a in arguments])
                result = binding.var
            else:
                return None
    return call if call is not None and main.body.body.same_as(result) else None


def new_output(row: Row, device: str) -> torch.Tensor:
    """An uninitialised output [M, N] of a row."""
    return torch.empty((row.M, row.N), dtype=torch_dtype(row.dtype), device=device)


def _is_call_tir(value: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir"
