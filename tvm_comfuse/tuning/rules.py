"""The design space for MetaSchedule: a schedule rule, a postprocessor and a mutator.

A trace holds the choices only: one ``sample_categorical`` for each axis of the space, its result noted on the root
block, and the table that says what the indices mean.  The postprocessor turns them into a plan, asks legality, and
applies the plan with the primitives of ``schedules``.  So a trace with another decision gives another plan, and what is
stored (decisions, then the postprocessor's instructions) replays in a process that has none of this.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import tvm
from tvm import s_tir
from tvm.ir.utils import derived_object

from tvm_comfuse.errors import PlanError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import PLAN, ROOT, apply_plan
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.tuning.metaschedule import meta_schedule as ms
from tvm_comfuse.tuning.space import Axis, Space

#: annotations of the root block in front of the postprocessor: the space as JSON, and an index for each axis
TABLE = "comfuse.space"
CHOICE = "comfuse.choice."
KIND = "comfuse.kind"
_SAMPLE, _ANNOTATE = "SampleCategorical", "Annotate"
#: mutations that a mutator tries before it gives up
_ATTEMPTS = 16


def space_generator(device: Device, refused: Counter[str] | None = None) -> Any:
    """MetaSchedule's space generator for functions with a ``comfuse.kind``.

    refused  counts the points that the postprocessor turned down, by code of refusal
    """
    return ms.space_generator.PostOrderApply(
        sch_rules=[PlanRule(device)],
        postprocs=[ApplyPlan(device, refused if refused is not None else Counter())],
        mutator_probs={MutateChoice(device): 1.0},
    )


def sample(sch: s_tir.Schedule, space: Space) -> None:
    """Samples every choice and notes it on the root block."""
    root = sch.get_sblock(ROOT)
    sch.annotate(root, TABLE, space.table())
    for axis in space.axes:
        count = len(axis.values)
        choice = sch.sample_categorical(list(range(count)), [1.0 / count] * count)
        sch.annotate(root, CHOICE + axis.name, choice)


def realize(sch: s_tir.Schedule, device: Device) -> list[Refusal]:
    """Applies the plan of the choices noted on the root block; gives the refusals instead if it is not legal.

    Raises PlanError if the root block has no choices.
    """
    root = sch.get_sblock(ROOT)
    notes = dict(sch.get(root).annotations)
    if TABLE not in notes:
        raise PlanError("a schedule with sampled choices", "none", "sample them with the schedule rule first")
    (func,) = (func for _, func in sch.mod.functions_items())
    space = Space.read(str(notes[TABLE]), analyze(func), device)
    plan = space.plan([int(notes[CHOICE + axis.name]) for axis in space.axes])
    refusals = legality(plan, space.spec, device)
    if refusals:
        return refusals
    for note in (TABLE, *(CHOICE + axis.name for axis in space.axes)):
        sch.unannotate(root, note)
    apply_plan(sch, plan)
    return []


def schedule_at(mod: tvm.IRModule, space: Space, point: tuple[int, ...]) -> s_tir.Schedule:
    """The schedule of a legal point, with a trace as MetaSchedule's own search makes it.

    mod  a workload: one canonical function, named main
    """
    bare = s_tir.Schedule(mod)
    sample(bare, space)
    trace = bare.trace
    for inst, index in zip(_samples(trace), point, strict=True):
        trace = trace.with_decision(inst, index, remove_postproc=True)
    sch = s_tir.Schedule(mod)
    trace.apply_to_schedule(sch, remove_postproc=True)
    sch.enter_postproc()
    refusals = realize(sch, space.device)
    if refusals:
        raise PlanError("a legal point", str(refusals[0]), "take one of Space.legal")
    return sch


def plan_in(trace: s_tir.schedule.Trace) -> Plan | None:
    """The plan that a trace applies; None if it applies none."""
    for inst in trace.insts:
        if inst.kind.name == _ANNOTATE and str(inst.attrs[0]) == PLAN:
            return Plan.from_json(str(inst.inputs[1]))
    return None


def table_in(trace: s_tir.schedule.Trace) -> str | None:
    """The table of the space that a trace is from; None if it is from none."""
    for inst in trace.insts:
        if inst.kind.name == _ANNOTATE and str(inst.attrs[0]) == TABLE:
            return str(inst.inputs[1])
    return None


def _samples(trace: s_tir.schedule.Trace) -> list[Any]:
    return [inst for inst in trace.insts if inst.kind.name == _SAMPLE]


def _is_cluster(mod: tvm.IRModule) -> bool:
    return any(func.attrs is not None and KIND in func.attrs for _, func in mod.functions_items())


@derived_object
class PlanRule(ms.schedule_rule.PyScheduleRule):
    """Samples the choices of a cluster, once, at its product; leaves every other function alone."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Nothing to learn: the function says everything."""

    def apply(self, sch: s_tir.Schedule, block: Any) -> list[s_tir.Schedule]:
        """The schedule itself, with the choices if `block` is the product."""
        if sch.get(block).name_hint == "gemm" and _is_cluster(sch.mod):
            (func,) = (func for _, func in sch.mod.functions_items())
            space = Space.of(analyze(func), self._device)
            if not isinstance(space, Refusal):
                sample(sch, space)
        return [sch]

    def clone(self) -> Any:
        """One for another thread."""
        return PlanRule(self._device)


@derived_object
class ApplyPlan(ms.postproc.PyPostproc):
    """From choices to a scheduled function; what is not legal is turned down and counted."""

    def __init__(self, device: Device, refused: Counter[str]):
        super().__init__()
        self._device, self._refused = device, refused

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Nothing to learn: the function says everything."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Whether the plan is legal."""
        if not _is_cluster(sch.mod):
            return True
        refusals = realize(sch, self._device)
        self._refused.update({refusal.code for refusal in refusals})
        return not refusals

    def clone(self) -> Any:
        """One for another thread; it counts into the same place."""
        return ApplyPlan(self._device, self._refused)


@derived_object
class MutateChoice(ms.mutator.PyMutator):
    """Another value for one choice, such that the plan is legal: a neighbour of a number, any other of words."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device
        self._spec: ClusterSpec | None = None
        self._random = random.Random(0)

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Learns the cluster."""
        if context.mod is not None and _is_cluster(context.mod):
            (func,) = (func for _, func in context.mod.functions_items())
            self._spec = analyze(func)

    def apply(self, trace: s_tir.schedule.Trace, _: Any = None) -> s_tir.schedule.Trace | None:
        """A trace without the postprocessor's part, or None if no neighbour was found to be legal."""
        table = table_in(trace)
        if table is None or self._spec is None:
            return None
        space, insts = Space.read(table, self._spec, self._device), _samples(trace)
        point = [int(trace.decisions[inst]) for inst in insts]
        for _attempt in range(_ATTEMPTS):
            which = self._random.randrange(len(space.axes))
            other = self._random.choice(neighbours(space.axes[which], point[which]))
            changed = [*point[:which], other, *point[which + 1 :]]
            if not legality(space.plan(changed), space.spec, space.device):
                return trace.with_decision(insts[which], other, remove_postproc=True)
        return None

    def clone(self) -> Any:
        """One for another thread."""
        return MutateChoice(self._device)


def neighbours(axis: Axis, index: int) -> list[int]:
    """Indices next to one on an ordered axis, all others on another."""
    near = (index - 1, index + 1) if axis.ordered and len(axis.fields) == 1 else range(len(axis.values))
    return [other for other in near if other != index and 0 <= other < len(axis.values)]
