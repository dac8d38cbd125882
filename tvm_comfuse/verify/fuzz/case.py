"""One example from the Relax module to the interpreter.

Four values of every output are compared: the model by NumPy in float64, the canonical function by NumPy in float64, the
scheduled function on LLVM, the kernel in the interpreter.  The model by NumPy in float32 says how far rounding alone may
carry them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from tvm_comfuse.cuda import compile_cubin, find_nvcc, find_nvrtc, sources
from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.canonical import Canonical, canonicalize, operand_shape
from tvm_comfuse.relay_patterns.discover import Search, in_dataflow
from tvm_comfuse.relay_patterns.rewrite import fuse_clusters
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.legality import supported
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.dynamic import MAX_STEPS, PLAN_ERRORS, error, numpy_dtype
from tvm_comfuse.verify.fuzz.evaluate import Evaluation, size_of
from tvm_comfuse.verify.inexact import Inexact, of_llvm, of_plan
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.reference import EXACT as EXACTLY
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check

Array = np.ndarray
#: why a drawn cluster may end before the model does: it grew too large, or the model made it end there
EXPECTED_STOPS = frozenset({"expression-size", "operand-count", "not-convex", "row-order-changed"})
#: float64 by two ways
EXACT = 1e-9
#: the error an output may have: multiples of one rounding to its dtype, and of the model's own error in float32
ROUNDINGS, FLOAT32_ERRORS, FLOAT32_NOISE = 2.0, 16.0, 1e-5
#: LLVM adds up a row term by term, each rounded: N half units in the last place, where the model in NumPy sums in pairs
SUM_ROUNDING = 2.0**-24
#: a model whose own float32 error is larger says nothing about the kernel's
ILL_CONDITIONED = 1e-3
#: multiples of the error of LLVM's tanh, whose exp has errors of its own
LLVM_ERRORS = 4.0
#: a model that makes more of those errors says nothing either
SENSITIVE = 5e-2

#: of a warp group
THREADS = 128

Choose = Callable[[ClusterSpec], "Plan | None"]


@dataclass(frozen=True)
class Case:
    """An example.

    module    Relax, one function main with one matmul
    symbol    value of its symbolic dimension, if it has one
    seed      of the inputs and of the interleaving
    slow      actor that is as slow as possible, or None
    launches  of the kernel, one after the other
    plan      None: not chosen yet
    """

    module: tvm.IRModule
    symbol: int = 1
    seed: int = 0
    slow: str | None = None
    launches: int = 1
    plan: Plan | None = None


@dataclass(frozen=True)
class Effort:
    """Which of the slower steps an example gets.

    interpreter  most passes over accumulators (see passes_of) of a kernel that is interpreted
    llvm         every which seed is compiled for the CPU
    module       every which seed runs as a whole model on TVM's virtual machine
    cuda         every which seed is compiled to a cubin, if there is a compiler; 0: none
    """

    interpreter: int
    llvm: int = 1
    module: int = 1
    cuda: int = 0


#: all steps but the CUDA compiler's; of a replay
FULL = Effort(interpreter=1 << 30)


class FuzzError(ComfuseError):
    """An example that went wrong.  kind: short, in lower case with dashes; case: what to replay."""

    def __init__(self, kind: str, text: str, case: Case):
        super().__init__("an example without findings", f"{kind}: {text}", "run its replay file")
        self.kind, self.text, self.case = kind, text, case


@dataclass
class Outcome:
    """What an example was.  rejected: why it was given up early, "" if it was not; stops: where its cluster ended before
    the model did; seconds: CPU time by step."""

    rejected: str = ""
    case: Case | None = None
    spec: ClusterSpec | None = None
    stops: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


#: why a cluster that discovery makes may have no plan: more tensors than a kernel takes, and v - v, which nobody writes
REFUSED = {"parameters", "constant-reduction"}


class _RejectedError(Exception):
    """The example says nothing."""


def run_case(case: Case, choose: Choose | None = None, effort: Effort = FULL) -> Outcome:
    """Runs an example through everything that the effort has for it.

    choose  gives the plan of a case that has none
    Raises FuzzError for everything that is not as it must be, exceptions included.
    """
    run = _Run(case, choose, effort)
    try:
        run.all()
    except _RejectedError as reason:
        run.outcome.rejected = str(reason)
    except FuzzError:
        raise
    except Exception as problem:
        raise FuzzError(f"{run.step}-raises", f"{type(problem).__name__}: {problem}", run.case) from problem
    run.outcome.case = run.case
    return run.outcome


class _Run:
    def __init__(self, case: Case, choose: Choose | None, effort: Effort):
        self.case, self.choose, self.effort = case, choose, effort
        self.step = "discovery"
        self.outcome = Outcome()

    @contextmanager
    def at(self, step: str) -> Iterator[None]:
        self.step = step
        start = time.process_time()
        yield
        self.outcome.seconds[step] = time.process_time() - start

    def fail(self, kind: str, text: str) -> None:
        raise FuzzError(f"{self.step}-{kind}", text, self.case)

    def all(self) -> None:
        """Every step in order."""
        with self.at("discovery"):
            search = Search(in_dataflow(self.case.module)["main"])
            made = self.discovered(search)
            self.outcome.spec = spec = analyze(made.func)
        with self.at("model"):
            self.evaluate(search.function, made)
        with self.at("schedule"):
            func = self.scheduled(made.func, spec)
            of_kernel = self.allowed_besides(made.func, of_plan(plan_of(func), spec), PLAN_ERRORS)
        with self.at("lower"):
            kernel = lower(func, "fuzzed")
        with self.at("static"):
            findings = check(kernel, H200)
            if findings:
                self.fail(findings[0].code, " | ".join(map(str, findings)))
        effort, seed = self.effort, self.case.seed
        if passes_of(spec, plan_of(func)) <= effort.interpreter:
            with self.at("interpreter"):
                self.interpret(kernel, of_kernel)
        if seed % effort.llvm == 0:
            with self.at("llvm"):
                outputs = run_on_llvm(func, self.inputs, [array.shape for array in self.references], self.dtypes)
                self.compare(outputs, self.allowed_besides(made.func, of_llvm(), LLVM_ERRORS))
        if seed % effort.module == 0 and not self.outcome.stops:
            with self.at("module"):
                self.whole_module(self.allowed_besides(made.func, of_llvm(), LLVM_ERRORS))
        # not seed 0: examples shrink to it, and this step is slow
        if effort.cuda and seed % effort.cuda == effort.cuda - 1 and (find_nvcc() or find_nvrtc()):
            with self.at("cuda"):
                self.compile_for_cuda(kernel)

    def discovered(self, search: Search) -> Canonical:
        (report,) = search.discovery.matmuls
        self.outcome.stops = tuple(sorted({refusal.code for refusal in report.refusals}))
        if report.cluster is None or not set(self.outcome.stops) <= EXPECTED_STOPS:
            self.fail("refused", "; ".join(f"{refusal.code}: {refusal}" for refusal in report.refusals))
        assert report.cluster is not None
        self.cluster = report.cluster
        return canonicalize(report.cluster)

    def evaluate(self, function: relax.Function, made: Canonical) -> None:
        """Inputs, float64 references and the error each output may have; the canonical function must be the model."""
        self.arrays = inputs_of(function, self.case)
        exact, rough = (Evaluation(function, self.arrays, precision) for precision in ("float64", "float32"))
        anchor = self.cluster.anchor
        rows = size_of(anchor.rows, exact.sizes)
        x, w = exact.value(anchor.x).reshape(rows, anchor.depth), exact.value(anchor.w)
        operands = [
            exact.value(each.expr).reshape(operand_shape(each.shape, rows, anchor.columns)) for each in made.operands
        ]
        values = [[run.value(output.vars[0]) for run in (exact, rough)] for output in made.outputs]
        self.dtypes = [numpy_dtype(output.dtype) for output in made.outputs]
        canonical = reference(made.func, [x, w, *operands])
        self.allowed: list[float] = []
        for number, ((value, in_float32), dtype) in enumerate(zip(values, self.dtypes, strict=True)):
            noise = error(in_float32, value)
            if not (noise <= ILL_CONDITIONED and np.isfinite(value.astype(dtype).astype("float64")).all()):
                raise _RejectedError("ill-conditioned")
            off = error(canonical[number].reshape(value.shape), value)
            if not off <= EXACT:
                self.fail("canonical", f"output {number} of the canonical function is off by {off:.3g} in float64")
            sums = FLOAT32_NOISE + anchor.columns * SUM_ROUNDING
            self.allowed.append(ROUNDINGS * error(value.astype(dtype), value) + FLOAT32_ERRORS * noise + sums)
        types = [anchor.dtype, anchor.dtype, *(each.dtype for each in made.operands)]
        self.inputs = [array.astype(numpy_dtype(kind)) for array, kind in zip([x, w, *operands], types, strict=True)]
        # an operand may be a value that other operators of the model make: rounded for the kernel
        self.references = reference(made.func, self.inputs)

    def scheduled(self, func: tirx.PrimFunc, spec: ClusterSpec) -> tirx.PrimFunc:
        reasons = {refusal.code for refusal in supported(spec)}
        if reasons and reasons <= REFUSED:
            raise _RejectedError(", ".join(sorted(reasons)))
        if reasons:
            self.fail("unsupported", f"discovery made a cluster that no plan fits: {sorted(reasons)}")
        if self.case.plan is None and self.choose is not None:
            self.case = replace(self.case, plan=self.choose(spec))
        if self.case.plan is None:
            raise _RejectedError("no-plan")
        result = schedule(func, H200, self.case.plan)
        if isinstance(result, Refusal):
            self.fail("refused", str(result))
        return result

    def allowed_besides(self, func: tirx.PrimFunc, inexact: Inexact, times: float) -> list[float]:
        """The error each output may have, with some multiples of what is less exact."""
        if inexact == EXACTLY:
            return self.allowed
        noises = [error(v, e) for v, e in zip(reference(func, self.inputs, inexact), self.references, strict=True)]
        if not all(noise <= SENSITIVE for noise in noises):
            raise _RejectedError("ill-conditioned")
        return [most + times * noise for most, noise in zip(self.allowed, noises, strict=True)]

    def interpret(self, kernel: tirx.PrimFunc, allowed: list[float]) -> None:
        """Launches, one after the other, each in an order of its own."""
        program, statics = Program(kernel), None
        slow = self.case.slow if self.case.slow in {*program.actors(), "cta0", "cta1"} else None
        for launch in range(self.case.launches):
            run = program.run(
                self.inputs, seed=self.case.seed + launch, slow=slow, max_steps=MAX_STEPS, statics=statics
            )
            if run.findings:
                self.fail(run.findings[0].code, " | ".join(map(str, run.findings)))
            self.compare(list(run.outputs.values()), allowed)
            statics = run.statics

    def whole_module(self, allowed: list[float]) -> None:
        """The model with its cluster fused, on TVM's virtual machine."""
        fused, _ = fuse_clusters(self.case.module, lambda func: schedule(func, H200, self.case.plan))
        machine = relax.VirtualMachine(tvm.compile(fused, "llvm"), tvm.cpu())
        result = machine["main"](*[tvm.runtime.tensor(array) for array in self.arrays])
        outputs = [each.numpy() for each in ([result] if hasattr(result, "numpy") else result)]
        exact = Evaluation(self.case.module["main"], self.arrays)
        most = max(allowed)
        for number, (output, value) in enumerate(zip(outputs, exact.outputs, strict=True)):
            # what the model computes outside of the cluster is rounded to its own dtype, which may be the coarser one
            rounded = max(error(value.astype(dtype), value) for dtype in (output.dtype, self.inputs[0].dtype))
            limit = most + ROUNDINGS * rounded
            if output.shape != value.shape or not error(output, value) <= limit:
                off = error(output, value) if output.shape == value.shape else float("nan")
                self.fail("numbers", f"result {number} {output.shape}: error {off:.3g}, allowed {limit:.3g}")

    def compile_for_cuda(self, kernel: tirx.PrimFunc) -> None:
        """The CUDA compiler takes the kernel and does not serialise its wgmmas."""
        target = parse_target("h200")
        with target:
            executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")
        (source,) = sources(executable)
        slow = [text for text in compile_cubin(source).warnings if "performance loss" in text.lower()]
        if slow:
            self.fail("warns", "; ".join(slow))

    def compare(self, outputs: list[Array], allowed: list[float]) -> None:
        """Fails unless each output is near to its reference; NaN never is."""
        for number, (output, expected, most) in enumerate(zip(outputs, self.references, allowed, strict=True)):
            off = error(output, expected)
            if not off <= most:
                self.fail("numbers", f"output {number}: error {off:.3g} against float64, allowed {most:.3g}")


