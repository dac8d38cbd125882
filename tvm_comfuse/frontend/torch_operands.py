"""What converters of PyTorch operators share: operands of a node, and float32 around an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import relax

HALF = ("float16", "bfloat16")


def argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    """An operand of an fx node, given by position or by name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def tensor(node: Any, importer: Any, index: int, name: str) -> relax.Expr | None:
    """An operand that is a tensor, or None where the model passes None."""
    value = argument(node, index, name)
    return None if value is None else importer.env[value]


def is_half(value: Any) -> bool:
    """Is ``value`` a float16 or bfloat16 tensor of Relax?"""
    return isinstance(value, tvm.ir.Expr) and isinstance(value.ty, relax.TensorType) and str(value.ty.dtype) in HALF


def widened(value: relax.Expr, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
    """``value`` as float32 if it is in half precision."""
    return emit(relax.op.astype(value, "float32")) if is_half(value) else value


@contextmanager
def in_float32(importer: Any, operands: Iterable[Any]) -> Iterator[None]:
    """Within it the importer knows half precision results of the nodes ``operands`` by float32 copies."""
    halves = {operand: importer.env[operand] for operand in operands if is_half(importer.env.get(operand))}
    for operand, value in halves.items():
        importer.env[operand] = widened(value, importer.block_builder.emit)
    try:
        yield
    finally:
        importer.env.update(halves)
