"""Global memory, the tensor maps over it, and the static memory of the module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from tvm_comfuse.verify.interpreter.report import Report
from tvm_comfuse.verify.interpreter.tree import SIZES

Array = np.ndarray
#: bytes of a row of a swizzled box, and of the chunks that the swizzle permutes
ROW, CHUNK = 128, 16
SWIZZLE_NONE, SWIZZLE_128B = 0, 3
#: rank of the map of a plain matrix
MATRIX = 2
#: limits of cuTensorMapEncodeTiled
MOST_BOX_ELEMENTS, STRIDE_UNIT = 256, 16


def numpy_dtype(name: str) -> Any:
    """The NumPy type of a TVM type."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


class Tensor:
    """A parameter: its array, and for outputs who wrote each element (0: nobody)."""

    def __init__(self, name: str, array: Array, output: bool, report: Report):
        self.name, self.array, self.output, self.report = name, array, output, report
        self.flat = array.reshape(-1)
        self.author = np.zeros(self.flat.size if output else 0, np.int16)

    def flatten(self, indices: tuple[Any, ...], who: str, where: str, count: int = 1) -> Any:
        """Flat index of `count` neighbours; the run ends if any is outside of the tensor."""
        flat: Any = 0
        for axis, (index, extent) in enumerate(zip(indices, self.array.shape, strict=True)):
            reach = count if axis == len(indices) - 1 else 1
            low, high = np.min(index), np.max(index) + reach - 1
            if low < 0 or high >= extent:
                text = f"{where}: index {int(low)}..{int(high)} of axis {axis} of {self.name}, which has {extent}"
                self.report.fatal("global-bounds", f"{who}, {where}", text, low=int(low), high=int(high), extent=extent)
            flat = flat * extent + index
        return flat

    def write(self, at: Any, values: Any, author: int, who: str, where: str) -> None:
        """Elements at flat indices."""
        if not self.output:
            self.report.add("input-written", f"{who}, {where}", f"{where}: writes to the input {self.name}")
            return
        before = self.author[at]
        if ((before != 0) & (before != author)).any():
            text = f"{where}: writes an element of {self.name} that another actor has written too"
            self.report.add("output-race", f"{who}, {where}", text)
        self.author[at] = author
        self.flat[at] = values


