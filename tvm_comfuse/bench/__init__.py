"""Benchmarks: suites of workloads, contenders, timing, and the report.

The names here load PyTorch only when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_comfuse.bench.report import BenchReport
    from tvm_comfuse.bench.run import run_suite

__all__ = ["BenchReport", "run_suite"]


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name == "run_suite":
        from tvm_comfuse.bench.run import run_suite

        return run_suite
    if name == "BenchReport":
        from tvm_comfuse.bench.report import BenchReport

        return BenchReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
