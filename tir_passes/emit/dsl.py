"""A small vocabulary over TVM's IR builder.

Python's own `for` and `if` decide what is emitted; `loop`, `unrolled` and `when` emit loops and branches of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

Expr = Any


def named(name: str, value: Any) -> Any:
    """`value`, shown as `name` in the emitted kernel."""
    IRBuilder.name(name, value)
    return value


def do(call: Expr) -> None:
    """One instruction as a statement."""
    T.evaluate(call)


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The statements inside run where `condition` holds."""
    with T.If(condition), T.Then():
        yield


@contextmanager
def either(condition: Expr) -> Iterator[tuple[Any, Any]]:
    """An if with two branches: `with either(c) as (then, otherwise): with then: ... with otherwise: ...`."""
    with T.If(condition):
        yield T.Then(), T.Else()


@contextmanager
def loop(extent: Expr, name: str) -> Iterator[Expr]:
    """A serial loop of the kernel."""
    with T.serial(extent) as variable:
        yield named(name, variable)


@contextmanager
def rolled(extent: Expr, name: str) -> Iterator[Expr]:
    """A serial loop that the CUDA compiler does not unroll: it would keep addresses of each round in registers."""
    with T.serial(extent, unroll=False) as variable:
        yield named(name, variable)


@contextmanager
def unrolled(extent: int, name: str) -> Iterator[Expr]:
    """A loop that the CUDA compiler unrolls; what it indexes may stay in registers."""
    with T.unroll(extent) as variable:
        yield named(name, variable)


class Cell:
    """A mutable scalar in a register."""

    def __init__(self, dtype: str, name: str, value: Expr | None = None):
        scalar = T.local_scalar(dtype)
        self.value = getattr(scalar, "scalar", scalar)
        named(name, self.value.source)
        if value is not None:
            self.set(value)

    def set(self, value: Expr) -> None:
        """Stores `value`."""
        T.buffer_store(self.value.source, value, [0])

    @property
    def address(self) -> Expr:
        """Its address, for instructions that write through a pointer."""
        return T.address_of(self.value)


def registers(shape: tuple[int, ...] | list[int], dtype: str, name: str) -> Any:
    """An array that stays in registers as long as all its indices are constants after unrolling."""
    return named(name, T.alloc_local(list(shape), dtype))


def store(buffer: Any, value: Expr, *indices: Expr) -> None:
    """buffer[indices] = value."""
    T.buffer_store(buffer, value, list(indices))


def bound(name: str, value: Expr) -> Expr:
    """An immutable local that holds `value`."""
    return named(name, T.Bind(value))


def f32(value: float) -> Expr:
    """A float32 constant, rounded here: the CUDA compiler warns of a literal that is no float32."""
    return T.float32(float(np.float32(value)))


def u32(value: Any) -> Expr:
    """A uint32 constant or conversion."""
    return T.uint32(value) if isinstance(value, int) else T.cast(value, "uint32")


def host_value(name: str, value: Expr, kind: Any) -> Expr:
    """A host-side local of a pointer type, e.g. a tensor map on the stack."""
    variable = tvm.tirx.Var(name, kind)
    T.Bind(value, var=variable)
    return variable
