"""Tensor maps: what TMA knows of a matrix in global memory.  They are made on the host and passed by value."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import host_value
from tvm_comfuse.tir_passes.emit.shared import ATOM_BYTES

#: codes of cuTensorMapEncodeTiled: no interleave, 128-byte swizzle, 256-byte L2 promotion, zeros outside
INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B, FILL_ZERO = 0, 3, 2, 0


def tensor_map(name: str, buffer: Any, box_rows: int) -> Any:
    """Map of a row-major matrix, read or written in boxes of box_rows x 128 bytes, swizzled in shared memory."""
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[str(buffer.dtype)]
    rows, columns = buffer.shape
    handle = host_value(name, T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
    T.evaluate(
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            handle,
            str(buffer.dtype),
            2,
            buffer.data,
            columns,
            rows,
            columns * size,
            ATOM_BYTES // size,
            box_rows,
            1,
            1,
            INTERLEAVE_NONE,
            SWIZZLE_128B,
            L2_PROMOTION_256B,
            FILL_ZERO,
        )
    )
    return handle
