"""Where the stages find their inputs: [N]-vectors and scalars, [M, 1] columns, [M, N] tiles."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import do, f32, loop, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.shared import swizzled

Expr = Any


def fill_vectors(kernel: Any, threads: int) -> None:
    """All threads: this CTA's columns of each [N]-vector, as float32, zeros behind N."""
    count = kernel.plan.cta_columns
    with loop(-(-count // threads), "j") as j:
        at = j * threads + kernel.cta_thread
        with when(at < count):
            column = kernel.place.column + at
            for index, buffer in enumerate(kernel.vectors):
                value = T.cast(buffer[column], "float32")
                if kernel.geometry.ragged_n:
                    value = T.if_then_else(column < kernel.spec.n, value, f32(0.0))
                store(kernel.vector_views[index], value, at)


def load_scalars(kernel: Any) -> Any:
    """Every [1] operand in a register."""
    cells = registers([max(len(kernel.scalars), 1)], "float32", "scalars")
    for index, buffer in enumerate(kernel.scalars):
        store(cells, T.cast(buffer[0], "float32"), index)
    return cells


def load_columns(kernel: Any, step: Expr) -> Any:
    """Every [M, 1] operand for the rows of this thread; zeros behind M."""
    fragment = kernel.fragment
    cells = registers([max(len(kernel.columns), 1), fragment.rows], "float32", "columns")
    for index, buffer in enumerate(kernel.columns):
        for row in range(fragment.rows):
            at = kernel.global_row(step, row)
            where = (at, 0) if len(buffer.shape) == 2 else (at,)
            value = T.if_then_else(at < kernel.place.rows, T.cast(buffer[where], "float32"), f32(0.0))
            store(cells, value, index, row)
    return cells


def vector_pair(kernel: Any, index: int, column: Expr) -> Any:
    """Two neighbouring elements of an [N]-vector from shared memory."""
    pair = registers([2], "float32", "vector")
    offset = kernel.layout.vector(index) + (kernel.group_column(kernel.group) * kernel.plan.tile_n + column) * 4
    do(T.ptx.ld.shared.v2.f32(pair[0], pair[1], kernel.smem.ptr_to([offset])))
    return pair


def tile_offset(kernel: Any, tile: int, row_index: int, chunk: Expr) -> Expr:
    """Byte offset of a thread's two elements of a chunk in a staging tile."""
    fragment = kernel.fragment
    where = swizzled(fragment.row_phase, fragment.row(row_index), chunk, fragment.tile_m)
    return kernel.layout.tile(kernel.group, tile) + where + fragment.quad_lane * 4


def tile_pair(kernel: Any, tile: int, dtype: str, row_index: int, chunk: Expr) -> Any:
    """Two neighbouring elements of a half-precision staging tile as float32."""
    word = registers([1], "uint32", "word")
    do(T.ptx.ld.shared.u32(word[0], kernel.smem.ptr_to([tile_offset(kernel, tile, row_index, chunk)])))
    pair = registers([2], "float32", "pair")
    for element, value in enumerate(unpack(word[0], dtype)):
        store(pair, value, element)
    return pair


def global_pair(kernel: Any, buffer: Any, step: Expr, row_index: int, column: Expr) -> Any:
    """Two neighbouring elements of an [M, N] operand from global memory as float32; zeros outside."""
    pair = registers([2], "float32", "pair")
    row, first = kernel.global_row(step, row_index), kernel.global_column(column)
    for element in range(2):
        value = T.cast(buffer[row, first + element], "float32")
        inside = row < kernel.place.rows
        if kernel.geometry.ragged_n:
            inside = T.And(inside, first < kernel.spec.n)
        store(pair, T.if_then_else(inside, value, f32(0.0)), element)
    return pair


def unpack(word: Expr, dtype: str) -> tuple[Expr, Expr]:
    """The two half-precision numbers in a 32-bit word as float32, low one first."""
    if dtype == "bfloat16":
        return T.reinterpret("float32", word << u32(16)), T.reinterpret("float32", word & u32(0xFFFF0000))
    low = T.reinterpret("float16", T.cast(word & u32(0xFFFF), "uint16"))
    high = T.reinterpret("float16", T.cast(word >> u32(16), "uint16"))
    return T.cast(low, "float32"), T.cast(high, "float32")


def pack(word: Any, low: Expr, high: Expr, dtype: str) -> None:
    """Rounds two float32 numbers to half precision into a 32-bit register."""
    convert = T.ptx.cvt.rn.bf16x2.f32 if dtype == "bfloat16" else T.ptx.cvt.rn.f16x2.f32
    do(convert(word, high, low))
