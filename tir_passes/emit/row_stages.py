"""The stages of a rows function on the chunks that a lane has of its row.

The [M, N] operands are loaded before anything is computed, so that their latencies overlap, as far as registers reach; further
ones are read where they are needed.  A pass then walks over the lane's
elements as a cluster's stages do (emit/stages.py); the arithmetic comes from the same expressions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm.script import tirx as T

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.row_reducers import IDENTITY
from tvm_comfuse.schedules.rows import CHUNK
from tvm_comfuse.tir_passes.emit.actions import COMBINE
from tvm_comfuse.tir_passes.emit.chunks import Chunks
from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store, when
from tvm_comfuse.tir_passes.emit.expressions import Binding, read_buffers, rebind, without_cast
from tvm_comfuse.tir_passes.emit.row_exchange import reduce_row

Expr = Any
#: registers for the [M, N] operands that are loaded ahead, and for what a pass loads at a time
AHEAD, IN_FLIGHT = 64, 24


class RowStages:
    """Emits the stages for one row of each warp, or of the warps that share it.

    kernel  a RowsKernel; row: number of the row; step: of the loop over rows
    """

    def __init__(self, kernel: Any, row: Expr, step: Expr):
        self.kernel, self.spec, self.row, self.step = kernel, kernel.spec, row, step
        self.count = kernel.plan.chunks
        self.values: dict[str, Any] = {}
        self.carried: Any = None
        self.constants: list[tuple[Expr, Any]] = []
        self.tiles: dict[int, Chunks] = {}
        self._load_ahead()
        self.of_row = {op.index: self._row_operand(op) for op in self.spec.operands if op.kind == "row"}

    def emit(self) -> None:
        """Every stage in order."""
        for stage in self.spec.stages:
            self._outputs(stage, late=False)
            if stage.carried or stage.reductions:
                self._pass(stage)
            self._outputs(stage, late=True)

    # --- what is loaded -----------------------------------------------------------------------------------------------

    def _load_ahead(self) -> None:
        left = AHEAD
        for operand in self.spec.tile_operands:
            left -= self._words(operand) * self.count
            if left < 0 and self.tiles:
                return
            self.tiles[operand.index] = self._load(operand, range(self.count))

    def _load(self, operand: Any, chunks: range) -> Chunks:
        """Some of the lane's chunks of an [M, N] or [N] operand."""
        loaded = Chunks(operand.dtype, len(chunks), operand.name)
        buffer = self.kernel.buffers[operand.index]
        for nth, chunk in enumerate(chunks):
            column = self.kernel.column(chunk)
            if operand.kind == "tile":
                loaded.load(nth, buffer.ptr_to([self.row, column]), self.kernel.inside(self.row, chunk))
            else:
                loaded.load(nth, buffer.ptr_to([column]), self.kernel.inside_columns(chunk))
        return loaded

    def _words(self, operand: Any) -> int:
        """Registers of one chunk."""
        return CHUNK if operand.dtype == "float32" else CHUNK // 2

    def _row_operand(self, operand: Any) -> Any:
        buffer = self.kernel.buffers[operand.index]
        where = (self.row, 0) if len(buffer.shape) == 2 else (self.row,)
        cell = registers([1], "float32", operand.name)
        store(cell, T.if_then_else(self.row < self.kernel.m, T.cast(buffer[where], "float32"), f32(0.0)), 0)
        return cell

    def _needed(self, blocks: list[Any]) -> list[Any]:
        """The [N] operands that blocks read, and the [M, N] operands that are not there yet."""
        read = read_buffers(block.value for block in blocks)
        return [
            operand
            for operand in self.spec.operands
            if operand.kind in ("tile", "col")
            and operand.index not in self.tiles
            and any(self.kernel.func.params[operand.index].same_as(buffer) for buffer in read)
        ]

    def _portions(self, needed: list[Any]) -> list[range]:
        """Chunks that are worked on together: there are registers for what is loaded for them."""
        words = sum(map(self._words, needed))
        step = min(self.count, max(1, IN_FLIGHT // max(words, 1)))
        return [range(first, min(first + step, self.count)) for first in range(0, self.count, step)]

    # --- passes -------------------------------------------------------------------------------------------------------

    def _walk(self, blocks: list[Any], apply: Callable[[int, int, list[Expr]], None]) -> None:
        """Calls apply(chunk, element, values of the blocks) for each element of the lane."""
        for block in blocks:
            self._constants_of(block)
        needed = self._needed(blocks)
        for chunks in self._portions(needed):
            loaded = {operand.index: self._load(operand, chunks) for operand in needed}
            for nth, chunk in enumerate(chunks):
                for element in range(CHUNK):
                    apply(chunk, element, [self._value(block, chunk, element, loaded, nth) for block in blocks])

    def _pass(self, stage: Any) -> None:
        """The carried value of a stage, if it has one, and its reductions."""
        kernel = self.kernel
        if stage.carried:
            carried = self.carried if self.carried is not None else registers([self.count, CHUNK], "float32", "carried")

            def carry(chunk: int, element: int, values: list[Expr]) -> None:
                store(carried, values[0], chunk, element)

            self._walk([kernel.blocks[stage.carried]], carry)
            self.carried = carried
        if not stage.reductions:
            return
        cells = []
        for reduction in stage.reductions:
            cell = self.values[reduction.block] = registers([1], "float32", reduction.block)
            store(cell, f32(IDENTITY[reduction.op]), 0)
            cells.append((reduction.op, cell))

        def accumulate(chunk: int, _element: int, values: list[Expr]) -> None:
            inside = kernel.inside_columns(chunk)
            for (op, cell), value in zip(cells, values, strict=True):
                known = value if inside is None else T.if_then_else(inside, value, f32(IDENTITY[op]))
                store(cell, COMBINE[op](cell[0], known), 0)

        self._walk([kernel.blocks[reduction.block] for reduction in stage.reductions], accumulate)
        reduce_row(kernel, stage, cells, self.step)

    def _outputs(self, stage: Any, late: bool) -> None:
        for output in stage.outputs:
            if output.late == late:
                (self._send_row if output.kind == "row" else self._send)(output)

    def _send(self, output: Any) -> None:
        kernel, block = self.kernel, self.kernel.blocks[output.block]
        buffer = kernel.buffers[output.index]
        result = Chunks(output.dtype, 1, "result")
        eight = registers([CHUNK], "float32", "eight")

        def apply(chunk: int, element: int, values: list[Expr]) -> None:
            store(eight, values[0], element)
            if element == CHUNK - 1:
                result.put(0, eight)
                result.send(0, buffer.ptr_to([self.row, kernel.column(chunk)]), kernel.inside(self.row, chunk))

        self._walk([block], apply)

    def _send_row(self, output: Any) -> None:
        """One value of the row: the first lane of the row stores it."""
        kernel, block = self.kernel, self.kernel.blocks[output.block]
        value = self._rebind(block, 0, self._no_input, lambda value: value)
        buffer = kernel.buffers[output.index]
        with when(T.And(kernel.first_lane, self.row < kernel.m)):
            where = (self.row, 0) if len(buffer.shape) == 2 else (self.row,)
            store(buffer, T.cast(value, str(buffer.dtype)), *where)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, block: Any, chunk: int, element: int, loaded: dict[int, Chunks], nth: int) -> Expr:
        """A block's expression for one element; `nth` is the chunk's number among those that the pass has loaded."""

        def input_of(home: Any) -> Expr:
            if home.kind == "carried":
                return self.carried[chunk, element]
            if home.index in self.tiles:
                return self.tiles[home.index].element(chunk, element)
            return loaded[home.index].element(nth, element)

        return self._rebind(block, self.kernel.column(chunk) + element, input_of, self._constant)

    def _constants_of(self, block: Any) -> None:
        """Computes, once, what a block's expression has that is the same for the whole row."""

        def hoist(value: Expr) -> Expr:
            if not any(tvm_ffi.structural_equal(value, known) for known, _ in self.constants):
                cell = registers([1], "float32", "of_row")
                store(cell, value, 0)
                self.constants.append((value, cell))
            return value

        self._rebind(block, 0, lambda _: f32(0.0), hoist)

    def _constant(self, value: Expr) -> Expr:
        return next(cell[0] for known, cell in self.constants if tvm_ffi.structural_equal(value, known))

    def _rebind(self, block: Any, column: Expr, input_of: Callable[[Any], Expr], hoist: Callable[[Expr], Expr]) -> Expr:
        kernel = self.kernel

        def load(node: Any) -> Expr:
            home = kernel.home(node.source)
            if home.kind == "row_value":
                return self.values[home.name][0]
            if home.kind == "row":
                return self.of_row[home.index][0]
            return kernel.scalars[home.index][0] if home.kind == "scalar" else input_of(home)

        def of_row(node: Any) -> bool:
            return kernel.home(node.source).kind in ("row_value", "row", "scalar")

        variables = {block.i: T.cast(self.row, str(block.i.ty.dtype))}
        if block.j is not None:
            variables[block.j] = T.cast(column, str(block.j.ty.dtype))
        return rebind(without_cast(block.value), Binding(variables, load, of_row, hoist=hoist))

    def _no_input(self, home: Any) -> Expr:
        raise LoweringError("an output of one value a row that needs row values only", home.name, "report this")
