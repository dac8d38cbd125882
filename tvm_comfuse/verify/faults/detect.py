"""Everything that can be found out about a kernel without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.dynamic import explore, interleavings
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.static import check
from tvm_comfuse.verify.static.index import index_of


def detect(
    kernel: tirx.PrimFunc,
    device: Device,
    inputs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    seeds: Sequence[int] = (0,),
) -> list[Finding]:
    """Findings of the static checks; if there are none, of the first run in the interpreter that has any.

    inputs     arrays of the parameters before the outputs
    reference  the float64 outputs
    seeds      of random interleavings; adversarial ones follow
    """
    findings = check(kernel, device)
    if findings:
        return findings
    orders = list(interleavings(Program(kernel), index_of(kernel).ctas, seeds))
    return explore(kernel, inputs, reference, orders).findings
