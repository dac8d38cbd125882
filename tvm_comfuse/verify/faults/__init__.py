"""Seeded faults: mistakes put into correct kernels, to see that the checks find them."""

from __future__ import annotations

from tvm_comfuse.verify.faults import clusters, memory, numerics, ordering, phases
from tvm_comfuse.verify.faults.detect import detect
from tvm_comfuse.verify.faults.registry import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "clusters", "detect", "memory", "numerics", "ordering", "phases"]
