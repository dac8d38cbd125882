"""Where a warp group holds the carried value of its tile: in the accumulators, or, while it waits for row values behind the
next main loop, in half as many registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.dsl import registers, store
from tvm_comfuse.tir_passes.emit.expressions import Affine
from tvm_comfuse.tir_passes.emit.fragment import ElementPlace
from tvm_comfuse.tir_passes.emit.instructions import packed_of
from tvm_comfuse.tir_passes.emit.packed import affine_word

Expr = Any


class InAccumulators:
    """The float32 result of wgmma, for the whole tile."""

    registers_of_pair = 0

    def __init__(self, kernel: Any):
        self.kernel, self.written = kernel, False

    def load(self, box: Expr, pairs: range) -> None:
        """Nothing to do: it is there."""

    def read(self, place: ElementPlace, element: int) -> Expr:
        """An element."""
        return self.kernel.acc[self.kernel.fragment.accumulator(place, element)]

    whole = read

    def packed(self, place: ElementPlace, value: Affine, hoist: Callable[[Expr], Expr]) -> Expr:
        """The word of two neighbours, after what is done to both in float32."""
        scale, shift = (None if each is None else hoist(each) for each in (value.scale, value.plain_shift))
        pair = [self.read(place, element) for element in range(2)]
        pair = pair if scale is None else [each * scale for each in pair]
        pair = pair if shift is None else [each + shift for each in pair]
        return packed_of(pair[0], pair[1], self.kernel.spec.x_dtype)

    def offset(self, place: ElementPlace) -> Expr | None:
        """An element is what its register has."""
        return None

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

    def get(self, place: ElementPlace) -> tuple[Expr, Expr]:
        """Two neighbours as float32, less their offset."""
        return operands.unpack(self.words[place.row, place.chunk], self.dtype)


class InWords:
    """Parked values, two neighbours a word, as packed arithmetic takes them."""

    registers_of_pair = 0

    def __init__(self, kernel: Any, parked: Parked):
        self.parked, self.written = parked, False

    def load(self, box: Expr, pairs: range) -> None:
        """Nothing to do: they are there."""

    def offset(self, place: ElementPlace) -> Expr:
        """What an element lacks."""
        return self.parked.offsets[place.row]

    def packed(self, place: ElementPlace, value: Affine, hoist: Callable[[Expr], Expr]) -> Expr:
        """The word of two neighbours, after what is done to both."""
        return affine_word(self.parked.words[place.row, place.chunk], value, hoist, self.parked.dtype)


class InParked:
    """Parked values, in float32 registers while their pairs of chunks are worked on."""

    def __init__(self, kernel: Any, parked: Parked):
        self.kernel, self.parked, self.written = kernel, parked, False
        self.registers_of_pair = 8 * kernel.fragment.blocks

    def load(self, box: Expr, pairs: range) -> None:
        """Brings some pairs of chunks of a box into registers."""
        self.first, self.written = pairs[0], False
        fragment = self.kernel.fragment
        self.values = registers([fragment.rows, len(pairs), 2, 2], "float32", "carried")
        for place in operands.places(fragment, box, pairs):
            for element, value in enumerate(self.parked.get(place)):
                store(self.values, value, *self._index(place, element))

    def read(self, place: ElementPlace, element: int) -> Expr:
        """What the register of an element of the loaded pairs has."""
        return self.values[self._index(place, element)]

    def offset(self, place: ElementPlace) -> Expr | None:
        """What it lacks: nothing once a pass has written the carried value anew."""
        return None if self.written else self.parked.offsets[place.row]

    def whole(self, place: ElementPlace, element: int) -> Expr:
        """An element."""
        offset = self.offset(place)
        return self.read(place, element) if offset is None else self.read(place, element) + offset

    def write(self, place: ElementPlace, element: int, value: Expr) -> None:
        """Puts `value` in its place."""
        store(self.values, value, *self._index(place, element))

    def _index(self, place: ElementPlace, element: int) -> tuple[int, int, int, int]:
        return place.row, place.pair - self.first, place.side, element
