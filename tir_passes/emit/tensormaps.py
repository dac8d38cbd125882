"""Tensor maps: what TMA knows of a matrix in global memory.  They are made on the host and passed by value."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.plan import QUAD_COLUMNS
from tvm_comfuse.tir_passes.emit.dsl import host_value
from tvm_comfuse.tir_passes.emit.shared import ATOM_BYTES

#: codes of cuTensorMapEncodeTiled: no interleave, 128-byte swizzle, 128-byte L2 promotion, zeros outside
INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_128B, FILL_ZERO = 0, 3, 2, 0


def tensor_map(name: str, buffer: Any, box_rows: int) -> Any:
    """Map of a row-major matrix, read or written in boxes of box_rows x 128 bytes, swizzled in shared memory."""
    rows, columns = buffer.shape
    return _encode(name, buffer, [columns, rows], [columns], [box_rows])


def quad_map(name: str, buffer: Any, box_rows: int) -> Any:
    """Map of w [N, K] whose boxes have the rows of every 32 in another order: row 8 q + 2 c + e comes at 8 c + 2 q + e.

    wgmma gives lane q of a quad the elements e of every chunk c of eight columns, so the lane has eight neighbours then.
    The fields e, q, c and the number of the 32 rows are dimensions of their own, in the order they shall have.
    """
    rows, columns = buffer.shape
    sizes, box = [columns, 2, 4, 4, rows // QUAD_COLUMNS], [2, 4, 4, box_rows // QUAD_COLUMNS]
    return _encode(name, buffer, sizes, [stride * columns for stride in (1, 8, 2, QUAD_COLUMNS)], box)


def _encode(name: str, buffer: Any, sizes: list[Any], strides: list[Any], box: list[int]) -> Any:
    """sizes of all dimensions, contiguous one first, in elements; strides and box extents of the others."""
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[str(buffer.dtype)]
    handle = host_value(name, T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
    T.evaluate(
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            handle,
            str(buffer.dtype),
            len(sizes),
            buffer.data,
            *sizes,
            *[stride * size for stride in strides],
            ATOM_BYTES // size,
            *box,
            *[1] * len(sizes),
            INTERLEAVE_NONE,
            SWIZZLE_128B,
            L2_PROMOTION_128B,
            FILL_ZERO,
        )
    )
    return handle
