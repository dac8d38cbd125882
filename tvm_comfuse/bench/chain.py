"""The kernels of a fused row in order: one, or two with a tensor between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax, tirx

from tvm_comfuse.bench.ops import torch_dtype


@dataclass(frozen=True)
class Call:
    """One kernel.

    name    of its function
    values  its inputs in order: the parameters of `main` count from 0, then the results of the calls before
    shape, dtype  of its output
    """

    name: str
    values: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def new_output(self, device: str) -> torch.Tensor:
        """An uninitialised tensor for its output."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype), device=device)


def kernel_calls(module: tvm.IRModule) -> list[Call] | None:
    """What `main` calls.

    None if main does anything else than to call kernels of one output with its parameters and with their results, and to
    return the last one's output.
    """
    main = module["main"]
    meaning: dict[Any, int] = {param: index for index, param in enumerate(main.params)}
    found: list[Call] = []
    for binding in (binding for block in main.body.blocks for binding in block.bindings):
        value = binding.value
        if isinstance(value, relax.Var) and value in meaning:
            meaning[binding.var] = meaning[value]
            continue
        call = _call(value, binding.var, meaning)
        if call is None:
            return None
        meaning[binding.var] = len(main.params) + len(found)
        found.append(call)
    last = len(main.params) + len(found) - 1
    return found if found and meaning.get(main.body.body) == last else None


def _call(value: Any, var: Any, meaning: dict[Any, int]) -> Call | None:
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.call_tir":
        return None
    arguments, shape = list(value.args[1].fields), getattr(var.ty, "shape", None)
    if shape is None or not all(isinstance(a, relax.Var) and a in meaning for a in arguments):
        return None
    extents = list(shape.values)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return Call(
        value.args[0].name_hint, tuple(meaning[a] for a in arguments), tuple(map(int, extents)), str(var.ty.dtype)
    )
