"""Generic loads and stores of shared and global memory, matrix loads and stores, shuffles."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.memory import Tensor
from tvm_comfuse.verify.interpreter.state import WARP, State

Array = np.ndarray
#: registers of a matrix instruction, lanes that give addresses for one matrix
MATRIX_LANES = 8
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class MemoryOps(State):
    """Part of Actor.  Addresses are one number or one per lane; values are [lanes] arrays, or scalars for a single lane."""

    def _shared(self, address: Any, size: int, mask: Any, where: str) -> tuple[Array, Array]:
        """(lanes that take part, their addresses), checked for bounds and alignment to `size` bytes."""
        lanes = self.active(mask)
        at = address[lanes] if isinstance(address, np.ndarray) else np.full(len(lanes), address)
        if len(at) and (at.min() < 0 or at.max() + size > len(self.cta.bytes) or (at % size).any()):
            text = f"{where}: {size} bytes at {int(at.min())}..{int(at.max())} of {len(self.cta.bytes)} bytes of shared memory"
            self.report.fatal(
                "shared-bounds", f"{self.label}, {where}", text, low=int(at.min()), high=int(at.max()), size=size
            )
        return lanes, at

    def _spread(self, values: Array, lanes: Array, mask: Any) -> Any:
        if mask is None:
            return values
        if isinstance(mask, int):
            return values[0]
        whole = np.zeros(self.lanes, values.dtype)
        whole[lanes] = values
        return whole

    def load_shared(self, address: Any, dtype: Any, count: int, mask: Any, where: str) -> list[Any]:
        """`count` neighbouring words per lane."""
        size = dtype.itemsize
        lanes, at = self._shared(address, size * count, mask, where)
        self.cta.shadow.read(self, self.row_of_lane[lanes], at, where)
        words = self.cta.bytes.view(dtype)
        return [self._spread(words[at // size + i], lanes, mask) for i in range(count)]

    def store_shared(self, address: Any, values: list[Any], dtype: Any, mask: Any, where: str) -> None:
        """Neighbouring words per lane."""
        size = dtype.itemsize
        lanes, at = self._shared(address, size * len(values), mask, where)
        self.cta.shadow.write(self, self.row_of_lane[lanes], at, where)
        words = self.cta.bytes.view(dtype)
        for i, value in enumerate(values):
            words[at // size + i] = value[lanes] if isinstance(value, np.ndarray) and value.ndim else value

    def load_matrix(self, address: Array, count: int, mask: Any, where: str) -> list[Array]:
        """ldmatrix of `count` 8 x 8 matrices of 2-byte elements: register i of a lane is its part of matrix i."""
        self.aligned(mask, where)
        rows = self._matrix_rows(address, count, mask, where)
        self.cta.shadow.read(self, rows[0], rows[1], where)
        return list(self.cta.bytes.view(np.uint32)[self._matrix_words(address, count)])

    def store_matrix(self, address: Array, values: list[Array], mask: Any, where: str) -> None:
        """stmatrix, the inverse."""
        self.aligned(mask, where)
        rows = self._matrix_rows(address, len(values), mask, where)
        self.cta.shadow.write(self, rows[0], rows[1], where)
        self.cta.bytes.view(np.uint32)[self._matrix_words(address, len(values))] = np.stack(values)

    def _matrix_rows(self, address: Array, count: int, mask: Any, where: str) -> tuple[Array, Array]:
        lanes, at = self._shared(address, 16, mask, where)
        chosen = lanes % WARP < MATRIX_LANES * count
        return self.row_of_lane[lanes[chosen]], at[chosen]

    def _matrix_words(self, address: Array, count: int) -> Array:
        """Word index [count, lanes]: lane l has bytes 4 (l % 4).. of row l // 4 of each matrix."""
        lane = np.arange(self.lanes)
        source = lane // WARP * WARP + lane % WARP // 4 + np.arange(count)[:, None] * MATRIX_LANES
        return address[source] // 4 + lane % 4

    def load_global(
        self, tensor: Tensor, indices: tuple, count: int, mask: Any, where: str, dtype: Any = None
    ) -> list[Any]:
        """`count` neighbouring elements per lane; dtype: read them as words of that type instead."""
        self.reach_global(where)
        lanes = self.active(mask)
        if not len(lanes):
            return [np.zeros(self.lanes, dtype or tensor.array.dtype)] * count
        item = tensor.array.dtype.itemsize
        size = item * count if dtype is None else dtype.itemsize * count
        at = self._elements(tensor, indices, lanes, size // item, where)
        if dtype is None or dtype.itemsize == item:
            words = tensor.flat if dtype is None else tensor.flat.view(dtype)
            values = [words[at + i] for i in range(count)]
        else:
            values = [self._words(tensor, at, dtype.itemsize // item, i, dtype) for i in range(count)]
        uniform = not any(isinstance(index, np.ndarray) for index in indices) and mask is None
        return [value[0] if uniform else self._spread(value, lanes, mask) for value in values]

    def _elements(self, tensor: Tensor, indices: tuple, lanes: Array, count: int, where: str) -> Array:
        chosen = tuple(index[lanes] if isinstance(index, np.ndarray) else index for index in indices)
        at = tensor.flatten(chosen, self.label, where, count)
        at = at if isinstance(at, np.ndarray) else np.full(len(lanes), at)
        if (at % count).any():
            self.report.add(
                "global-bounds", f"{self.label}, {where}", f"{where}: an address that is not aligned to the access"
            )
        return at

    def _words(self, tensor: Tensor, at: Array, parts: int, number: int, dtype: Any) -> Array:
        raw = tensor.flat.view(WORDS[tensor.array.dtype.itemsize])
        pieces = np.stack([raw[at + number * parts + i] for i in range(parts)], -1)
        return np.ascontiguousarray(pieces).view(dtype).reshape(-1)

    def store_global(
        self, tensor: Tensor, indices: tuple, values: list[Any], mask: Any, where: str, dtype: Any = None
    ) -> None:
        """Neighbouring elements per lane, given as elements or as words of another type."""
        self.reach_global(where)
        lanes = self.active(mask)
        if not len(lanes):
            return
        own = tensor.array.dtype
        parts = 1 if dtype is None else dtype.itemsize // own.itemsize
        at = self._elements(tensor, indices, lanes, parts * len(values), where)
        for number, value in enumerate(values):
            chosen = value[lanes] if isinstance(value, np.ndarray) and value.ndim else np.full(len(lanes), value)
            if dtype is not None:
                chosen = np.ascontiguousarray(chosen.astype(dtype)).view(own).reshape(len(lanes), parts)
                for part in range(parts):
                    tensor.write(at + number * parts + part, chosen[:, part], self.number, self.label, where)
            else:
                tensor.write(at + number, chosen, self.number, self.label, where)

    def any_of_warp(self, value: Any, mask: Any, where: str) -> Any:
        """Whether a value is not zero in some lane of the warp."""
        self.aligned(mask, where)
        if not isinstance(value, np.ndarray):
            return bool(value)
        return np.repeat((value != 0).reshape(-1, WARP).any(1), WARP)

    def shuffle_xor(self, value: Any, distance: Any, mask: Any, where: str) -> Any:
        """The value of the lane whose number differs in the bits of `distance`."""
        self.aligned(mask, where)
        if not isinstance(value, np.ndarray):
            return value
        return value[np.arange(self.lanes) ^ int(distance)]
