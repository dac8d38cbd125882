"""Kernels that are called one after the other in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Chain:
    """Kernels of one library that together do what a cluster's function does.

    kernels  names in order and, by position, their arguments: the parameters of the cluster's function, and behind these the
             value between
    columns  of the value between, which has the rows of the first parameter
    dtype    of the value between
    between  the block of the cluster's function that makes it; "" if it is not rounded
    """

    kernels: tuple[tuple[str, tuple[int, ...]], ...]
    columns: int
    dtype: str
    between: str

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        kernels = [[name, list(positions)] for name, positions in self.kernels]
        return {"kernels": kernels, **{name: getattr(self, name) for name in ("columns", "dtype", "between")}}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Chain:
        """The inverse of to_dict."""
        kernels = tuple((name, tuple(positions)) for name, positions in values["kernels"])
        return Chain(kernels, values["columns"], values["dtype"], values["between"])

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
