"""Is our kernel of a row right?  Every seed against float64, outputs poisoned before each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import PACKAGE_RECORDS, OurKernel, Records, compile_row, new_output
from tvm_comfuse.bench.report import RowResult
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.target import is_cuda, parse_target
from tvm_comfuse.verify.numeric import DEFAULT_FACTOR, check, poison


@dataclass
class RowCheck:
    """What was found out about one row; plain JSON values, so that it can come from another process.

    seeds    one dictionary a seed: "seed" and the fields of a NumericReport
    refusal  why the row is not fused; then there are no seeds
    failure  what went wrong: a compiler's error, a fault, a hang; in words
    """

    fused: bool = False
    plan: dict[str, Any] | None = None
    via: str | None = None
    refusal: dict[str, Any] | None = None
    failure: str | None = None
    seeds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool | None:
        """True if every seed passed, None if nothing was run."""
        if self.failure:
            return False
        return all(seed["passed"] for seed in self.seeds) if self.seeds else None

    def copy_to(self, result: RowResult) -> None:
        """Fill a row of the report; its errors are those of the seed that did worst against eager."""
        result.fused, result.plan, result.via = self.fused, self.plan, self.via
        result.refusal, result.seeds, result.passed = self.refusal, self.seeds, self.passed
        if self.failure:
            result.add_failure(self.failure)
        if self.seeds:
            worst = max(self.seeds, key=_badness)
            result.error, result.eager_error = worst["error"], worst["eager_error"]


def check_row(
    row: Row,
    seeds: Sequence[int],
    target: str,
    records: Records = PACKAGE_RECORDS,
    on_built: Callable[[RowCheck], None] = lambda _: None,
) -> RowCheck:
    """Compile a row for a target (its short name) and run it on each seed.

    on_built  called between the compilation and the first launch

    Errors of compilers and of the GPU are caught and become `failure`.
    """
    result = RowCheck()
    try:
        parsed = parse_target(target)
        kernel = compile_row(row, parsed, records)
        if isinstance(kernel, Refusal):
            result.refusal = kernel.to_json()
            return result
        result.fused, result.plan, result.via = True, kernel.plan, kernel.via
        on_built(result)
        device = "cuda" if is_cuda(parsed) else "cpu"
        for seed in seeds:
            result.seeds.append({"seed": seed, **run_seed(row, kernel, seed, device)})
    except Exception as error:  # whatever it is, it is this row's result and not the end of the run
        result.failure = f"{type(error).__name__}: {str(error).strip()[-600:]}"
    return result


def run_seed(row: Row, kernel: OurKernel, seed: int, device: str) -> dict[str, Any]:
    """One run against float64, as the fields of a NumericReport.  Raises what the launch raises."""
    op = OPS[row.op]
    with torch.no_grad():
        inputs = op.make_inputs(row.M, row.N, row.K, row.dtype, seed, device)
        out = poison(new_output(row, device))
        if device == "cuda":
            # a fault of an earlier launch must not be blamed on this one
            torch.cuda.synchronize()
        kernel.run(inputs, out)
        if device == "cuda":
            torch.cuda.synchronize()
        return check(out, op.exact(inputs), op.eager(*inputs), DEFAULT_FACTOR).to_json()


def _badness(seed: dict[str, Any]) -> float:
    """Error as a multiple of eager's; NaN counts as infinite."""
    error, eager = seed["error"], seed["eager_error"]
    if error == 0:
        return 0.0
    return float(error / eager) if eager and error == error else float("inf")
