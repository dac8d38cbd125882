"""Faults of addresses: tensor maps, boxes, swizzle, descriptors, tiles in shared memory."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.verify.faults.changes import Match, argument, number, replace
from tvm_comfuse.verify.faults.ordering import named
from tvm_comfuse.verify.faults.registry import add
from tvm_comfuse.verify.rewrite import Stmt, call_of, is_on, map_expr, map_exprs, name_of, with_args
from tvm_comfuse.verify.static.index import variables

LOAD, STORE = "cp_async_bulk_tensor_g2s_cluster", "cp_async_bulk_tensor_s2g"
ENCODE = "wgmma_encode_matrix_descriptor"
#: position of the rank among the arguments of the call that encodes a tensor map; behind it the address, for each dimension
#: a size, for each but the first a stride, for each a box extent and a step, then interleave, swizzle, promotion and fill
_RANK = 3


def encodes(name: str) -> Match:
    """Matches the making of a tensor map."""

    def match(node: Stmt) -> bool:
        call = call_of(node)
        return name_of(node) == "tvm_call_packed" and len(call.args) > _RANK and str(call.args[1].name) == name

    return match


def _rank(node: Stmt) -> int:
    return int(call_of(node).args[_RANK])


def _stride(node: Stmt) -> int:
    """Position of the first stride."""
    return _RANK + 2 + _rank(node)


def _box_columns(node: Stmt) -> int:
    return _stride(node) + _rank(node) - 1


def _box_rows(node: Stmt) -> int:
    """Position of the box's extent in the last dimension."""
    return _box_columns(node) + _rank(node) - 1


def _swizzle(node: Stmt) -> int:
    return _box_rows(node) + _rank(node) + 2


def _is_product(node: Stmt) -> bool:
    call = call_of(node)
    return name_of(node).startswith("wgmma_") and len(call.args) > 20


