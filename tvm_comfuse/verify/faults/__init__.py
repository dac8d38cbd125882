"""Seeded faults: mistakes put into correct kernels, to see that the checks find them."""

from __future__ import annotations

import importlib

from tvm_comfuse.verify.faults.detect import detect
from tvm_comfuse.verify.faults.registry import FAULTS, Fault

# each of them registers its faults
for _name in ("phases", "ordering", "memory", "clusters", "numerics", "deferral"):
    importlib.import_module(f"{__name__}.{_name}")

__all__ = ["FAULTS", "Fault", "detect"]
