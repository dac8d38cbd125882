"""Where a warp group holds the carried value of its tile: in the accumulators, or, while it waits for row values behind the
next main loop, in half as many registers."""

from __future__ import annotations

from typing import Any

from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.dsl import registers, store
from tvm_comfuse.tir_passes.emit.fragment import ElementPlace

Expr = Any


class InAccumulators:
    """The float32 result of wgmma, for the whole tile."""

    registers_of_pair = 0

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def load(self, box: Expr, pairs: range) -> None:
        """Nothing to do: it is there."""

    def read(self, place: ElementPlace, element: int) -> Expr:
        """An element."""
        return self.kernel.acc[self.kernel.fragment.accumulator(place, element)]

    def write(self, place: ElementPlace, element: int, value: Expr) -> None:
        """Puts `value` in the element's place."""
        store(self.kernel.acc, value, self.kernel.fragment.accumulator(place, element))


class Parked:
    """The whole tile in half precision, less an offset of each row.

    words    registers [rows, chunks] of two neighbours each
    offsets  registers [rows]: numbers near the carried values of a row, which make the half-precision ones the more exact
    """

    def __init__(self, kernel: Any, fragment: Any):
        self.dtype = kernel.spec.x_dtype
        self.words = registers([fragment.rows, fragment.tile_n // 8], "uint32", "parked")
        self.offsets = registers([fragment.rows], "float32", "offsets")

    def put(self, place: ElementPlace, low: Expr, high: Expr) -> None:
        """Two neighbours."""
        offset = self.offsets[place.row]
        operands.pack(self.words[place.row, place.chunk], low - offset, high - offset, self.dtype)

    def get(self, place: ElementPlace) -> list[Expr]:
        """Two neighbours as float32."""
        halves = operands.unpack(self.words[place.row, place.chunk], self.dtype)
        return [half + self.offsets[place.row] for half in halves]


class InParked:
    """Parked values, in float32 registers while their pairs of chunks are worked on."""

    def __init__(self, kernel: Any, parked: Parked):
        self.kernel, self.parked = kernel, parked
        self.registers_of_pair = 8 * kernel.fragment.blocks

    def load(self, box: Expr, pairs: range) -> None:
        """Brings some pairs of chunks of a box into registers."""
        self.first = pairs[0]
        fragment = self.kernel.fragment
        self.values = registers([fragment.rows, len(pairs), 2, 2], "float32", "carried")
        for place in operands.places(fragment, box, pairs):
            for element, value in enumerate(self.parked.get(place)):
                store(self.values, value, *self._index(place, element))

    def read(self, place: ElementPlace, element: int) -> Expr:
        """An element of the loaded pairs."""
        return self.values[self._index(place, element)]

    def write(self, place: ElementPlace, element: int, value: Expr) -> None:
        """Puts `value` in its place."""
        store(self.values, value, *self._index(place, element))

    def _index(self, place: ElementPlace, element: int) -> tuple[int, int, int, int]:
        return place.row, place.pair - self.first, place.side, element
