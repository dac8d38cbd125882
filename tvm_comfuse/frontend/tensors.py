"""Tensors between PyTorch, numpy and TVM, and a way to run a Relax module for its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from tvm_comfuse.errors import ModelError

if TYPE_CHECKING:
    import torch


def to_tvm(tensor: torch.Tensor | np.ndarray, device: tvm.runtime.Device | None = None) -> tvm.runtime.Tensor:
    """A copy of ``tensor`` on ``device`` (the CPU where None), compact, with the same dtype, bfloat16 included."""
    device = tvm.cpu() if device is None else device
    if isinstance(tensor, np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(tensor), device)
    if not hasattr(tensor, "__dlpack__"):
        raise ModelError("a torch tensor or a numpy array", type(tensor).__name__, "convert it with torch.as_tensor")
    compact = tensor.detach().contiguous()
    out = tvm.runtime.empty(tuple(compact.shape), str(compact.dtype).removeprefix("torch."), device)
    if compact.numel():
        out.copyfrom(tvm.runtime.from_dlpack(compact))
    return out


def to_torch(tensor: tvm.runtime.Tensor) -> torch.Tensor:
    """The same values as a torch tensor that owns its memory, on the device of ``tensor``."""
    import torch

    return torch.from_dlpack(tensor).clone()


def host_target() -> tvm.target.Target:
    """LLVM for this processor.  Without its instruction set every float16 conversion is a call: five times slower."""
    return tvm.target.Target({"kind": "llvm", "mcpu": str(tvm.target.codegen.llvm_get_system_cpu())})


def run_module(
    mod: tvm.IRModule,
    inputs: Sequence[Any],
    *,
    target: Any = None,
    device: tvm.runtime.Device | None = None,
    function: str = "main",
) -> list[torch.Tensor]:
    """Legalize, build and run ``mod``; gives its outputs, flattened, as torch tensors on the CPU or ``device``.

    target  a Target or what makes one; None is ``host_target()``
    inputs are torch tensors or numpy arrays, in the order of the function's parameters.  ``mod`` may contain Relax
    operators, call_tir of scheduled or unscheduled functions, or both.
    """
    from tvm_comfuse.frontend.legalization import legalize

    device = tvm.cpu() if device is None else device
    target = host_target() if target is None else tvm.target.Target(target)
    with target:
        executable = tvm.compile(legalize()(mod), target=target)
    machine = relax.VirtualMachine(executable, device)
    result = machine[function](*[to_tvm(value, device) for value in inputs])
    return [to_torch(tensor) for tensor in _flatten(result)]


def _flatten(result: Any) -> list[tvm.runtime.Tensor]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flatten(part)]