def passes_of(spec: ClusterSpec, plan: Plan) -> int:
    """Accumulators of a thread times blocks that walk over them: what making an interpreter of a kernel costs."""
    blocks = sum(len(stage.outputs) + len(stage.reductions) + bool(stage.carried) for stage in spec.stages)
    return blocks * plan.tile_m * plan.tile_n // THREADS


def inputs_of(function: relax.Function, case: Case) -> list[Array]:
    """Arrays for the parameters of a model, with a mean that is not zero; products have values near one."""
    draw = np.random.default_rng(case.seed)
    arrays = []
    for param in function.params:
        sizes = {dim.id_: case.symbol for dim in param.ty.shape if isinstance(dim, tirx.Var)}
        shape = [size_of(dim, sizes) for dim in param.ty.shape]
        values = draw.standard_normal(shape) + 0.5
        if param.name == "w":
            values = values * max(shape[0], shape[1]) ** -0.5
        kind = getattr(param.ty.dtype, "dtype", param.ty.dtype)
        arrays.append(np.asarray(values).astype(numpy_dtype(str(kind))))
    return arrays


def run_on_llvm(func: tirx.PrimFunc, inputs: list[Array], shapes: list[Any], dtypes: list[Any]) -> list[Array]:
    """Outputs of a scheduled cluster on the CPU."""
    executable = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    executable["main"](*[tvm.runtime.tensor(array) for array in inputs], *outputs)
    return [output.numpy() for output in outputs]
