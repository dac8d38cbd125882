"""The instrumented build of a cluster: its kernel with clock stamps, see emit/stamps.py.

It is no choice of the plan: what is measured is the kernel that the plan makes, and this one is beside it.
"""

from __future__ import annotations

import math

from tvm import tirx

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.walk import most_steps
from tvm_comfuse.tir_passes.emit.geometry import Geometry
from tvm_comfuse.tir_passes.emit.stamps import StampLayout, Stamps
from tvm_comfuse.tir_passes.kernel import Kernel
from tvm_comfuse.tir_passes.lower import with_kept_attributes


def instrumented(func: tirx.PrimFunc, rows: int, name: str = "main") -> tuple[tirx.PrimFunc, StampLayout]:
    """The instrumented kernel of a scheduled cluster, and what its stamps mean.

    rows  M of the launches; of more rows, stamps of the last steps are dropped
    Its last parameter is the buffer of the stamps, int32, zeroed before a launch.  Raises as `lower` does.
    """
    spec, plan = analyze(func), plan_of(func)
    geometry = Geometry(plan, spec)
    steps = most_steps(plan, spec, math.ceil(rows / geometry.unit_rows))
    kernel = Kernel(func, spec, plan, name, steps)
    emitted = with_kept_attributes(kernel.emit(), func, name)
    assert isinstance(kernel.stamps, Stamps)
    return emitted, kernel.stamps.layout
