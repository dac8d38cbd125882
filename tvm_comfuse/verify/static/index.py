"""One walk over a kernel: its instructions in program order, each with the conditions and loops it stands under."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.errors import LoweringError

#: TIRx scope ids of CTAs and threads (ScopeIdDef.scope)
CLUSTER_ID, CTA_ID, CTA_IN_CLUSTER, WARP_GROUP_ID, WARP_ID, LANE_ID = 0, 1, 2, 3, 5, 6
_PTX, _CUDA = "tirx.ptx.", "tirx.cuda."
TAKE = "comfuse_take_"
TENSOR_MAP_ENCODE, TENSOR_LOAD = "runtime.cuTensorMapEncodeTiled", "cp_async_bulk_tensor_g2s_cluster"
#: rank of the map of a plain matrix; rows that the last part of a split row number counts
MATRIX, QUAD_ROWS = 2, 32


@dataclass(eq=False)
class Guard:
    """A condition and the branch taken."""

    condition: Any
    holds: bool


@dataclass(eq=False)
class Loop:
    """A loop; depth counts from the outermost."""

    variable: Any
    extent: Any
    unrolled: bool
    depth: int


@dataclass(eq=False)
class Instruction:
    """One call with an effect.

    name    the operator without its dialect, e.g. ``mbarrier_init``; of an own CUDA wrapper its function name
    words   the instruction's modifiers, e.g. ``("cta", "sync", "aligned")``
    args    its operands
    nest    guards and loops from the outermost to the innermost
    order   position in the program
    """

    name: str
    words: tuple[str, ...]
    args: tuple[Any, ...]
    nest: tuple[Guard | Loop, ...]
    order: int
    call: Any

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around it, outermost first."""
        return tuple(level for level in self.nest if isinstance(level, Loop))

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions around it, outermost first."""
        return tuple(level for level in self.nest if isinstance(level, Guard))

    @property
    def is_product(self) -> bool:
        """Whether it is a wgmma."""
        return self.name.startswith("wgmma_") and self.words[:1] == ("mma_async",)

    @property
    def shown(self) -> str:
        """Its name with modifiers, as in PTX."""
        return ".".join([self.name, *(word for word in self.words if word)])


@dataclass(eq=False)
class Store:
    """buffer[indices] = value."""

    buffer: Any
    indices: tuple[Any, ...]
    value: Any
    nest: tuple[Guard | Loop, ...]
    order: int


@dataclass(eq=False)
class TensorMap:
    """Arguments of a tensor map: what TMA knows of a matrix.  Sizes in elements, strides in bytes.

    fields, strides, box  of a map whose rows are taken in another order: extents of the parts of a row number but the last,
                          strides of all parts, and what a box has of each
    """

    variable: Any
    dtype: str
    rank: int
    data: Any
    columns: Any
    rows: Any
    stride: Any
    box_columns: int
    box_rows: int
    interleave: int
    swizzle: int
    fill: int
    fields: tuple[int, ...] = ()
    strides: tuple[Any, ...] = ()
    box: tuple[int, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return tvm.DataType(self.dtype).bits // 8

    @property
    def inner_bytes(self) -> int:
        """Bytes of one row of the box."""
        return self.box_columns * self.element_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that land for one box, those outside the matrix included."""
        return self.inner_bytes * self.box_rows