def _maps() -> None:
    add(
        "swizzle-none",
        "static",
        "A is loaded without a swizzle",
        argument(encodes("a_map"), _swizzle, number(lambda _: 0)),
    )
    add(
        "swizzle-64",
        "static",
        "W is loaded with a 64-byte swizzle",
        argument(encodes("w_map"), _swizzle, number(lambda _: 2)),
    )
    add(
        "box-rows-half",
        "static",
        "boxes of A have half the rows",
        argument(encodes("a_map"), _box_rows, number(lambda rows: rows // 2)),
    )
    add(
        "box-rows-too-many",
        "static",
        "boxes of W have more rows than TMA takes",
        argument(encodes("w_map"), _box_rows, number(lambda rows: 320)),
    )
    add(
        "box-columns-half",
        "static",
        "boxes of A have half a row of the swizzle",
        argument(encodes("a_map"), _box_columns, number(lambda columns: columns // 2)),
    )
    add(
        "stride-odd",
        "static",
        "a row stride that is no multiple of 16 bytes",
        argument(encodes("w_map"), _stride, number(lambda stride: stride + 8)),
    )
    add(
        "stride-twice",
        "interpreter",
        "W is read with every second row left out",
        argument(encodes("w_map"), _stride, number(lambda stride: 2 * stride)),
    )
    add("column-off", "static", "boxes of A begin 8 columns later", argument(_loads("a_map"), 2, lambda old: old + 8))
    add("row-off", "interpreter", "boxes of A begin one row later", argument(_loads("a_map"), 3, lambda old: old + 1))


def _loads(name: str) -> Match:
    def match(node: Stmt) -> bool:
        return name_of(node) == LOAD and name in _names(call_of(node).args[1])

    return match


def _names(expr: Any) -> list[str]:
    return [str(variable.name) for variable in variables(expr)]


def _operand(which: int, change: Any, nth: int | None = None) -> Any:
    """Change of a descriptor operand (0: A, 1: B) of the products; the operands stand before five flags and the words."""

    def on(node: Stmt) -> list[Stmt]:
        call = call_of(node)
        at = next(n for n, a in enumerate(call.args) if not isinstance(a, tvm.ir.TensorLoad)) + which
        args = list(call.args)
        args[at] = change(args[at])
        return [tirx.Evaluate(with_args(call, args))]

    return replace(_is_product, on, nth)


def _descriptors() -> None:
    add(
        "descriptor-stride",
        "static",
        "a descriptor has the stride of a 64-byte swizzle",
        argument(named(ENCODE), 3, number(lambda stride: stride // 2), 0),
    )
    add(
        "descriptor-swizzle",
        "static",
        "a descriptor has the code of a 64-byte swizzle",
        argument(named(ENCODE), 4, number(lambda code: 2), 1),
    )
    add(
        "descriptor-k-step",
        "interpreter",
        "the second product of a slot reads columns of the third",
        _operand(0, lambda old: old + tirx.IntImm("uint64", 2), 1),
    )
    add("slot-off-by-one", "interpreter", "products read the slot behind the one they waited for", _slot_off)
    add("slot-stride", "static", "descriptors take slots for half as far apart", _slot_stride)
    add(
        "resident-tile-other",
        "interpreter",
        "products read the tile of W behind the one they need",
        _resident_tile(1, 1),
    )
    add(
        "resident-stride",
        "static",
        "descriptors take the tiles of a W that stays for half as far apart",
        _resident_tile(0, 2),
    )
    add("overwrite-never", "interpreter", "the first product adds to what the accumulators held", _scale(False))
    add("overwrite-always", "interpreter", "each slot's products overwrite those of the slot before", _scale(True))


def _slot_off(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        if isinstance(node, tvm.ir.TensorLoad) and str(node.source.name) == "read_slot":
            return node + 1
        return None

    return map_exprs(kernel, change, _is_product)


def _slot_stride(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        if isinstance(node, tirx.Mul) and isinstance(node.a, tvm.ir.TensorLoad) and isinstance(node.b, tirx.IntImm):
            return tirx.Mul(node.a, tirx.IntImm("int32", int(node.b) // 2))
        return None

    return map_exprs(kernel, change, _is_product)


def _resident_tile(further: int, divisor: int) -> Any:
    """With tile k of a W that stays taken for tile k + further, of tiles so many times smaller."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        def change(node: Any) -> Any:
            if isinstance(node, tirx.Mul) and _is_tile_number(node.a) and isinstance(node.b, tirx.IntImm):
                return tirx.Mul(node.a + further, tirx.IntImm("int32", int(node.b) // divisor))
            return None

        return map_exprs(kernel, change, _is_product)

    return apply


def _is_tile_number(expr: Any) -> bool:
    """k, or k and a constant in the loops behind the first slots."""
    return isinstance(expr, tirx.Var) or (isinstance(expr, tirx.Add) and isinstance(expr.a, tirx.Var))


def _scale(overwrite: bool) -> Any:
    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        def change(node: Any) -> Any:
            return tirx.IntImm("bool", int(not overwrite)) if isinstance(node, tirx.Not) else None

        return map_exprs(kernel, change, _is_product)

    return apply


def _tiles() -> None:
    add("tile-misaligned", "static", "the ring's A tile begins 128 bytes later", _shift(LOAD, "full", 128))
    add(
        "tile-overlap",
        "interpreter",
        "operands' tiles lie 1024 bytes lower, in the ring",
        _shift(LOAD, "tile_full", -1024),
    )
    add("tile-outside", "static", "operands' tiles reach behind the shared memory", _shift(LOAD, "tile_full", 1 << 18))
    add("result-tile-off", "interpreter", "TMA stores the tile 1024 bytes behind the result", _shift_store)
    add(
        "tile-swizzle-missing",
        "interpreter",
        "stages read and write staging tiles as if they were not swizzled",
        _plain,
    )


def _moved_address(expr: Any, distance: int) -> Any:
    def change(node: Any) -> Any:
        if isinstance(node, tvm.ir.TensorLoad):
            return tirx.BufferLoad(node.source, [node.indices[0] + distance])
        return None

    return map_expr(expr, change)


def _shift(name: str, barrier: str, distance: int) -> Any:
    return argument(lambda node: is_on(node, barrier, name), 0, lambda old: _moved_address(old, distance))


def _shift_store(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    return argument(named(STORE), 3, lambda old: _moved_address(old, 1024))(kernel)


def _plain(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        return node.a if isinstance(node, tirx.BitwiseXor) else None

    return map_exprs(kernel, change, lambda node: name_of(node).startswith(("ldmatrix", "ld")))


for _make in (_maps, _descriptors, _tiles):
    _make()
