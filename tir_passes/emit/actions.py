"""What a pass does with each element: change the carried value, add to a row's partials, send a result, park."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.row_reducers import IDENTITY
from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.dsl import do, f32, registers, store
from tvm_comfuse.tir_passes.emit.fragment import ElementPlace
from tvm_comfuse.tir_passes.emit.instructions import extreme

Expr = Any
#: how partial row values of each reduction combine
COMBINE: dict[str, Callable[[Expr, Expr], Expr]] = {
    "sum": lambda a, b: a + b,
    "max": lambda a, b: extreme("max", a, b),
    "min": lambda a, b: extreme("min", a, b),
}


@dataclass
class Action:
    """What a pass does with each element.

    block   its expression is the element's value; None: the carried value itself
    apply   (place, element, value) uses the value
    put     (place, word) instead: uses the word of two neighbours in half precision
    dtype   of that word
    finish  (box, block of rows, pair of chunks) runs once all elements of a pair of chunks are applied
    carries  it changes the carried value
    """

    block: Any
    apply: Callable[[ElementPlace, int, Expr], None] | None = None
    put: Callable[[ElementPlace, Expr], None] | None = None
    dtype: str = ""
    finish: Callable[[Expr, int, int], None] | None = None
    carries: bool = False


class Actions:
    """Makes actions for one step of one warp group.  `held` is where the carried value is (see emit/held.py)."""

    def __init__(self, kernel: Any, held: Any, step: Expr):
        self.kernel, self.held, self.step = kernel, held, step
        self.fragment = kernel.fragment

    def carry(self, block: Any) -> Action:
        """The carried value of a stage takes the place of the one before."""

        def apply(place: ElementPlace, element: int, value: Expr) -> None:
            self.held.write(place, element, value)

        return Action(block, apply, carries=True)

    def accumulate(self, block: Any, op: str, target: Any, squared: bool = False) -> Action:
        """A reduction of the thread's own elements, or of their squares, into target [rows], which must hold the identity."""

        def apply(place: ElementPlace, element: int, value: Expr) -> None:
            if self.kernel.geometry.ragged_n:
                at = self.kernel.global_column(self.step, self.fragment.column(place)) + element
                value = T.if_then_else(at < self.kernel.spec.n, value, f32(IDENTITY[op]))
            value = value * value if squared else value
            store(target, COMBINE[op](target[place.row], value), place.row)

        return Action(block, apply)

    def send_tile(self, block: Any, dtype: str, tile: int) -> Action:
        """A value in half precision, to a staging tile."""
        kernel = self.kernel
        words = registers([4], "uint32", "words")

        def put(place: ElementPlace, word: Expr) -> None:
            store(words, word, place.matrix)

        def finish(box: Expr, rows: int, chunks: int) -> None:
            address = operands.matrix_address(kernel, tile, rows, box, chunks)
            stmatrix = T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"]
            do(stmatrix(address, *[words[i] for i in range(4)]))

        return Action(block, put=put, dtype=dtype, finish=finish)

    def park(self, parked: Any) -> Action:
        """The carried value to the registers where it waits for row values."""
        pair = registers([2], "float32", "result")

        def apply(place: ElementPlace, element: int, value: Expr) -> None:
            store(pair, value, element)
            if element == 1:
                parked.put(place, pair[0], pair[1])

        return Action(None, apply)

    def send_global(self, block: Any, output: Any) -> Action:
        """A result straight to global memory, all neighbours of a lane with one store."""
        rows = operands.GlobalRows(self.kernel, output, self.step)
        if rows.dtype == "float32":
            return self._send_floats(block, rows)
        return self._send_eights(block, rows) if self.fragment.quads else self._send_words(block, rows)

    def _send_floats(self, block: Any, rows: operands.GlobalRows) -> Action:
        pair = registers([2], "float32", "result")

        def apply(place: ElementPlace, element: int, value: Expr) -> None:
            store(pair, value, element)
            if element == 1:
                with self.kernel.when(rows.inside(place)):
                    do(T.ptx.st.global_.v2.f32(rows.address(place), pair[0], pair[1]))

        return Action(block, apply)

    def _send_words(self, block: Any, rows: operands.GlobalRows) -> Action:
        words = registers([1], "uint32", "words")

        def put(place: ElementPlace, word: Expr) -> None:
            store(words, word, 0)
            with self.kernel.when(rows.inside(place)):
                do(T.ptx.st.global_.u32(rows.address(place), words[0]))

        return Action(block, put=put, dtype=rows.dtype)

    def _send_eights(self, block: Any, rows: operands.GlobalRows) -> Action:
        # eight neighbours come from two pairs of chunks, with every block of rows in between
        words = registers([self.fragment.rows, 4], "uint32", "words")

        def put(place: ElementPlace, word: Expr) -> None:
            store(words, word, place.row, place.word)

        def finish(box: Expr, block_of_rows: int, chunks: int) -> None:
            if chunks % 2 == 0:
                return
            for half in range(2):
                first = ElementPlace(box, chunks - 1, 0, block_of_rows, half)
                with self.kernel.when(rows.inside(first)):
                    do(T.ptx.st.global_.v4.u32(rows.address(first), *[words[first.row, word] for word in range(4)]))

        return Action(block, put=put, dtype=rows.dtype, finish=finish)