@dataclass(eq=False)
class KernelIndex:
    """Everything the checks ask about a kernel.

    scopes       variable and extent of cluster or CTA, rank, warp group, warp and lane, by ScopeIdDef.scope
    allocations  buffer and position
    binds        immutable locals and their values
    ifs          condition, what it stands under, positions of the first and the last statement of its first branch
    """

    kernel: tirx.PrimFunc
    scopes: dict[int, tuple[Any, int]] = field(default_factory=dict)
    allocations: list[tuple[Any, int]] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    tensor_maps: list[TensorMap] = field(default_factory=list)
    binds: list[tuple[Any, Any]] = field(default_factory=list)
    ifs: list[tuple[Guard, tuple[Guard | Loop, ...], int, int]] = field(default_factory=list)

    def named(self, *names: str) -> list[Instruction]:
        """The instructions of some names, in program order."""
        return [instruction for instruction in self.instructions if instruction.name in names]

    def takes(self, memory: str) -> list[Instruction]:
        """The waits for mailboxes in ``cluster`` (shared) or ``grid`` (global) memory; their names end in a number of slots."""
        return [instruction for instruction in self.instructions if instruction.name.startswith(TAKE + memory)]

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.scopes[CTA_IN_CLUSTER][1] if CTA_IN_CLUSTER in self.scopes else 1

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        outer = self.scopes.get(CLUSTER_ID) or self.scopes.get(CTA_ID)
        return (outer[1] if outer else 1) * self.cluster_size

    @property
    def warp_groups(self) -> int:
        """Warp groups of a CTA."""
        return self.scopes[WARP_GROUP_ID][1] if WARP_GROUP_ID in self.scopes else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warp_groups * 128

    @cached_property
    def cta_variable(self) -> Any:
        """The variable that tells clusters, or CTAs where there are none, apart."""
        outer = self.scopes.get(CLUSTER_ID) or self.scopes.get(CTA_ID)
        return outer[0] if outer else None

    @cached_property
    def symbolic(self) -> list[Any]:
        """Variables in the shapes of the parameters."""
        found: list[Any] = []
        for param in self.kernel.params:
            for extent in getattr(param, "shape", ()):
                tvm_ffi.structural_walk(extent, [(tirx.Var, found.append)])
        return list(dict.fromkeys(found))

    @cached_property
    def rings(self) -> dict[Any, int]:
        """Cursors: mutable scalars that index barriers, each with the number of barriers."""
        found: dict[Any, int] = {}
        for instruction in self.instructions:
            if instruction.name.startswith("mbarrier_"):
                buffer, at = accessed(instruction.args[0])
                for load in loads(at):
                    found[load.source] = max(found.get(load.source, 1), int(buffer.shape[0]))
        return found

    def map_of(self, argument: Any) -> TensorMap | None:
        """The tensor map that an operand points to."""
        found = variables(argument)
        return next((tensor_map for tensor_map in self.tensor_maps if tensor_map.variable in found), None)


