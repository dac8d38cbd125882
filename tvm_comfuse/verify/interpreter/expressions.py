"""From expressions to Python source: vectorised over lanes, constants folded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.tree import Buffer, Expr, UnsupportedError, show
from tvm_comfuse.verify.interpreter.values import FLOATS, MATH, TESTS, WRAP, WRAPPED, Value, namespace

Array = np.ndarray
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Context:
    """Which lanes run: all, a single one, or those of a mask (source text of an array)."""

    lane: int | None = None
    mask: str | None = None

    @property
    def argument(self) -> str:
        """The mask argument of an instruction."""
        return self.mask if self.mask is not None else repr(self.lane)


@dataclass(eq=False)
class Local:
    """Registers of an actor: a Python list if uniform, else an array [size, lanes]; `valid` tells which were written."""

    name: str
    buffer: Buffer
    varying: bool
    lane: int | None

    @property
    def valid(self) -> str:
        """Name of the list of flags."""
        return f"{self.name}_ok"


class Expressions:
    """Writes expressions; statements they need first go to `lines`."""

    def __init__(self, lanes: int, tensors: dict[Buffer, str], accumulators: set[Buffer]):
        self.lanes, self.tensors, self.accumulators = lanes, tensors, accumulators
        self.names = namespace()
        self.environment: dict[Any, Value] = {}
        self.locals: dict[Buffer, Local] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.count = 0
        #: accumulators whose completion the statement under way has checked
        self.checked: set[str] = set()
        self._pool: dict[Any, str] = {}

    # --- writing ------------------------------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        """One line at the present depth."""
        self.lines.append("  " * self.depth + line)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Lines of a block."""
        self.depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.emit("pass")
        self.depth -= 1

    def temporary(self, code: str, hint: str = "t") -> str:
        """A new local that holds `code`."""
        self.count += 1
        name = f"{hint}{self.count}"
        self.emit(f"{name} = {code}")
        return name

    def constant(self, value: Any) -> Value:
        """A value known now."""
        if isinstance(value, np.ndarray) and value.ndim:
            if value.size and (value == value[0]).all() and value.dtype.kind in "bui":
                return self.constant(value[0].item())
            key: Any = (value.dtype.str, value.tobytes())
        elif isinstance(value, (bool, int, str)):
            return Value(repr(value), False, value)
        elif isinstance(value, (np.bool_, np.integer)):
            return self.constant(value.item())
        else:
            key = (type(value), np.asarray(value).tobytes())
        if key not in self._pool:
            self._pool[key] = f"K{len(self._pool)}"
            self.names[self._pool[key]] = value
        return Value(self._pool[key], isinstance(value, np.ndarray) and value.ndim > 0, value)

    def made(self, code: str, parts: list[Value], varying: bool | None = None) -> Value:
        """A value made of others; folded if they are known."""
        if all(part.is_known for part in parts):
            return self.constant(eval(code, self.names))
        return Value(code, any(part.varying for part in parts) if varying is None else varying)

    # --- expressions --------------------------------------------------------------------------------------------------

    def value(self, expr: Expr, context: Context) -> Value:
        """Source of an expression."""
        op = expr.op
        if op == "const":
            dtype = expr.dtype
            return self.constant(FLOATS[dtype](expr.value) if dtype in FLOATS else expr.value)
        if op == "var":
            return self._variable(expr, context)
        if op == "load":
            return self.load(expr, context)
        if op == "call":
            return self.call(expr, context)
        if op == "not":
            part = self.value(expr.args[0], context)
            return self.made(f"(~{part.code})" if part.varying else f"(not {part.code})", [part])
        if op == "cast":
            return self._cast(expr, context)
        if op == "select":
            parts = [self.value(arg, context) for arg in expr.args]
            return self.made(f"select({', '.join(p.code for p in parts)})", parts)
        return self._binary(expr, context)

    def _variable(self, expr: Expr, context: Context) -> Value:
        if expr.value not in self.environment:
            raise UnsupportedError(f"variable {expr.value.name} outside of its scope")
        return self.narrowed(self.environment[expr.value], context)

    def narrowed(self, value: Value, context: Context) -> Value:
        """The value of the lane that runs alone."""
        if context.lane is None or not value.varying:
            return value
        if value.is_known:
            return self.constant(value.known[context.lane])
        return Value(f"{value.code}[{context.lane}]")

    def _cast(self, expr: Expr, context: Context) -> Value:
        source = expr.args[0]
        part = self.value(source, context)
        if source.dtype == expr.dtype or (source.op == "var" and not part.varying and expr.dtype in ("int32", "int64")):
            return part
        return self.made(f"to_dtype({part.code}, {expr.dtype!r})", [part])

    def _binary(self, expr: Expr, context: Context) -> Value:
        left, right = (self.value(arg, context) for arg in expr.args)
        varying = left.varying or right.varying
        op, a, b = expr.op, left.code, right.code
        real = expr.dtype in FLOATS
        if op in ("min", "max"):
            function = f"np.f{op}" if real else f"np.{op}imum" if varying else op
            return self.made(f"{function}({a}, {b})", [left, right])
        if op in ("and", "or"):
            sign = {"and": "&", "or": "|"}[op] if varying else op
            return self.made(f"({a} {sign} {b})", [left, right])
        if op == "/" and not real:
            op = "//"
        code = f"({a} {op} {b})"
        if not varying and expr.dtype in WRAP and op not in COMPARISONS:
            code = f"({code} & {WRAP[expr.dtype]})"
        return self.made(code, [left, right])

    # --- loads --------------------------------------------------------------------------------------------------------

    def index(self, buffer: Buffer, indices: list[Expr], context: Context) -> Value:
        """Row-major index of an element."""
        parts = [self.value(index, context) for index in indices]
        code = parts[0].code if parts else "0"
        for part, extent in zip(parts[1:], buffer.shape[1:], strict=True):
            code = f"({code} * {int(extent.value)} + {part.code})"
        return self.made(code, parts)

    def load(self, expr: Expr, context: Context) -> Value:
        """An element of a buffer."""
        buffer = expr.value
        where = repr(f"load {show(expr)}")
        if buffer.scope == "local":
            return self._register(self.locals[buffer], self.index(buffer, expr.args, context), context)
        if buffer.scope == "global":
            parts = [self.value(index, context) for index in expr.args]
            varying = any(p.varying for p in parts) or context.mask is not None
            indices = ", ".join(p.code for p in parts)
            call = f"ag.load_global({self.tensors[buffer]}, ({indices},), 1, {context.argument}, {where})[0]"
            return Value(self.temporary(call), varying)
        address = self.byte_address(buffer, expr.args, context)
        dtype = self.dtype(buffer.dtype)
        call = f"ag.load_shared({address.code}, {dtype}, 1, {context.argument}, {where})[0]"
        return Value(self.temporary(call), context.lane is None)

    def _register(self, cells: Local, index: Value, context: Context) -> Value:
        if index.varying:
            raise UnsupportedError(f"an index of the registers {cells.buffer.name} that differs between lanes")
        self.check_register(cells, index)
        code = f"{cells.name}[{index.code}]"
        if cells.varying and context.lane is not None:
            return Value(f"{code}[{context.lane}]")
        return Value(code, cells.varying)

    def check_register(self, cells: Local, index: Value) -> None:
        """Lines that report a register read before it is written, or an accumulator still in flight."""
        name = cells.buffer.name
        self.emit(f"{cells.valid}[{index.code}] or ag.uninitialised({cells.name}, {index.code}, {name!r})")
        self.check_flight(cells)

    def check_flight(self, cells: Local) -> None:
        """A line that reports an accumulator which a wgmma may still write."""
        if cells.buffer in self.accumulators and cells.name not in self.checked:
            self.checked.add(cells.name)
            self.emit(f"ag.open and ag.flying_read({cells.buffer.name!r})")

    def byte_address(self, buffer: Buffer, indices: list[Expr], context: Context) -> Value:
        """Byte offset of an element in dynamic shared memory."""
        base, offset = buffer.view or (buffer, 0)
        if base.scope != "shared.dyn":
            raise UnsupportedError(f"an access to the static shared array {buffer.name}")
        index = self.index(buffer, indices, context)
        return self.made(f"({index.code} * {buffer.item} + {offset})", [index])

    def dtype(self, name: str) -> str:
        """Source of a NumPy type."""
        key = f"dtype_{name}"
        self.names.setdefault(key, np.dtype(FLOATS.get(name) or name))
        return key

    # --- calls with a value -------------------------------------------------------------------------------------------

    def call(self, expr: Expr, context: Context) -> Value:
        """A call with a value."""
        name = str(expr.value)
        if name in MATH or name in TESTS or name in WRAPPED:
            parts = [self.value(arg, context) for arg in expr.args]
            return self.made(f"math_{name.removeprefix('func.')}({', '.join(p.code for p in parts)})", parts)
        if name == "reinterpret":
            part = self.value(expr.args[0], context)
            return self.made(f"reinterpret({part.code}, {expr.dtype!r}, {expr.args[0].dtype!r})", [part])
        if name == "if_then_else":
            return self._if_then_else(expr, context)
        if name == "tvm_warp_shuffle_xor":
            part, distance = self.value(expr.args[1], context), self.value(expr.args[2], context)
            where = repr(f"shuffle {show(expr.args[1])}")
            return Value(f"ag.shuffle_xor({part.code}, {distance.code}, {context.argument}, {where})", part.varying)
        if name == "func.comfuse_any":
            part = self.value(expr.args[0], context)
            return Value(self.temporary(f"ag.any_of_warp({part.code}, {context.argument}, 'vote')"), part.varying)
        if name == "likely":
            return self.value(expr.args[0], context)
        return self.instruction_value(expr, context)

    def instruction_value(self, expr: Expr, context: Context) -> Value:
        """A call of an instruction that has a value."""
        raise NotImplementedError

    def _if_then_else(self, expr: Expr, context: Context) -> Value:
        """Only the lanes that need a side compute it, so that it may load where others must not."""
        condition = self.value(expr.args[0], context)
        if condition.is_known and not condition.varying:
            return self.value(expr.args[1 if condition.known else 2], context)
        if condition.varying:
            mask = self.temporary(condition.code if context.mask is None else f"{condition.code} & {context.mask}", "m")
            yes = self.value(expr.args[1], replace(context, mask=mask))
            other = self.temporary(f"~{mask}" if context.mask is None else f"~{mask} & {context.mask}", "m")
            no = self.value(expr.args[2], replace(context, mask=other))
            return Value(self.temporary(f"np.where({mask}, {yes.code}, {no.code})"), True)
        self.count += 1
        name, varying = f"t{self.count}", False
        for head, side in ((f"if {condition.code}:", expr.args[1]), ("else:", expr.args[2])):
            self.emit(head)
            checked = set(self.checked)
            with self.indented():
                part = self.value(side, context)
                self.emit(f"{name} = {part.code}")
            self.checked = checked
            varying = varying or part.varying
        return Value(name, varying)
