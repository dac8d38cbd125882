"""The stages of a cluster on the registers of one MMA warp group.

A pass walks the thread's elements once.  In it an element's carried value is updated, results leave, and reductions
accumulate: everything of a stage that does not need a row value the pass itself makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi
from tvm.script import tirx as T

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.actions import COMBINE, Action, Actions
from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store, u32, unrolled
from tvm_comfuse.tir_passes.emit.expressions import Binding, read_buffers, rebind, without_cast
from tvm_comfuse.tir_passes.emit.fragment import BOX_PAIRS, ElementPlace
from tvm_comfuse.tir_passes.emit.instructions import approximate, pin
from tvm_comfuse.tir_passes.emit.packed import Packer
from tvm_comfuse.tir_passes.emit.staging import NO_TILE

Expr = Any
SHUFFLE_MASK = 0xFFFFFFFF
HALF_BOX_PAIRS = BOX_PAIRS // 2
#: the last register of a pair of chunks, see Fragment.matrix_offset
LAST_MATRIX = 3


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


@dataclass(frozen=True)
class _Reads:
    """What passes read: positions among the [N] and the [M, N] operands, where the latter are if in global memory, and the
    row constants of each block."""

    vectors: list[int]
    tiles: list[int]
    far: dict[int, operands.GlobalRows]
    constants: dict[Any, list[Any]]


@dataclass(frozen=True)
class Near:
    """Registers [rows] for what the second reduction of a pair (`merge`) subtracts, made of the row value of `first`, and that
    parking subtracts too, so that both are one instruction."""

    merge: str
    first: str
    offsets: Any


def _no_input(home: Any) -> Expr:
    raise LoweringError("an output of one value a row that needs row values only", home.name, "report this")


class Stages(Actions):
    """Emits passes for one step of one warp group."""

    def __init__(self, kernel: Any, held: Any, rows: RowValues, columns: Any, step: Expr):
        super().__init__(kernel, held, step)
        self.rows, self.columns = rows, columns
        self.near: Near | None = None

    def sweep(self, passes: list[list[Action]]) -> None:
        """Passes over the thread's elements of the whole tile; a later one needs nothing that an earlier one makes of other
        elements than a few."""
        passes = [actions for actions in passes if actions]
        if not passes:
            return
        if self.kernel.plan.defer or self.fragment.half_boxes % 2:
            self.sweep_part(passes, range(self.fragment.half_boxes))
            return
        reads = self._reads(passes)
        with unrolled(self.fragment.boxes, "box") as box:
            for pairs in self._portions(range(BOX_PAIRS), reads):
                self._pairs(passes, box, pairs, self._load(box, pairs, reads), reads)

    def sweep_part(self, passes: list[list[Action]], halves: Iterable[int]) -> None:
        """As sweep, over some half boxes of the tile: 32 columns each.  What the next pairs of chunks need is asked for before
        these are worked on."""
        passes = [actions for actions in passes if actions]
        reads = self._reads(passes)
        work = [
            (half // 2, pairs)
            for half in halves
            for pairs in self._portions(range(half % 2 * HALF_BOX_PAIRS, (half % 2 + 1) * HALF_BOX_PAIRS), reads)
        ]
        ahead = self._load(*work[0], reads)
        for nth, (box, pairs) in enumerate(work):
            inputs = ahead
            if nth + 1 < len(work):
                ahead = self._load(*work[nth + 1], reads)
            self._pairs(passes, box, pairs, inputs, reads)

    def _reads(self, passes: list[list[Action]]) -> _Reads:
        blocks = [action.block for actions in passes for action in actions if action.block is not None]
        buffers = read_buffers(block.value for block in blocks)
        self.rows.renew()
        tiles = self._positions("tile", buffers)
        far = {
            index: operands.GlobalRows(self.kernel, self.kernel.tiles[index].buffer, self.step)
            for index in tiles
            if self.kernel.tiles[index].tile == NO_TILE
        }
        constants = {}
        self.held.written = False
        for actions in passes:
            for action in actions:
                if action.block is not None:
                    constants[action.block] = self._row_constants(action.block)
            self.held.written |= any(action.carries for action in actions)
        return _Reads(self._positions("col", buffers), tiles, far, constants)

    def _row_constants(self, block: Any) -> list[Any]:
        """What a block's expression has that is the same for a whole row: registers [rows] each, computed here, once.

        They are pinned: recomputed for every element they would be an instruction each, and kept the compiler's way more.
        """
        cells: list[Any] = []
        first: list[int] = []
        for row in range(self.fragment.rows):
            found: list[Expr] = []

            def hoist(value: Expr, found: list[Expr] = found) -> Expr:
                found.append(value)
                return value

            place = ElementPlace(0, 0, 0, *divmod(row, 2))
            if block.name in self.kernel.packed_blocks:
                self._packed(block, place, lambda home: u32(0), hoist)
            else:
                self._rebind(block, place, 0, lambda home: f32(0.0), hoist)
            if row == 0:
                first = [next(n for n, e in enumerate(found) if tvm_ffi.structural_equal(e, value)) for value in found]
                cells = [self._kept(value) for value in found]
            for n in sorted(set(first)):
                if self.near is not None and cells[n] is self.near.offsets:
                    continue
                store(cells[n], found[n], row)
                pin(cells[n][row])
        return [cells[n] for n in first]

    def _kept(self, value: Expr) -> Any:
        """Registers [rows] for what is the same for a whole row, as it is in the first one: those of `near` for the mean."""
        if self.near is not None and self.near.merge == "moments":
            total, one = self.rows.of(self.near.first)[0], f32(1.0 / self.kernel.spec.n)
            if any(tvm_ffi.structural_equal(value, mean) for mean in (total * one, one * total)):
                return self.near.offsets
        return registers([self.fragment.rows], "uint32" if str(value.ty) == "uint32" else "float32", "of_row")

    def _portions(self, pairs: range, reads: _Reads) -> list[range]:
        """Pairs of chunks, as many at a time as there are registers for what they need."""
        count = operands.pairs_in_flight(self.kernel, reads.vectors, reads.tiles, self.held.registers_of_pair)
        step = min(count, len(pairs))
        return [range(first, first + step) for first in range(pairs.start, pairs.stop, step)]

    def _load(self, box: Expr, pairs: range, reads: _Reads) -> operands.Inputs:
        return operands.load(self.kernel, reads.far, box, pairs, reads.vectors, reads.tiles)

    def _pairs(
        self, passes: list[list[Action]], box: Expr, pairs: range, inputs: operands.Inputs, reads: _Reads
    ) -> None:
        """Arithmetic and results of some pairs of chunks."""
        self.held.load(box, pairs)
        for actions in passes:
            for place in operands.places(self.fragment, box, pairs):
                self._apply(actions, place, inputs, reads)
            self.held.written |= any(action.carries for action in actions)

    def _apply(self, actions: list[Action], place: ElementPlace, inputs: operands.Inputs, reads: _Reads) -> None:
        for action in actions:
            if action.put is not None:
                action.put(place, self._word(action, place, inputs, reads))
            if action.apply is not None:
                for element in range(2):
                    action.apply(place, element, self._value(action.block, place, element, inputs, reads))
            if action.finish is not None and place.matrix == LAST_MATRIX:
                action.finish(place.box, place.block, place.pair)

    def _positions(self, kind: str, buffers: list[Any]) -> list[int]:
        """Positions of the operands of a kind that are among `buffers`."""
        return [
            index
            for index, buffer in enumerate(self.kernel.inputs(kind))
            if any(buffer.same_as(other) for other in buffers)
        ]

    def _word(self, action: Action, place: ElementPlace, inputs: operands.Inputs, reads: _Reads) -> Expr:
        """A block's values of two neighbours, rounded."""
        if action.block is None or action.block.name not in self.kernel.packed_blocks:
            pair = [self._value(action.block, place, element, inputs, reads) for element in range(2)]
            word = registers([1], "uint32", "word")
            operands.pack(word[0], pair[0], pair[1], action.dtype)
            return word[0]
        kept = iter(reads.constants[action.block])

        def word_of(home: Any) -> Expr:
            return (inputs.tile_word if home.kind == "tile" else inputs.vector_word)(home.index, place)

        return self._packed(action.block, place, word_of, lambda value: next(kept)[place.row])

    def _value(self, block: Any, place: ElementPlace, element: int, inputs: operands.Inputs, reads: _Reads) -> Expr:
        """A block's expression for one element; without a block, the carried value."""
        if block is None:
            return self.held.whole(place, element)
        kept = iter(reads.constants[block])

        def input_of(home: Any) -> Expr:
            if home.kind == "carried":
                return self.held.read(place, element)
            if home.kind == "tile":
                return inputs.tile(home.index, place, element)
            return inputs.vector(home.index, place, element)

        return self._rebind(block, place, element, input_of, lambda value: next(kept)[place.row])

    def _packed(
        self,
        block: Any,
        place: ElementPlace,
        word_of: Callable[[Any], Expr],
        hoist: Callable[[Expr], Expr],
    ) -> Expr:
        """The word of a block that is computed in packed half precision."""

        def load(node: Any) -> Expr | None:
            home = self.kernel.home(node.source)
            return None if home.kind == "carried" else word_of(home)

        whole = without_cast(block.value)
        binding = self._binding(block, place, 0, _no_input, hoist)
        packer = Packer(
            whole, binding, self.kernel.spec.x_dtype, load, lambda value: self.held.packed(place, value, hoist)
        )
        return packer.word(whole)

    def _rebind(
        self,
        block: Any,
        place: ElementPlace,
        element: int,
        input_of: Callable[[Any], Expr],
        hoist: Callable[[Expr], Expr],
    ) -> Expr:
        return rebind(without_cast(block.value), self._binding(block, place, element, input_of, hoist))

    def _binding(
        self,
        block: Any,
        place: ElementPlace,
        element: int,
        input_of: Callable[[Any], Expr],
        hoist: Callable[[Expr], Expr],
    ) -> Binding:
        kernel = self.kernel

        def load(node: Any) -> Expr:
            home = kernel.home(node.source)
            if home.kind == "row_value":
                if self.near is not None and self.near.merge == "softmax" and self.near.first == home.name:
                    return self.near.offsets[place.row]
                return self.rows.of(home.name)[place.row]
            if home.kind == "row":
                return self.columns[home.index, place.row]
            if home.kind == "scalar":
                return kernel.scalar_cells[home.index]
            return input_of(home)

        def of_row(node: Any) -> bool:
            return kernel.home(node.source).kind in ("row_value", "row", "scalar")

        def offset(node: Any) -> Expr | None:
            return self.held.offset(place) if kernel.home(node.source).kind == "carried" else None

        i = T.cast(kernel.global_row(self.step, place.row), str(block.i.ty.dtype))
        variables = {block.i: i}
        if block.j is not None:
            at = kernel.global_column(self.step, self.fragment.column(place)) + element
            variables[block.j] = T.cast(at, str(block.j.ty.dtype))
        binding = Binding(variables, load, of_row, hoist=hoist, offset=offset)
        if kernel.plan.fast_math:
            binding = replace(binding, function=approximate)
        return binding

    def send_row(self, block: Any, output: Any) -> None:
        """A result that has one value a row: the first lane of each quad of the first part of the row stores it."""
        kernel = self.kernel
        for row in range(self.fragment.rows):
            value = self._rebind(block, ElementPlace(0, 0, 0, *divmod(row, 2)), 0, _no_input, lambda value: value)
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
