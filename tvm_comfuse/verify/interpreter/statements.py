"""From statements to the Python source of one role: a generator function of an actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.expressions import Context, Local
from tvm_comfuse.verify.interpreter.stamp_calls import StampCalls
from tvm_comfuse.verify.interpreter.tree import Buffer, Expr, Stmt, UnsupportedError, show
from tvm_comfuse.verify.interpreter.values import FLOATS, Value

#: fresh registers: as a word, as bfloat16 and as float16 this is a NaN
POISON = {"uint32": 0x7FC07FC0, "int32": -559038737, "uint64": 0x7FC07FC07FC07FC0}
#: registers that are one number for all lanes unless a store shows that they are not: loop state and descriptors
OFTEN_UNIFORM = ("int32", "int64", "uint64")


class Statements(StampCalls):
    """Writes a role."""

    def __init__(self, lanes: int, tensors: dict, accumulators: set, maps: dict, varying: set[Buffer]):
        super().__init__(lanes, tensors, accumulators, maps)
        #: buffers that are known to differ between lanes; grows, and a growth makes the caller start again
        self.varying = varying

    def block(self, stmts: list[Stmt], context: Context) -> None:
        """Statements in order."""
        for stmt in stmts:
            self.checked.clear()
            getattr(self, f"_{stmt.kind}")(stmt, context)

    def _alloc(self, stmt: Stmt, context: Context) -> None:
        buffer = stmt.value
        uniform = context.lane is not None or (buffer.size == 1 and buffer.dtype in OFTEN_UNIFORM)
        self.count += 1
        cells = Local(f"r{self.count}", buffer, not uniform or buffer in self.varying, context.lane)
        self.locals[buffer] = cells
        self.emit(f"{cells.valid} = [False] * {buffer.size}")
        if not cells.varying:
            self.emit(f"{cells.name} = [None] * {buffer.size}")
            return
        fill = "nan" if buffer.dtype in FLOATS else str(POISON.get(buffer.dtype, 0))
        self.emit(f"{cells.name} = np.full(({buffer.size}, {self.lanes}), {fill}, {self.dtype(buffer.dtype)})")

    def _bind(self, stmt: Stmt, context: Context) -> None:
        if self.is_pointer(stmt.args[0]):
            self.keep_pointer(stmt.value, stmt.args[0], context)
            return
        value = self.value(stmt.args[0], context)
        if not value.is_known:
            value = Value(self.temporary(value.code, "b"), value.varying)
        self.environment[stmt.value] = value

    def _eval(self, stmt: Stmt, context: Context) -> None:
        self.instruction(stmt.args[0], context)

    def _store(self, stmt: Stmt, context: Context) -> None:
        *indices, source = stmt.args
        buffer, where = stmt.value, repr(f"store {show(Expr('load', '', list(stmt.args[:-1]), stmt.value))}")
        value = self.value(source, context)
        if buffer.scope == "local":
            self.write(self.locals[buffer], self.index(buffer, indices, context), value, context)
        elif buffer.scope == "global":
            at = ", ".join(self.code(index, context) for index in indices)
            self.emit(f"ag.store_global({self.tensors[buffer]}, ({at},), [{value.code}], {context.argument}, {where})")
        else:
            address = self.byte_address(buffer, indices, context).code
            dtype = self.dtype(buffer.dtype)
            self.emit(f"ag.store_shared({address}, [{value.code}], {dtype}, {context.argument}, {where})")

    def write(self, cells: Local, index: Value, value: Value, context: Context) -> None:
        """Stores to a register."""
        if index.varying:
            raise UnsupportedError(f"an index of the registers {cells.buffer.name} that differs between lanes")
        if cells.buffer in self.accumulators:
            self.check_flight(cells)
            self.emit("ag.need_fence = True")
        place = f"{cells.name}[{index.code}]"
        if not cells.varying:
            if value.varying or context.mask is not None or context.lane != cells.lane:
                self.varying.add(cells.buffer)
            self.emit(f"{place} = {value.code}")
        elif context.lane is not None:
            self.emit(f"{place}[{context.lane}] = {value.code}")
        elif context.mask is not None:
            self.emit(f"np.copyto({place}, {value.code}, where={context.mask})")
        else:
            self.emit(f"{place} = {value.code}")
        self.emit(f"{cells.valid}[{index.code}] = True")

    def _for(self, stmt: Stmt, context: Context) -> None:
        low, extent = (self.value(arg, context) for arg in stmt.args)
        if low.varying or extent.varying:
            raise UnsupportedError(f"a loop over {stmt.value.name} whose bounds differ between lanes")
        self.count += 1
        name = f"{stmt.value.name}_{self.count}"
        self.environment[stmt.value] = Value(name)
        stop = self.made(f"{low.code} + {extent.code}", [low, extent])
        self.emit(f"for {name} in range({low.code}, {stop.code}):")
        with self.indented():
            self.block(stmt.body, context)

    def _if(self, stmt: Stmt, context: Context) -> None:
        condition = self.value(stmt.args[0], context)
        if condition.varying:
            self._masked(condition, stmt, context)
        elif condition.is_known:
            self.block(stmt.body if condition.known else stmt.other, context)
        else:
            self._branch(f"if {condition.code}:", lambda: self.block(stmt.body, context))
            if stmt.other:
                self._branch("else:", lambda: self.block(stmt.other, context))

    def _masked(self, condition: Value, stmt: Stmt, context: Context) -> None:
        """A branch that lanes take differently: each side for its lanes, one after the other."""
        for code, side in ((condition.code, stmt.body), (f"~{condition.code}", stmt.other)):
            if not side:
                continue
            if condition.is_known and context.mask is None:
                self._known_mask(eval(code, self.names), side, context)
                continue
            mask = self.temporary(code if context.mask is None else f"{code} & {context.mask}", "m")
            inner = replace(context, mask=mask)
            self._branch(f"if {mask}.any():", lambda side=side, inner=inner: self.block(side, inner))  # type: ignore[misc]

    def _known_mask(self, mask: Any, side: list[Stmt], context: Context) -> None:
        lanes = np.flatnonzero(mask)
        if len(lanes) == 1:
            self.block(side, replace(context, lane=int(lanes[0])))
        elif len(lanes):
            self.block(side, replace(context, mask=self.constant(mask).code))

    def _branch(self, head: str, body: Callable[[], None]) -> None:
        self.emit(head)
        with self.indented():
            body()
