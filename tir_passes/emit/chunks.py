"""Eight neighbouring columns of a row: what a lane of a rows kernel loads and stores at a time, 16 bytes in half precision."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.rows import CHUNK
from tvm_comfuse.tir_passes.emit.dsl import do, f32, registers, store, u32, when
from tvm_comfuse.tir_passes.emit.operands import pack, unpack

Expr = Any
#: registers that one 16-byte access fills
ACCESS = 4


class Chunks:
    """Registers with some chunks of one tensor, as they are in memory.

    count  of chunks
    """

    def __init__(self, dtype: str, count: int, name: str):
        self.dtype, self.is_float = dtype, dtype == "float32"
        shape, kind = ([count, CHUNK], "float32") if self.is_float else ([count, CHUNK // 2], "uint32")
        self.cells = registers(shape, kind, name)
        self.words = shape[1]

    def load(self, chunk: int, address: Expr, inside: Expr | None) -> None:
        """Chunk number `chunk` from `address`; zeros where it is not `inside` (None: it always is)."""
        if inside is None:
            self._load(chunk, address)
            return
        for word in range(self.words):
            store(self.cells, f32(0.0) if self.is_float else u32(0), chunk, word)
        with when(inside):
            self._load(chunk, address)

    def _load(self, chunk: int, address: Expr) -> None:
        get = T.ptx.ld.global_.v4.f32 if self.is_float else T.ptx.ld.global_.v4.u32
        for first in range(0, self.words, ACCESS):
            cells = [self.cells[chunk, first + word] for word in range(ACCESS)]
            do(get(*cells, T.handle_add_byte_offset(address, first * 4)))

    def element(self, chunk: int, element: int) -> Expr:
        """One element as float32."""
        if self.is_float:
            return self.cells[chunk, element]
        return unpack(self.cells[chunk, element // 2], self.dtype)[element % 2]

    def put(self, chunk: int, values: Any) -> None:
        """Eight float32 registers, rounded to the tensor's dtype."""
        for word in range(self.words):
            if self.is_float:
                store(self.cells, values[word], chunk, word)
            else:
                pack(self.cells[chunk, word], values[2 * word], values[2 * word + 1], self.dtype)

    def send(self, chunk: int, address: Expr, inside: Expr) -> None:
        """A chunk to `address`, if it is `inside`."""
        put = T.ptx.st.global_.v4.f32 if self.is_float else T.ptx.st.global_.v4.u32
        with when(inside):
            for first in range(0, self.words, ACCESS):
                cells = [self.cells[chunk, first + word] for word in range(ACCESS)]
                do(put(T.handle_add_byte_offset(address, first * 4), *cells))
