"""Many examples: each failure is shrunk and saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tvm_comfuse.schedules.plan import COOPERATIVE_GROUPS, QUAD_COLUMNS
from tvm_comfuse.schedules.walk import in_turn
from tvm_comfuse.verify.fuzz.case import Effort, FuzzError, Outcome, run_case
from tvm_comfuse.verify.fuzz.replay import file_name, script_of
from tvm_comfuse.verify.fuzz.strategies import Example, examples

#: measured: half a second of one core for an example
CI = Effort(interpreter=160, llvm=3, module=16)
LONG = Effort(interpreter=1024, llvm=1, module=8, cuda=128)
#: a failure ends a part of a campaign, the next one begins with another seed
PART = 25


@dataclass
class Summary:
    """What a campaign did.

    examples    that ran to their end
    steps       how many of them got each step
    kinds       how many had each layout, exchange, dtype, ...
    seconds     CPU time by step
    failures    the shrunk ones; files: where they are saved
    """

    examples: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failures: list[FuzzError] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def add(self, example: Example, outcome: Outcome) -> None:
        """Counts an example."""
        assert outcome.case is not None
        assert outcome.spec is not None
        plan = outcome.case.plan
        assert plan is not None
        self.examples += 1
        self.steps.update(outcome.seconds.keys())
        self.seconds.update(outcome.seconds)
        parts = -(-outcome.spec.n // plan.cta_columns)
        kinds = [plan.layout, f"exchange {plan.exchange}", example.model.dtype, f"w {example.model.layout}"]
        kinds += ["cut short"] * bool(outcome.stops) + ["symbolic"] * example.model.symbolic
        kinds += ["ragged N"] * (outcome.spec.n % plan.cta_columns != 0) + ["multicast"] * (plan.cluster_m > 1)
        kinds += ["shared A"] * plan.share_a
        kinds += [f"stages {min(len(outcome.spec.stages), 5)}", f"results {min(len(outcome.spec.outputs), 4)}"]
        kinds += ["tma operand"] * ("tma" in plan.operands) + ["tma store"] * ("tma" in plan.store)
        kinds += ["resident W"] * plan.w_resident + ["deferred"] * plan.defer + ["quads"] * (plan.w_order == "quads")
        kinds += ["tiles in turn"] * in_turn(plan)
        kinds += ["narrow tile"] * (plan.tile_n % (2 * QUAD_COLUMNS) != 0)
        kinds += ["fast math"] * plan.fast_math + ["dependent launch"] * plan.dependent_launch
        kinds += ["packed tail"] * plan.packed_tail
        kinds += ["more MMA groups"] * (plan.mma_groups > COOPERATIVE_GROUPS)
        kinds += ["parts 5 or more"] * (parts >= 5) + ["several launches"] * (example.launches > 1)
        self.kinds.update(kinds)

    def __str__(self) -> str:
        lines = [f"{self.examples} examples, {len(self.failures)} failures"]
        for name, counts in (("steps", self.steps), ("kinds", self.kinds)):
            lines.append(f"{name}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())))
        lines.append("CPU seconds: " + ", ".join(f"{key} {spent:.0f}" for key, spent in sorted(self.seconds.items())))
        lines += [f"{failure.kind}: {failure.text}" for failure in self.failures]
        return "\n".join([*lines, *(f"saved {path}" for path in self.files)])


def campaign(
    count: int,
    seed: int,
    effort: Effort,
    *,
    save: Path | None = None,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Runs `count` examples, always the same ones for a seed and version of hypothesis.

    save      folder for the replay files of failures, made if there are any; None: nothing is written
    progress  called after every PART examples
    """
    summary = Summary()
    for number, start in enumerate(range(0, count, PART)):
        failure = _part(min(PART, count - start), seed + number, effort, summary)
        if failure is not None:
            summary.failures.append(failure)
            if save is not None:
                summary.files.append(_save(failure, save))
        if progress is not None:
            progress(summary)
    return summary


def _part(count: int, seed: int, effort: Effort, summary: Summary) -> FuzzError | None:
    """Runs until the first failure, which is shrunk."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(examples())
    def one(example: Example) -> None:
        outcome = run_case(*example.case(), effort)
        if outcome.rejected:
            hypothesis.reject()
        summary.add(example, outcome)

    try:
        one()
    except FuzzError as failure:
        return failure
    return None


def _save(failure: FuzzError, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(failure)
    path, number = folder / name, 1
    while path.exists() and path.read_text() != script_of(failure):
        number += 1
        path = folder / name.replace(".py", f"_{number}.py")
    path.write_text(script_of(failure))
    return path
