"""Everything that can be found out about a kernel without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static import check

#: relative error against float64 above which a result is wrong: half-precision outputs have at most 4e-3
TOLERANCE = 8e-3


def detect(
    kernel: tirx.PrimFunc,
    device: Device,
    inputs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    seeds: Sequence[int] = (0,),
    max_steps: int | None = None,
) -> list[Finding]:
    """Findings of the static checks; if there are none, those of the interpreter and of a comparison of the numbers.

    inputs     arrays of the parameters before the outputs
    reference  the float64 outputs
    seeds      one interleaving each, until something is found
    """
    findings = check(kernel, device)
    for seed in seeds:
        if findings:
            break
        findings = run(kernel, inputs, reference, seed, max_steps)
    return findings


def run(
    kernel: tirx.PrimFunc,
    inputs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    seed: int,
    max_steps: int | None = None,
) -> list[Finding]:
    """One run of the interpreter and the comparison of its outputs."""
    from tvm_comfuse.verify.interpreter import interpret

    limits = {} if max_steps is None else {"max_steps": max_steps}
    result = interpret(kernel, list(inputs), seed=seed, **limits)
    return list(result.findings) or compare(list(result.outputs.values()), reference)


def error(output: np.ndarray, reference: np.ndarray) -> float:
    """||output - reference|| / ||reference|| in float64; NaN if anything is not finite."""
    wide = np.asarray(output, dtype=np.float64)
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(wide - reference)) / size if size else float(np.abs(wide).max(initial=0.0))


def compare(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> list[Finding]:
    """A finding for each output that is not the reference."""
    found = []
    for number, (output, expected) in enumerate(zip(outputs, reference, strict=True)):
        off = error(output, expected)
        # written so that NaN is a finding
        if not off <= TOLERANCE:
            text = f"relative error {off:.3g} against float64, allowed {TOLERANCE:g}"
            found.append(Finding("numbers", f"output {number}", text, {"error": off, "allowed": TOLERANCE}))
    return found
