"""A kernel in the interpreter under many orders of its warps and copies, its numbers compared with float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import tirx

from tvm_comfuse.schedules.rows import is_rows
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.interpreter import Program

Array = np.ndarray
#: the error a kernel may have, as a multiple of that of rounding the exact result to the output's dtype once
FACTOR = 2.0
#: what float32 arithmetic adds, which is all there is for a float32 output
FLOAT32_ERROR = 1e-5
#: multiples of the error that a plan brings (see verify.inexact): sums that cancel may meet a worse pattern
PLAN_ERRORS = 3.0
#: CTAs that are made slow, one after the other; the others are their copies
SLOW_CTAS = 2
#: scheduling decisions after which a small kernel has long ended
MAX_STEPS = 200_000
#: rows of a tile that the threads of one warp have parts of
WARP_ROWS = 16


@dataclass(frozen=True)
class Interleaving:
    """An order of execution: random by seed, or with one actor as slow as possible (see interpreter.Program)."""

    seed: int
    slow: str | None = None

    def __str__(self) -> str:
        return f"seed {self.seed}" + (f", {self.slow} slow" if self.slow else "")


@dataclass
class Exploration:
    """What the runs gave: findings of the first run that has any; relative error of each output, the worst of all runs."""

    runs: int = 0
    findings: list[Finding] = field(default_factory=list)
    interleaving: Interleaving | None = None
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)


def interleavings(program: Program, ctas: int, seeds: Sequence[int]) -> Iterator[Interleaving]:
    """A random order for each seed; then, with the first seed, everybody that others depend on as slow as possible."""
    yield from (Interleaving(seed) for seed in seeds)
    first = min(seeds, default=0)
    for cta in sorted({*range(min(ctas, SLOW_CTAS)), ctas - 1}):
        yield Interleaving(first, f"cta{cta}")
    yield from (Interleaving(first, actor) for actor in program.actors())


def explore(
    kernel: tirx.PrimFunc,
    inputs: Sequence[Array],
    reference: Sequence[Array],
    orders: Sequence[Interleaving],
    inexact: Sequence[Sequence[Array]] = (),
) -> Exploration:
    """Runs the whole grid once for each order and stops at the first that breaks a rule or gives wrong numbers.

    inputs     arrays of the parameters before the outputs
    reference  the float64 outputs
    inexact    the same with what is computed less exactly, for one reason each (see verify.inexact)
    Raises UnsupportedError if the kernel has an instruction that the interpreter does not model.
    """
    program, result = Program(kernel), Exploration()
    besides = [
        PLAN_ERRORS * sum(error(coarse[number], exact) for coarse in inexact) for number, exact in enumerate(reference)
    ]
    for order in orders:
        run = program.run(list(inputs), seed=order.seed, slow=order.slow, max_steps=MAX_STEPS)
        result.runs += 1
        result.findings = list(run.findings) or compare(run.outputs, reference, besides)
        for (name, output), expected, more in zip(run.outputs.items(), reference, besides, strict=True):
            # unlike max, this keeps a NaN
            result.errors[name] = float(np.maximum(result.errors.get(name, 0.0), error(output, expected)))
            result.allowed[name] = allowed(output, expected) + more
        if result.findings:
            result.interleaving = order
            break
    return result


def error(output: Array, reference: Array) -> float:
    """||output - reference|| / ||reference|| in float64; NaN if anything is not finite."""
    wide = np.asarray(output, dtype=np.float64)
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(wide - reference)) / size if size else float(np.abs(wide).max(initial=0.0))


def allowed(output: Array, reference: Array) -> float:
    """The error an output may have."""
    return FACTOR * error(reference.astype(output.dtype), reference) + FLOAT32_ERROR


def compare(
    outputs: dict[str, Array], reference: Sequence[Array], besides: Sequence[float] | None = None
) -> list[Finding]:
    """A finding for each output that is not the reference.  besides: further error that each may have."""
    found = []
    for (name, output), expected, more in zip(outputs.items(), reference, besides or [0.0] * len(outputs), strict=True):
        off, most = error(output, expected), allowed(output, expected) + more
        # written so that NaN is a finding
        if not off <= most:
            text = f"relative error {off:.3g} against float64, allowed {most:.3g}"
            found.append(Finding("numbers", f"output {name}", text, {"error": off, "allowed": most}))
    return found


def random_inputs(func: Any, rows: int, outputs: int, seed: int) -> list[Array]:
    """Arrays for the parameters before the outputs.

    Products have values near 1.  Everything has a mean that is not zero: columns behind N that count in a reduction, or
    parts of a row that are weighted wrongly, would hardly show otherwise.  x has none in every second 16 rows, which are
    those of a warp: there moments take one pass (see tir_passes.emit.moments).
    """
    rng = np.random.default_rng(seed)
    arrays = []
    for position, param in enumerate(list(func.params)[: len(func.params) - outputs]):
        shape = [int(extent) if isinstance(extent, tirx.IntImm) else rows for extent in param.shape]
        values = rng.standard_normal(shape) + 0.5
        if position == 0:
            values[np.arange(shape[0]) // WARP_ROWS % 2 == 1] -= 0.5
        scale = shape[-1] ** -0.5 if position == 1 and not is_rows(func) else 1.0
        arrays.append((values * scale).astype(numpy_dtype(str(param.dtype))))
    return arrays


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype of a TVM dtype; bfloat16 is that of ml_dtypes."""
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
