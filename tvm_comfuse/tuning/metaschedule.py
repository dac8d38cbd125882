"""TVM's MetaSchedule, imported without its 55 s of tensor intrinsics.

A TuneContext imports ``tvm.s_tir.tensor_intrin`` for the sake of TVM's own schedule rules, which nothing here uses.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from tvm.s_tir import meta_schedule

__all__ = ["meta_schedule", "tune_context"]
_INTRINSICS = "tvm.s_tir.tensor_intrin"
_LOCK = threading.Lock()


def tune_context(mod: Any, **options: Any) -> Any:
    """``meta_schedule.TuneContext(mod, **options)`` that does not import TVM's tensor intrinsics."""
    stub = types.ModuleType(_INTRINSICS)
    with _LOCK:
        imported = sys.modules.setdefault(_INTRINSICS, stub)
        try:
            return meta_schedule.TuneContext(mod, **options)
        finally:
            # whoever wants the intrinsics later must get them
            if imported is stub:
                del sys.modules[_INTRINSICS]
