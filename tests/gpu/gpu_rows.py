"""Rows that the GPU tests run: those of the package's suites, and makers of rows at the edges."""

from __future__ import annotations

from tvm_comfuse.bench.suites import Row, load

TARGET = "cuda"
SEEDS = (0, 1, 2)
SUITES = [row for rows in load().values() for row in rows]


def edge(name: str, op: str, M: int, N: int, K: int, dtype: str = "bfloat16") -> Row:
    """A row of no suite."""
    return Row("edge", name, op, M, N, K, dtype)