@dataclass
class TensorMap:
    """A tensor map: matrix of rows x columns, read and written in boxes of box_rows x box_columns.

    parts  (extent, stride in rows, extent in a box) of each dimension that a row number is split into, fastest first; empty
           if it is one
    """

    name: str
    tensor: Tensor
    columns: int
    rows: int
    stride: int
    box_columns: int
    box_rows: int
    swizzle: int
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory."""
        return self.box_rows * self.box_columns * self.item

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.tensor.array.dtype.itemsize

    def corner(self, at: list[int]) -> tuple[int, int]:
        """(column, row) of a box from the coordinates of a load."""
        column, *numbers = at
        if not self.parts:
            return column, numbers[0]
        return column, sum(number * stride for number, (_, stride, _) in zip(numbers, self.parts, strict=True))

    @cached_property
    def order(self) -> Array:
        """Row behind the box's first one that comes at each place of the box."""
        rows = np.zeros(1, np.int64)
        for _, stride, count in self.parts or ((self.rows, 1, self.box_rows),):
            rows = (np.arange(count)[:, None] * stride + rows).reshape(-1)
        return rows

    def clip(self, column: int, row: int) -> tuple[slice, slice]:
        """Rows and columns of the matrix that a box covers."""
        rows = slice(max(row, 0), max(min(row + self.box_rows, self.rows), 0))
        return rows, slice(max(column, 0), max(min(column + self.box_columns, self.columns), 0))

    def load(self, column: int, row: int, address: int) -> Array:
        """Bytes [box_rows, row bytes] of a box as they lie in shared memory at `address`; zeros outside of the matrix."""
        box = np.zeros((self.box_rows, self.box_columns), self.tensor.array.dtype)
        rows, columns = self.clip(column, row)
        if rows.stop > rows.start and columns.stop > columns.start:
            box[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column] = self.tensor.array[
                rows, columns
            ]
        box = box[self.order]
        return self._permute(box.view(np.uint8).reshape(self.box_rows, -1), address)

    def store(self, data: Array, column: int, row: int, address: int, author: int, who: str, where: str) -> None:
        """The inverse; elements outside of the matrix are dropped."""
        box = np.ascontiguousarray(self._permute(data, address)).view(self.tensor.array.dtype)
        rows, columns = self.clip(column, row)
        if rows.stop <= rows.start or columns.stop <= columns.start:
            return
        flat = np.arange(rows.start, rows.stop)[:, None] * self.columns + np.arange(columns.start, columns.stop)
        part = box[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column]
        self.tensor.write(flat, part, author, who, where)

    def _permute(self, data: Array, address: int) -> Array:
        """The 128-byte swizzle, its own inverse: chunk index xor row index, by address."""
        if self.swizzle == SWIZZLE_NONE:
            return data
        phase = (np.arange(self.box_rows) + address // ROW) % 8
        order = np.arange(ROW // CHUNK) ^ phase[:, None]
        chunks = data.reshape(self.box_rows, ROW // CHUNK, CHUNK)
        return chunks[np.arange(self.box_rows)[:, None], order].reshape(self.box_rows, ROW)


def tensor_map(name: str, tensor: Tensor, values: list[Any], report: Report) -> TensorMap:
    """From the arguments of cuTensorMapEncodeTiled behind the data pointer, for a matrix.  values: dtype, rank, sizes, stride,
    box, element strides, interleave, swizzle, promotion, fill."""
    dtype, rank, *numbers = values
    (columns, *extents), strides = numbers[:rank], numbers[rank : 2 * rank - 1]
    (box_columns, *box), steps = numbers[2 * rank - 1 : 3 * rank - 1], numbers[3 * rank - 1 :]
    pitch = columns * SIZES[dtype]
    parts = tuple((extent, stride // pitch, count) for extent, stride, count in zip(extents, strides, box, strict=True))
    rows, box_rows, stride = math.prod(extents), math.prod(box), min(strides)
    split = parts if rank > MATRIX else ()
    result = TensorMap(name, tensor, columns, rows, stride, box_columns, box_rows, steps[rank + 1], split)
    width = result.box_columns * result.item
    right = {
        "rank 2, or rows split into parts that a box has whole": all(e == c for e, _, c in parts[:-1]),
        "the tensor's dtype": numpy_dtype(dtype) == tensor.array.dtype,
        "the tensor's shape": tensor.array.shape == (rows, columns) and stride == pitch,
        f"strides that are multiples of {STRIDE_UNIT}": all(stride % STRIDE_UNIT == 0 for stride in strides),
        "each row once": sorted(result.order.tolist()) == list(range(box_rows)),
        f"boxes of 1 to {MOST_BOX_ELEMENTS} elements along each axis": 0 < max(box_columns, *box) <= MOST_BOX_ELEMENTS,
        "element strides of 1 and no interleave": list(steps[: rank + 1]) == [1] * rank + [0],
        "128-byte swizzle of boxes 128 bytes wide, or none": result.swizzle == SWIZZLE_NONE
        or (result.swizzle == SWIZZLE_128B and width == ROW),
    }
    for rule, holds in right.items():
        if not holds:
            report.fatal("tensor-map", name, f"needs {rule}; has {values} over {tensor.name} {tensor.array.shape}")
    return result


@dataclass
class Statics:
    """Static memory of the module: mail slots (value bits, tag) by name; by name too the tag base, the launch counter and
    the launch that owns the slots (0: none).  Keep it from one launch to the next to see what the second launch of a
    kernel finds, or give it to launches that run at the same time."""

    mail: dict[str, Array] = field(default_factory=dict)
    state: dict[str, list[int]] = field(default_factory=dict)

    def slots(self, name: str, count: int) -> Array:
        """Mail slots [>= count] uint64 of that name."""
        old = self.mail.get(name, np.zeros(0, np.uint64))
        if len(old) < count:
            self.mail[name] = np.concatenate([old, np.zeros(count - len(old), np.uint64)])
        return self.mail[name]

    def words(self, name: str) -> list[int]:
        """[tag base, CTAs that have left, owner] of that name."""
        return self.state.setdefault(name, [0, 0, 0])
