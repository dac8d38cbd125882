"""What is tuned: the different clusters of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.cluster import Cluster, MatmulReport
from tvm_comfuse.relay_patterns.rewrite import fuse_clusters
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.cost import NOMINAL_ROWS
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tuning.database.workload import workload_module
from tvm_comfuse.tuning.space import Space
from tvm_comfuse.tuning.unfused import Unfused


@dataclass
class Task:
    """One canonical function, as often as it occurs.

    workload  a module with the function alone, named main; M may be symbolic
    matmuls   names of the matmuls, as in ``explain``, whose clusters are this function
    rows      M of the measurements
    unfused   its split form, None if it has none
    """

    workload: tvm.IRModule
    rows: int
    matmuls: list[str] = field(default_factory=list)
    unfused: Unfused | None = None

    @property
    def func(self) -> tirx.PrimFunc:
        """The canonical function."""
        return self.workload["main"]

    @property
    def name(self) -> str:
        """The first matmul's name, and how many there are."""
        return self.matmuls[0] + (f" x{len(self.matmuls)}" if len(self.matmuls) > 1 else "")

    @property
    def shape(self) -> tuple[int, int, int]:
        """[M, N, K] of the measurements."""
        return self.rows, self.spec.n, self.spec.k

    @cached_property
    def spec(self) -> ClusterSpec:
        """The function as plain data."""
        return analyze(self.func)

    @cached_property
    def key(self) -> str:
        """The same for equal workloads, in all processes."""
        return f"{tvm_ffi.structural_hash(self.workload) & (2**64 - 1):016x}"


def tasks_of(
    mod: tvm.IRModule,
    device: Device,
    rows: int | None = None,
    unfused_of: Callable[[Cluster], Unfused | None] = lambda cluster: None,
) -> tuple[list[Task], list[Refusal]]:
    """The tasks of a Relax module in normal form, in program order, and why the other clusters have no plan.

    rows        M of the measurements of functions with a symbolic M; NOMINAL_ROWS if left out
    unfused_of  gives the split form of a task's cluster
    """
    found: dict[Any, Task] = {}
    refusals: list[Refusal] = []
    offered: list[MatmulReport] = []

    def accept(func: tirx.PrimFunc) -> tirx.PrimFunc | Refusal:
        space = Space.of(analyze(func), device)
        if isinstance(space, Refusal):
            refusals.append(space)
            return space
        workload = workload_module(func)
        key = tvm_ffi.structural_hash(workload)
        known = found.get(key)
        if known is None:
            m = analyze(func).m
            cluster = offered[-1].cluster
            assert cluster is not None  # it is what is offered
            known = found[key] = Task(workload, m if m is not None else rows or NOMINAL_ROWS)
            known.unfused = unfused_of(cluster)
        known.matmuls.append(offered[-1].name)
        return func

    fuse_clusters(mod, accept, offered.append)
    return list(found.values()), refusals