def variables(expr: Any) -> list[Any]:
    """Every variable in an expression; buffers are variables too."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, [(tirx.Var, found.append)])
    return found


def loads(expr: Any) -> list[Any]:
    """Every load in an expression."""
    # most operands are leaves, and setting up a walk costs more than they do
    if isinstance(expr, tvm.ir.TensorLoad) and all(isinstance(index, tirx.IntImm) for index in expr.indices):
        return [expr]
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm, tirx.Var)):
        return []
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, found.append)])
    return found


def accessed(address: Any) -> tuple[Any, Any]:
    """(buffer, index) that an address expression points to.  Raises LoweringError for one with several loads or none."""
    node = address
    while isinstance(node, tvm.ir.Call) and getattr(node.op, "name", "") in (
        "tirx.cuda.cvta_generic_to_shared",
        "tirx.reinterpret",
        "tirx.address_of",
    ):
        node = node.args[0]
    if isinstance(node, tvm.ir.TensorLoad) and len(node.indices) == 1:
        return node.source, node.indices[0]
    raise LoweringError("an address of one element of a buffer", str(address), "use ptr_to in the emitter")


def index_of(kernel: tirx.PrimFunc) -> KernelIndex:
    """Walks the kernel once.  Raises LoweringError for a statement that the emitter does not make."""
    result = KernelIndex(kernel)
    walker = _Walker(result)
    walker.statement(kernel.body, ())
    return result


class _Walker:
    def __init__(self, index: KernelIndex):
        self.index, self.order = index, 0

    def statement(self, node: Any, nest: tuple[Guard | Loop, ...]) -> None:
        """Visits one statement."""
        self.order += 1
        if isinstance(node, tirx.SeqStmt):
            for child in node.seq:
                self.statement(child, nest)
        elif isinstance(node, tirx.AttrStmt):
            self.statement(node.body, nest)
        elif isinstance(node, tirx.For):
            depth = sum(isinstance(level, Loop) for level in nest)
            loop = Loop(node.loop_var, node.extent, int(node.kind) == int(tirx.ForKind.UNROLLED), depth)
            self.statement(node.body, (*nest, loop))
        elif isinstance(node, tirx.IfThenElse):
            self._branch(node, nest)
        elif isinstance(node, tirx.Evaluate):
            self._calls(node.value, nest)
        elif isinstance(node, tirx.BufferStore):
            self._calls(node.value, nest)
            self.index.stores.append(Store(node.buffer, tuple(node.indices), node.value, nest, self.order))
        elif isinstance(node, tirx.AllocBuffer):
            self.index.allocations.append((node.buffer, self.order))
        elif type(node).__name__ == "ScopeIdDefStmt":
            definition = getattr(node, "def")
            (variable,), (extent,) = definition.def_ids, definition.extents
            self.index.scopes[int(definition.scope)] = (variable, int(extent))
        elif isinstance(node, tirx.Bind):
            self._calls(node.value, nest)
            self.index.binds.append((node.var, node.value))
        elif not isinstance(node, tirx.DeclBuffer):
            raise LoweringError(
                "a statement the verifier knows", type(node).__name__, "teach verify.static.index of it"
            )

    def _branch(self, node: Any, nest: tuple[Guard | Loop, ...]) -> None:
        start, guard = self.order, Guard(node.condition, True)
        self._calls(node.condition, nest)
        self.statement(node.then_case, (*nest, guard))
        self.index.ifs.append((guard, nest, start, self.order))
        if node.else_case is not None:
            self.statement(node.else_case, (*nest, Guard(node.condition, False)))

    def _calls(self, value: Any, nest: tuple[Guard | Loop, ...]) -> None:
        """The instructions in an expression: nested ones (a mailbox take in a store) come before what uses them."""
        for call in _effects(value):
            if call.op.name == "tirx.tvm_call_packed":
                self._packed(call)
                continue
            words = [a for a in call.args if isinstance(a, tvm.ir.StringImm)]
            name = call.op.name.removeprefix(_PTX).removeprefix(_CUDA).removeprefix("tirx.")
            operands = tuple(a for a in call.args if not isinstance(a, tvm.ir.StringImm))
            if name == "func_call":
                name, words = str(words[0].value), []
            modifiers = tuple(str(word.value) for word in words)
            if name == TENSOR_LOAD and "5d" in modifiers:
                operands = _as_matrix_load(operands)
            self.index.instructions.append(Instruction(name, modifiers, operands, nest, self.order, call))

    def _packed(self, call: Any) -> None:
        if str(call.args[0].value) != TENSOR_MAP_ENCODE:
            return
        _, variable, dtype, rank, data, *numbers = call.args
        rank = int(rank)
        sizes, strides, numbers = numbers[:rank], numbers[rank : 2 * rank - 1], numbers[2 * rank - 1 :]
        box, rest = [int(n) for n in numbers[:rank]], [int(n) for n in numbers[2 * rank :]]
        rows = sizes[1]
        for size in sizes[2:]:
            rows = rows * size
        self.index.tensor_maps.append(
            TensorMap(
                variable,
                str(dtype.value),
                rank,
                data,
                sizes[0],
                rows,
                strides[0],
                box[0],
                math.prod(box[1:]),
                rest[0],
                rest[1],
                rest[3],
                tuple(int(n) for n in sizes[1:-1]) if rank > MATRIX else (),
                tuple(strides),
                tuple(box[1:]),
            )
        )


def _as_matrix_load(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """A load by a map whose rows are split into parts, as one of a matrix: it begins at whole values of the last part."""
    smem, tensor_map, column, *inner, last, barrier = operands[:8]
    if any(not isinstance(part, tirx.IntImm) or int(part) != 0 for part in inner):
        raise LoweringError(
            "a load that begins at 0 in all inner parts of a row number", str(inner), "see emit/producer.py"
        )
    return (smem, tensor_map, column, last * QUAD_ROWS, barrier, *operands[8:])


#: calls that only compute a value from their operands
_PURE = {"tirx.cuda.cvta_generic_to_shared"}


def _effects(value: Any) -> Iterator[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        name = getattr(node.op, "name", "")
        if name in _PURE:
            return
        if name.startswith((_PTX, _CUDA)) or name in ("tirx.tvm_warp_shuffle_xor", "tirx.tvm_call_packed"):
            found.append(node)

    tvm_ffi.structural_walk(value, [(tvm.ir.Call, visit)])
    # structural_walk visits a call before its operands
    return reversed(found)
