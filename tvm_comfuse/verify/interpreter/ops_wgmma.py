"""wgmma: matrix descriptors, asynchronous products, what they leave in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from tvm_comfuse.verify.interpreter.state import State

Array = np.ndarray
#: fields of a matrix descriptor: start address, leading and stride offset in units of 16 bytes; swizzle code
UNIT, FIELD, LEADING, STRIDE, SWIZZLE = 16, 0x3FFF, 16, 32, 62
SWIZZLE_128B = 3
M, K, COLUMNS, ROW = 64, 16, 64, 128


@dataclass
class Product:
    """One wgmma: accumulators += a b, or = without `add`."""

    cells: Array
    first: int
    valid: list
    columns: int
    a: Array
    b: Array
    half: Any
    add: bool


@lru_cache(maxsize=4096)
def operand(descriptor: int, rows: int, transposed: bool) -> tuple[Array, Array]:
    """(index of each element [rows, 16] among the 2-byte words of shared memory, granules touched) of an operand.

    Row r is r * 128 bytes down within eight rows, each eight rows `stride` bytes further, K contiguous; transposed: K is down
    and the rows contiguous, 64 to a block, blocks `leading` bytes apart.  The swizzle permutes by address bits.
    """
    start = (descriptor & FIELD) * UNIT
    leading, stride = (descriptor >> LEADING & FIELD) * UNIT, (descriptor >> STRIDE & FIELD) * UNIT
    row, k = np.arange(rows)[:, None], np.arange(K)[None, :]
    if transposed:
        address = start + row // COLUMNS * leading + row % COLUMNS * 2 + k // 8 * stride + k % 8 * ROW
    else:
        address = start + row // 8 * stride + row % 8 * ROW + k * 2
    address = address ^ (address // ROW % 8 * UNIT)
    return address // 2, np.unique(address // UNIT)


@lru_cache(maxsize=16)
def fragment(columns: int) -> tuple[Array, Array]:
    """Row and column [columns / 2, 128] of each accumulator register of each thread."""
    register, thread = np.arange(columns // 2)[:, None], np.arange(128)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    return np.broadcast_arrays(row, column)  # type: ignore[return-value]


class WgmmaOps(State):
    """Part of Actor."""

    def _start_wgmma(self) -> None:
        #: products issued since the last commit; committed groups not waited for, oldest first; groups committed so far
        self.issued: list[Product] = []
        self.flying: list[list[Product]] = []
        self.committed = 0
        #: what all warps knew when they issued the products of each group: a product is complete only if all have issued it
        self.issue_order = np.zeros((2, self.vc.shape[1]), np.int32)
        self.group_orders: list[Array] = []
        #: whether a wgmma may read registers that other instructions wrote; wgmma.fence ends that
        self.need_fence = True

    @property
    def open(self) -> bool:
        """Whether some product may still write its accumulators."""
        return bool(self.issued or self.flying)

    def encode(self, address: Any, leading: Any, stride: Any, swizzle: Any, mask: Any, where: str) -> int:
        """The matrix descriptor of a shared-memory address."""
        start = self.one(address, mask, where)
        if int(swizzle) != SWIZZLE_128B or start % UNIT or not 0 <= start < len(self.cta.bytes):
            text = f"{where}: swizzle {int(swizzle)}, address {start}; needs the 128-byte swizzle, a multiple of 16 in bounds"
            self.report.fatal("matrix-descriptor", f"{self.label}, {where}", text, address=start, swizzle=int(swizzle))
        return start // UNIT | int(leading) << LEADING | int(stride) << STRIDE | int(swizzle) << SWIZZLE

    def wgmma_fence(self, mask: Any, where: str) -> None:
        """wgmma.fence: registers written before are seen by wgmma behind it."""
        self.aligned(mask, where, True)
        self.need_fence = False

    def wgmma_issue(
        self,
        cells: Array,
        first: int,
        valid: list,
        columns: int,
        operands: tuple,
        add: Any,
        half: str,
        mask: Any,
        where: str,
    ) -> None:
        """wgmma.mma_async m64n`columns`k16: operands (a, transposed a, b, transposed b) are descriptors."""
        self.aligned(mask, where, True)
        if self.need_fence:
            text = f"{where}: registers of the accumulator were touched and no wgmma.fence follows"
            self.report.add("missing-wgmma-fence", f"{self.label}, {where}", text)
        if bool(add) and not all(valid[first : first + columns // 2]):
            text = f"{where}: adds to accumulators nobody wrote"
            self.report.add("uninitialised-read", f"{self.label}, {where}", text)
        a_descriptor, a_transposed, b_descriptor, b_transposed = operands
        a, a_granules = operand(int(a_descriptor), M, bool(a_transposed))
        b, b_granules = operand(int(b_descriptor), columns, bool(b_transposed))
        for granules in (a_granules, b_granules):
            if granules[-1] * UNIT >= len(self.cta.bytes):
                text = f"{where}: reads byte {int(granules[-1]) * UNIT} of {len(self.cta.bytes)} bytes of shared memory"
                self.report.fatal("shared-bounds", f"{self.label}, {where}", text, byte=int(granules[-1]) * UNIT)
            self.cta.shadow.async_read(self.label, self.seen(mask), granules, self.wgmma, self.committed + 1, where)
        np.maximum(self.issue_order, (self.vc.max(0), self.fenced.max(0)), out=self.issue_order)
        dtype = ml_dtypes.bfloat16 if half == "bf16" else np.float16
        self.issued.append(Product(cells, first, valid, columns, a, b, dtype, bool(add)))
        valid[first : first + columns // 2] = [True] * (columns // 2)

    def wgmma_commit(self, mask: Any, where: str) -> None:
        """wgmma.commit_group"""
        self.aligned(mask, where, True)
        self.committed += 1
        self.flying.append(self.issued)
        self.group_orders.append(self.issue_order.copy())
        self.tick(self.every_row)
        self.issued = []

    def wgmma_wait(self, most: Any, mask: Any, where: str) -> None:
        """wgmma.wait_group: all groups but the newest `most` are complete; they run now, as late as they may."""
        self.aligned(mask, where, True)
        while len(self.flying) > int(most):
            for product in self.flying.pop(0):
                self._multiply(product)
            order = self.group_orders.pop(0)
            np.maximum(self.vc, order[0], out=self.vc)
            np.maximum(self.fenced, order[1], out=self.fenced)
        self.vc[:, self.wgmma] = self.committed - len(self.flying)

    def _multiply(self, product: Product) -> None:
        words = self.cta.words16
        a = words[product.a].view(product.half).astype(np.float32)
        b = words[product.b].view(product.half).astype(np.float32)
        row, column = fragment(product.columns)
        value = (a @ b.T)[row, column]
        cells = product.cells[product.first : product.first + product.columns // 2]
        if product.add:
            cells += value
        else:
            cells[:] = value

    def flying_read(self, name: str) -> None:
        """An instruction touches accumulators while a wgmma may still write them."""
        text = (
            f"registers {name} are read or written while {len(self.flying)} committed groups of wgmma and {len(self.issued)} "
            "uncommitted products may still write them: no wait_group in between"
        )
        self.report.add("accumulator-in-flight", f"{self.label}, {name}", text, groups=len(self.flying))
