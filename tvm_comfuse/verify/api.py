"""Verify the kernels of a model: static checks at their own size, the interpreter on a small twin of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_comfuse.verify.finding import Finding

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

    from tvm_comfuse.fusion import Plans, Records
    from tvm_comfuse.schedules.device import Device
    from tvm_comfuse.schedules.plan import Plan
    from tvm_comfuse.schedules.rows import RowsPlan

DEFAULT_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class KernelVerification:
    """One kernel.

    shape          [M, N, K], of a kernel without a product [M, N]; M "symbolic" if it is
    checks         names of the static checks that ran, on the kernel itself and on its twin
    reduced        what is smaller in the twin: name -> [of the kernel, of the twin]
    interleavings  runs of the twin in the interpreter, each in another order
    errors         relative error against float64 of each output of the twin, the worst of all runs
    allowed        the error each output may have
    findings       violations; those of the interpreter end the runs
    found_in       the interleaving that gave the findings, "" if none did
    unsupported    why the interpreter could not run the twin, "" if it could
    """

    name: str
    shape: tuple[int | str, ...]
    plan: Plan | RowsPlan
    checks: tuple[str, ...]
    reduced: dict[str, tuple[Any, Any]]
    interleavings: int
    errors: dict[str, float]
    allowed: dict[str, float]
    findings: tuple[Finding, ...]
    found_in: str = ""
    unsupported: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing was found and everything ran."""
        return not self.findings and not self.unsupported

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "passed": self.passed,
            "plan": self.plan.to_dict(),
            "checks": list(self.checks),
            "reduced": {name: list(pair) for name, pair in self.reduced.items()},
            "interleavings": self.interleavings,
            "errors": dict(self.errors),
            "allowed": dict(self.allowed),
            "findings": [finding.to_json() for finding in self.findings],
            "found_in": self.found_in,
            "unsupported": self.unsupported,
        }


@dataclass(frozen=True)
class VerifyReport:
    """Every kernel of a model."""

    target: str
    kernels: tuple[KernelVerification, ...]

    @property
    def passed(self) -> bool:
        """Whether every kernel passed; true for a model without kernels."""
        return all(kernel.passed for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {
            "target": self.target,
            "passed": self.passed,
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }


def verify(
    model: Any,
    target: str | dict[str, Any] | Target = "h200",
    *,
    example_args: tuple[Any, ...] | None = None,
    plans: Plans | None = None,
    tuning_records: Records | None = None,
    use_pretuned: bool = True,
    form: str = "auto",
    rows: int | None = None,
    seeds: Sequence[int] = DEFAULT_SEEDS,
) -> VerifyReport:
    """Verify every kernel that ``tvm_comfuse.compile`` would make of a model.  Needs no GPU and compiles nothing.

    seeds  random interleavings; as many adversarial ones follow as there are actors to slow down
    The other arguments are those of ``compile``, and so are the errors; TargetError if no kernels are made for the target.
    """
    from tvm_comfuse.build import to_module
    from tvm_comfuse.errors import TargetError
    from tvm_comfuse.fusion import fuse
    from tvm_comfuse.schedules.device import device_of
    from tvm_comfuse.target import name_of, parse_target
    from tvm_comfuse.tir_passes.lower import is_cluster

    parsed = parse_target(target)
    device = device_of(parsed)
    if device is None:
        raise TargetError("a Hopper GPU, which kernels are made for", name_of(parsed), "use the target h200 or h100")
    mod = to_module(model, example_args)
    fused, _ = fuse(mod, parsed, plans, tuning_records=tuning_records, use_pretuned=use_pretuned, form=form, rows=rows)
    clusters = {gvar.name_hint: func for gvar, func in fused.functions_items() if is_cluster(func)}
    return VerifyReport(
        name_of(parsed), tuple(verify_kernel(name, clusters[name], device, seeds) for name in sorted(clusters))
    )


def verify_kernel(
    name: str, func: PrimFunc, device: Device, seeds: Sequence[int] = DEFAULT_SEEDS
) -> KernelVerification:
    """One scheduled cluster or rows function.  Raises PlanError if it has no twin, LoweringError if it is not canonical."""
    from tvm_comfuse.schedules.analysis import normal_forms
    from tvm_comfuse.schedules.plan import Plan
    from tvm_comfuse.schedules.rows import kernel_plan_of, spec_of
    from tvm_comfuse.schedules.spec import ClusterSpec
    from tvm_comfuse.tir_passes.lower import lower
    from tvm_comfuse.verify.dynamic import Exploration, explore, interleavings, random_inputs
    from tvm_comfuse.verify.inexact import of_float32, of_plan
    from tvm_comfuse.verify.interpreter import Program, UnsupportedError
    from tvm_comfuse.verify.reference import EXACT, reference
    from tvm_comfuse.verify.static import CHECKS, check
    from tvm_comfuse.verify.static.index import index_of
    from tvm_comfuse.verify.twin import twin

    spec = spec_of(func)
    small = twin(func, device)
    kernel = lower(small.func, f"{name}_twin")
    findings, unsupported = [*check(lower(func, name), device), *check(kernel, device)], ""
    runs = Exploration()
    if not findings:
        inputs = random_inputs(small.func, small.rows, len(spec.outputs), min(seeds, default=0))
        try:
            orders = list(interleavings(Program(kernel), index_of(kernel).ctas, seeds))
            reasons = [of_float32(normal_forms(small.func))]
            if isinstance(spec, ClusterSpec) and isinstance(small.plan, Plan):
                reasons.append(of_plan(small.plan, spec))
            exact, *inexact = (reference(small.func, inputs, each) for each in (EXACT, *reasons))
            runs = explore(kernel, inputs, exact, orders, inexact)
        except UnsupportedError as error:
            unsupported = str(error)
    return KernelVerification(
        name=name,
        shape=(
            spec.m if spec.m is not None else "symbolic",
            spec.n,
            *([spec.k] if isinstance(spec, ClusterSpec) else []),
        ),
        plan=kernel_plan_of(func),
        checks=tuple(CHECKS),
        reduced=small.reduced,
        interleavings=runs.runs,
        errors=runs.errors,
        allowed=runs.allowed,
        findings=tuple(findings or runs.findings),
        found_in=str(runs.interleaving or ""),
        unsupported=unsupported,
    )
