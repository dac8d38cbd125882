"""From a lowered kernel and its inputs to outputs and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.interpreter.machine import Launch, Machine
from tvm_comfuse.verify.interpreter.mail_calls import mail_arrays
from tvm_comfuse.verify.interpreter.memory import Statics, Tensor, numpy_dtype, tensor_map
from tvm_comfuse.verify.interpreter.report import HaltError, Report
from tvm_comfuse.verify.interpreter.roles import Role, actors_of, compile_roles, stamp_buffer
from tvm_comfuse.verify.interpreter.scheduler import Scheduler
from tvm_comfuse.verify.interpreter.tree import Buffer, Expr, Kernel, UnsupportedError, read_kernel, show
from tvm_comfuse.verify.interpreter.values import Value

Array = np.ndarray
ENCODE = "runtime.cuTensorMapEncodeTiled"
MAX_STEPS = 2_000_000


@dataclass(frozen=True)
class Result:
    """What a run gave.

    outputs       arrays by parameter name, of their own dtype; NaN where nothing was written
    findings      violations, in the order they happened; empty for a right kernel
    interleaving  digest of the order in which actors and copies went on: equal digests, equal runs
    steps         how often the scheduler chose
    statics       static memory of the module after the launch, to be given to the next one
    stamps        what an instrumented kernel wrote to the buffer of its stamps, which is no output; None without one
    """

    outputs: dict[str, Array]
    findings: list[Finding]
    interleaving: str
    steps: int
    statics: Statics
    stamps: Array | None = None


def interpret(
    kernel: tirx.PrimFunc,
    inputs: Mapping[str, Array] | Sequence[Array],
    *,
    seed: int = 0,
    slow: str | None = None,
    max_steps: int = MAX_STEPS,
    resident: int | None = None,
    statics: Statics | None = None,
) -> Result:
    """Runs the whole grid of a lowered kernel once.  See Program; use that to run one kernel several times."""
    return Program(kernel).run(inputs, seed=seed, slow=slow, max_steps=max_steps, resident=resident, statics=statics)


def run_together(
    programs: Sequence[Program],
    inputs: Sequence[Mapping[str, Array] | Sequence[Array]],
    *,
    seed: int = 0,
    slow: str | None = None,
    max_steps: int = MAX_STEPS,
    resident: int | None = None,
    statics: Statics | None = None,
) -> list[Result]:
    """Launches that run at the same time, as on several streams: they share static memory and nothing else.

    programs  one for each launch, all different; of one kernel if they are to share its mailboxes
    inputs    of each launch, which begin in this order; the rest as of Program.run
    `slow` knows the second launch as ``launch2``.  All results have the findings of the whole run.
    Raises LoweringError if inputs do not fit the parameters.
    """
    report, memory = Report(), statics or Statics()
    scheduler = Scheduler(seed, slow, report, max_steps)
    bound = [program._bind(given, report) for program, given in zip(programs, inputs, strict=True)]
    with np.errstate(all="ignore"):
        try:
            clusters: list[list[Any]] = []
            for number, (program, (tensors, shapes)) in enumerate(zip(programs, bound, strict=True), 1):
                names = program._names(tensors, shapes, report)
                machine = program.machine(report, scheduler, memory, number)
                clusters += program._clusters(program._compiled(shapes, names), names, machine)
            scheduler.start(clusters, len(clusters) if resident is None else resident)
            if scheduler.run():
                for program, (tensors, _) in zip(programs, bound, strict=True):
                    program._check_outputs(tensors, report)
        except HaltError:
            pass
    digest, steps = f"{scheduler.digest:08x}", scheduler.steps
    return [
        Result(program._outputs(tensors), report.findings, digest, steps, memory, program._stamped(tensors))
        for program, (tensors, _) in zip(programs, bound, strict=True)
    ]


class Program:
    """A lowered kernel (before TVM's own lowering of TIRx), ready to run.

    Raises UnsupportedError if it has an instruction that is not modelled.
    """

    def __init__(self, kernel: tirx.PrimFunc):
        self.kernel: Kernel = read_kernel(kernel)
        if not self.kernel.device:
            raise LoweringError(
                "a lowered kernel", f"{kernel.attrs} without device code", "lower it with tir_passes.lower"
            )
        self._roles: dict[Any, tuple[list[Role], dict[str, Any]]] = {}
        self.stamps = stamp_buffer(self.kernel)

    def run(
        self,
        inputs: Mapping[str, Array] | Sequence[Array],
        *,
        seed: int = 0,
        slow: str | None = None,
        max_steps: int = MAX_STEPS,
        resident: int | None = None,
        statics: Statics | None = None,
    ) -> Result:
        """One launch.

        inputs     arrays of the first parameters, or by name; the parameters without one are outputs
        seed       of the order in which actors go on
        slow       who goes on only if nobody else can: ``wg1``, ``cta0``, ``wg0.w2``, ``cta1.wg0``, ``load``, ``store``
        max_steps  choices of the scheduler after which the run ends with a finding
        resident   clusters (CTAs, without clusters) that the GPU runs at the same time; others begin when some have left.
                   None: all of them
        statics    static memory that an earlier launch of the same kernel left
        Raises LoweringError if the inputs do not fit the parameters.
        """
        (result,) = run_together(
            [self], [inputs], seed=seed, slow=slow, max_steps=max_steps, resident=resident, statics=statics
        )
        return result

    def actors(self) -> list[str]:
        """Values of `slow` that name a warp group, warp or kind of copy of this kernel."""
        actors = actors_of(self.kernel, self._extent("warp_group", 1))
        return [f"wg{group}" + ("" if warp is None else f".w{warp}") for group, warp in actors] + ["load", "store"]

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _bind(self, inputs: Any, report: Report) -> tuple[dict[Buffer, Tensor], dict[Any, int]]:
        """Tensors of all parameters, values of the variables in their shapes."""
        given = (
            dict(inputs)
            if isinstance(inputs, Mapping)
            else {buffer.name: array for buffer, array in zip(self.kernel.params, inputs, strict=False)}
        )
        unknown = set(given) - {buffer.name for buffer in self.kernel.params}
        if unknown:
            raise LoweringError("inputs named like parameters", f"{sorted(unknown)}", "see the kernel's signature")
        shapes: dict[Any, int] = {}
        for buffer in self.kernel.params:
            if buffer.name in given:
                self._match(buffer, given[buffer.name], shapes)
        tensors = {}
        for buffer in self.kernel.params:
            array = given.get(buffer.name)
            if array is None:
                shape = [shapes[e.value] if e.op == "var" else int(e.value) for e in buffer.shape]
                fill = 0 if buffer is self.stamps else np.nan
                array = np.full(shape, fill, numpy_dtype(buffer.dtype))
            else:
                array = np.ascontiguousarray(array)
            tensors[buffer] = Tensor(buffer.name, array, buffer.name not in given, report)
        return tensors, shapes

    def _match(self, buffer: Buffer, array: Array, shapes: dict[Any, int]) -> None:
        good = array.dtype == numpy_dtype(buffer.dtype) and array.ndim == len(buffer.shape)
        for expr, extent in zip(buffer.shape, array.shape, strict=False):
            expected = shapes.setdefault(expr.value, extent) if expr.op == "var" else expr.value
            good = good and expected == extent
        if not good:
            needed = f"{buffer.name} of {buffer.dtype} and shape ({', '.join(map(show, buffer.shape))})"
            raise LoweringError(needed, f"{array.dtype} {array.shape}", "pass inputs in the order of the parameters")

    def _outputs(self, tensors: dict[Buffer, Tensor]) -> dict[str, Array]:
        outputs = [buffer for buffer in self.kernel.params if tensors[buffer].output and buffer is not self.stamps]
        return {buffer.name: tensors[buffer].array for buffer in outputs}

    def _stamped(self, tensors: dict[Buffer, Tensor]) -> Array | None:
        return tensors[self.stamps].array if self.stamps is not None else None

    def _check_outputs(self, tensors: dict[Buffer, Tensor], report: Report) -> None:
        for buffer, tensor in tensors.items():
            if buffer is not self.stamps and tensor.output and not tensor.author.all():
                missing = np.unravel_index(int(np.argmin(tensor.author != 0)), tensor.array.shape)
                count = int((tensor.author == 0).sum())
                text = f"{count} of {tensor.author.size} elements are never written, the first at {[int(i) for i in missing]}"
                report.add("output-not-written", tensor.name, text, missing=count)

    # --- code ---------------------------------------------------------------------------------------------------------

    def _names(self, tensors: dict[Buffer, Tensor], shapes: dict[Any, int], report: Report) -> dict[str, Any]:
        """What generated code names: tensors and tensor maps."""
        names: dict[str, Any] = {f"tensor_{buffer.name}": tensor for buffer, tensor in tensors.items()}
        for stmt in self.kernel.host:
            if stmt.kind != "eval":
                continue
            call = stmt.args[0]
            if call.value != "tvm_call_packed" or call.args[0].value != ENCODE:
                raise UnsupportedError(f"host call {show(call)}")
            variable, dtype, rank, data, *rest = call.args[1:]
            tensor = tensors[data.args[0].value]
            values = [dtype.value, rank.value, *(self._number(expr, shapes) for expr in rest)]
            names[f"map_{variable.value.name}"] = tensor_map(variable.value.name, tensor, values, report)
        return names

    def _number(self, expr: Expr, shapes: dict[Any, int]) -> int:
        """A host expression of sizes."""
        if expr.op == "const":
            return int(expr.value)
        if expr.op == "var":
            return shapes[expr.value]
        parts = [self._number(arg, shapes) for arg in expr.args]
        operations: dict[str, Any] = {
            "*": lambda a, b: a * b,
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "cast": int,
        }
        if expr.op not in operations:
            raise UnsupportedError(f"host expression {show(expr)}")
        return operations[expr.op](*parts)

    def _compiled(self, shapes: dict[Any, int], names: dict[str, Any]) -> list[Role]:
        """Roles for these sizes; the tensors of this run replace those of the one that compiled them."""
        key = tuple(sorted((variable.name, value) for variable, value in shapes.items()))
        if key not in self._roles:
            parameters = {variable: Value(repr(value), False, value) for variable, value in shapes.items()}
            groups = self._extent("warp_group", 1)
            self._roles[key] = (compile_roles(self.kernel, groups, names, parameters), names)
        return self._roles[key][0]

    # --- launch -------------------------------------------------------------------------------------------------------

    def _extent(self, scope: str, default: int) -> int:
        return next((extent for name, _, extent in self.kernel.scopes if name == scope), default)

    def _shape(self) -> Launch:
        cluster = self._extent("rank", 1)
        ctas = self._extent("cluster", 0) * cluster or self._extent("cta", 1)
        dynamic = [b for b in self.kernel.shared if b.scope == "shared.dyn"]
        barriers = {b.name: b.size for b in self.kernel.shared if b.scope == "shared"}
        shared = sum(b.size * b.item for b in dynamic)
        if len(dynamic) > 1:
            raise UnsupportedError(f"{len(dynamic)} arrays in dynamic shared memory")
        mail, dependent = mail_arrays(self.kernel), self.kernel.dependent
        groups, size = self._extent("warp_group", 1), -(-shared // 16) * 16
        return Launch(ctas, cluster, groups, size, barriers, mail, dependent)

    def machine(self, report: Report, scheduler: Scheduler, statics: Statics, number: int) -> Machine:
        """The machine of launch `number` of those that run at the same time."""
        return Machine(self._shape(), report, scheduler, statics, number)

    def _clusters(self, roles: list[Role], names: dict[str, Any], machine: Machine) -> list[list[Any]]:
        """The actors of each cluster."""
        clusters: list[list[Any]] = []
        for cta in machine.ctas:
            if cta.rank == 0:
                clusters.append([])
            for role in roles:
                actor = machine.add_actor(cta, role.group, role.warp)
                role.run.__globals__.update(names)
                actor.code = role.run(actor)
                clusters[-1].append(actor)
        return clusters
