"""Kernels that are called one after the other in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm

from tvm_comfuse.schedules.rows import spec_of
from tvm_comfuse.verify.dynamic import numpy_dtype
from tvm_comfuse.verify.reference import reference


@dataclass(frozen=True)
class Chain:
    """Functions that together do what a cluster's function does.

    module   the functions, canonical, by name
    kernels  the names in order and, by position, their arguments: the parameters of the cluster's function, and behind these
             the value between
    columns  of the value between, which has the rows of the first parameter
    dtype    of the value between
    """

    module: tvm.IRModule
    kernels: tuple[tuple[str, tuple[int, ...]], ...]
    columns: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        kernels = [[name, list(positions)] for name, positions in self.kernels]
        return {
            "module": tvm.ir.save_json(self.module),
            "kernels": kernels,
            "columns": self.columns,
            "dtype": self.dtype,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Chain:
        """The inverse of to_dict."""
        kernels = tuple((name, tuple(positions)) for name, positions in values["kernels"])
        return Chain(tvm.ir.load_json(values["module"]), kernels, values["columns"], values["dtype"])

    def bind(self, library: Any) -> Callable[..., None]:
        """A function of the cluster's parameters, PyTorch tensors, that calls a library's kernels of these names in order."""
        functions = [(library[name], positions) for name, positions in self.kernels]
        between: dict[str, torch.Tensor] = {}

        def call(*tensors: torch.Tensor) -> None:
            x = tensors[0]
            if str(x.device) not in between:
                shape, dtype = (x.shape[0], self.columns), getattr(torch, self.dtype)
                between[str(x.device)] = torch.empty(shape, dtype=dtype, device=x.device)
            values = (*tensors, between[str(x.device)])
            for function, positions in functions:
                function(*(values[position] for position in positions))

        return call

    def results(self, inputs: Sequence[np.ndarray], outputs: int) -> list[np.ndarray]:
        """The cluster's outputs, so many, for some inputs: computed in float64 and rounded where a kernel ends."""
        values: dict[int, np.ndarray] = dict(enumerate(inputs))
        for name, positions in self.kernels:
            func = self.module[name]
            own = spec_of(func).outputs
            given, made = positions[: -len(own)], positions[-len(own) :]
            exact = reference(func, [values[position] for position in given])
            for position, output, result in zip(made, own, exact, strict=True):
                values[position] = result.astype(numpy_dtype(output.dtype))
        return [values[len(inputs) + number] for number in range(outputs)]
