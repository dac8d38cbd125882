"""The tuning database: a folder of measured plans, bound to devices and versions (docs/database.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_comfuse.tuning.database.best import PlanSource, best_plan, pretuned
    from tvm_comfuse.tuning.database.check import Problem, verify
    from tvm_comfuse.tuning.database.database import Database
    from tvm_comfuse.tuning.database.files import DatabaseError, TornLineWarning
    from tvm_comfuse.tuning.database.record import Accuracy, Evidence, Record
    from tvm_comfuse.tuning.database.transfer import Transfer, nearest

#: public name -> module that defines it; imported at first use, as most of them import TVM
_LAZY = {
    "Accuracy": "record",
    "Database": "database",
    "DatabaseError": "files",
    "Evidence": "record",
    "PlanSource": "best",
    "Problem": "check",
    "Record": "record",
    "TornLineWarning": "files",
    "Transfer": "transfer",
    "best_plan": "best",
    "nearest": "transfer",
    "pretuned": "best",
    "verify": "check",
}

__all__ = [
    "Accuracy",
    "Database",
    "DatabaseError",
    "Evidence",
    "PlanSource",
    "Problem",
    "Record",
    "TornLineWarning",
    "Transfer",
    "best_plan",
    "nearest",
    "pretuned",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
