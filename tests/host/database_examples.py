"""Functions and records for the tests of the tuning database."""

from __future__ import annotations

from typing import Any

import tvm

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.relay_patterns import FuseClusters
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.choose import candidates
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tuning.database import Accuracy, Database, Record

M, N, K = 24, 128, 64
RIGHT = Accuracy(1e-3, 4e-3, 3)


def module(m: int | None = M, op: str = "layer_norm", n: int = N, k: int = K) -> tvm.IRModule:
    """A Relax module with one cluster."""
    return OPS[op].relax_module(m, n, k, "bfloat16")


def function(m: int | None = M, op: str = "layer_norm", n: int = N, k: int = K) -> Any:
    """Its canonical function."""
    fused = FuseClusters()(from_relax(module(m, op, n, k)))
    (func,) = (func for _, func in fused.functions_items() if isinstance(func, tvm.tirx.PrimFunc))
    return func


def some_plan(func: Any, number: int = 17) -> Plan:
    """A legal plan that is not the cost model's."""
    return candidates(analyze(func), H200)[number]


def commit(
    database: Database, func: Any, us: float = 10.0, number: int = 17, target: str = "h200", **more: Any
) -> Record:
    """Add a record."""
    return commit_plan(database, func, some_plan(func, number), us, target, **more)


def commit_plan(
    database: Database, func: Any, plan: Any, us: float = 10.0, target: str = "h200", **more: Any
) -> Record:
    """Add a record of a plan."""
    return database.commit(func, plan, [us * 1e-6], tvm_comfuse.parse_target(target), accuracy=RIGHT, **more)
