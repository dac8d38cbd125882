"""The stages of a cluster on the registers of one MMA warp group.

A pass walks the thread's elements once.  In it an element's carried value is updated, results leave, and reductions
accumulate: everything of a stage that does not need a row value the pass itself makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store, u32, unrolled
from tvm_comfuse.tir_passes.emit.instructions import pin
from tvm_comfuse.tir_passes.emit.expressions import read_buffers, rebind, without_cast

Expr = Any
SHUFFLE_MASK = 0xFFFFFFFF
#: how partial row values of each reduction combine, and what an element behind N contributes
COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "sum": lambda a, b: a + b,
    "max": lambda a, b: T.max(a, b),
    "min": lambda a, b: T.min(a, b),
}
IDENTITY = {"sum": lambda: f32(0.0), "max": lambda: T.min_value("float32"), "min": lambda: T.max_value("float32")}


@dataclass
class Action:
    """What a pass does with each element: block is the expression's source, apply(row, chunk, element, value) uses it;
    finish(row, chunk) runs once for each pair of neighbours."""

    block: Any
    apply: Callable[[int, Expr, int, Expr], None]
    finish: Callable[[int, Expr], None] | None = None


@dataclass
class RowValues:
    """Registers [rows] of each row value, by the block that reduces it."""

    fragment: Any
    cells: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> Any:
        """The registers of one row value, made on first use."""
        if name not in self.cells:
            self.cells[name] = registers([self.fragment.rows], "float32", name)
        return self.cells[name]

    def renew(self) -> None:
        """Makes the compiler forget what it computed from row values in earlier passes: kept for every element, that would
        double the registers a pass needs."""
        for cells in self.cells.values():
            for row in range(self.fragment.rows):
                pin(cells[row])


class Stages:
    """Emits passes for one step of one warp group."""

    def __init__(self, kernel: Any, rows: RowValues, columns: Any, step: Expr):
        self.kernel, self.rows, self.columns, self.step = kernel, rows, columns, step
        self.fragment = kernel.fragment

    def sweep(self, actions: list[Action]) -> None:
        """One pass over the thread's elements."""
        if not actions:
            return
        buffers = read_buffers(action.block.value for action in actions)
        self.rows.renew()
        with unrolled(self.fragment.chunks, "chunk") as chunk:
            column = self.fragment.column(chunk)
            vectors = {
                index: operands.vector_pair(self.kernel, index, column)
                for index, buffer in enumerate(self.kernel.inputs("col"))
                if _among(buffer, buffers)
            }
            for row in range(self.fragment.rows):
                tiles = self._tiles(buffers, row, chunk, column)
                for action in actions:
                    for element in range(2):
                        value = self._value(action.block, row, chunk, element, vectors, tiles)
                        action.apply(row, chunk, element, value)
                    if action.finish is not None:
                        action.finish(row, chunk)

    def _tiles(self, buffers: list[Any], row: int, chunk: Expr, column: Expr) -> dict[int, Any]:
        """The [M, N] operands of a pair of neighbours, by position among the tile operands."""
        pairs = {}
        for index, operand in enumerate(self.kernel.tiles):
            if _among(self.kernel.func.params[operand.index], buffers):
                pairs[index] = (
                    operands.global_pair(self.kernel, operand.buffer, self.step, row, column)
                    if operand.tile is None
                    else operands.tile_pair(self.kernel, operand.tile, str(operand.buffer.dtype), row, chunk)
                )
        return pairs

    def _value(
        self, block: Any, row: int, chunk: Expr, element: int, vectors: dict[int, Any], tiles: dict[int, Any]
    ) -> Expr:
        """A block's expression for one element."""
        kernel = self.kernel

        def load(node: Any) -> Expr:
            home = kernel.home(node.source)
            if home.kind == "carried":
                return kernel.acc[self.fragment.element(row, chunk, element)]
            if home.kind == "row_value":
                return self.rows.of(home.name)[row]
            if home.kind == "tile":
                return tiles[home.index][element]
            if home.kind == "col":
                return vectors[home.index][element]
            if home.kind == "row":
                return self.columns[home.index, row]
            return kernel.scalar_cells[home.index]

        i = T.cast(kernel.global_row(self.step, row), str(block.i.ty.dtype))
        variables = {block.i: i}
        if block.j is not None:
            at = kernel.global_column(self.fragment.column(chunk)) + element
            variables[block.j] = T.cast(at, str(block.j.ty.dtype))
        def of_row(node: Any) -> bool:
            return kernel.home(node.source).kind in ("row_value", "row", "scalar")

        return rebind(without_cast(block.value), variables, load, of_row)

    def carry(self, block: Any) -> Action:
        """The carried value of a stage takes the place of the one before."""

        def apply(row: int, chunk: Expr, element: int, value: Expr) -> None:
            store(self.kernel.acc, value, self.fragment.element(row, chunk, element))

        return Action(block, apply)

    def accumulate(self, block: Any, op: str, target: Any) -> Action:
        """A reduction of the thread's own elements into target [rows], which must hold the identity."""

        def apply(row: int, chunk: Expr, element: int, value: Expr) -> None:
            if self.kernel.geometry.ragged_n:
                at = self.kernel.global_column(self.fragment.column(chunk)) + element
                value = T.if_then_else(at < self.kernel.spec.n, value, IDENTITY[op]())
            store(target, COMBINE[op](target[row], value), row)

        return Action(block, apply)

    def send(self, block: Any, output: Any, tile: int | None) -> Action:
        """A result: to the staging tile that TMA stores, or straight to global memory."""
        kernel, dtype = self.kernel, str(output.dtype)
        pair = registers([2], "float32", "result")

        def apply(row: int, chunk: Expr, element: int, value: Expr) -> None:
            store(pair, value, element)

        def finish(row: int, chunk: Expr) -> None:
            if tile is not None:
                word = registers([1], "uint32", "word")
                operands.pack(word[0], pair[0], pair[1], dtype)
                offset = operands.tile_offset(kernel, tile, row, chunk)
                T.evaluate(T.ptx.st.shared.u32(kernel.smem.ptr_to([offset]), word[0]))
                return
            at, column = kernel.global_row(self.step, row), kernel.global_column(self.fragment.column(chunk))
            inside = at < kernel.place.rows
            if kernel.geometry.ragged_n:
                inside = T.And(inside, column < kernel.spec.n)
            with kernel.when(inside):
                for element in range(2):
                    store(output, T.cast(pair[element], dtype), at, column + element)

        return Action(block, apply, finish)

    def send_row(self, block: Any, output: Any) -> None:
        """A result that has one value a row: the first lane of each quad of the first part of the row stores it."""
        kernel = self.kernel
        for row in range(self.fragment.rows):
            value = self._value(block, row, 0, 0, {}, {})
            at = kernel.global_row(self.step, row)
            mine = T.And(self.fragment.quad_lane == 0, at < kernel.place.rows)
            with kernel.when(T.And(mine, kernel.row_part == 0)):
                where = (at, 0) if len(output.shape) == 2 else (at,)
                store(output, T.cast(value, str(output.dtype)), *where)

    def across_quad(self, op: str, cells: Any, row: int) -> None:
        """Combines a row's partials over the four lanes that share the row; all four get the result."""
        for distance in (1, 2):
            other = T.tvm_warp_shuffle_xor(u32(SHUFFLE_MASK), cells[row], distance, 32, 32)
            store(cells, COMBINE[op](cells[row], other), row)


def _among(buffer: Any, buffers: list[Any]) -> bool:
    return any(buffer.same_as(other) for other in buffers)
