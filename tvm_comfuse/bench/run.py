"""Run suites: check each row, then time all contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tvm_comfuse.bench import contenders, suites, timing
from tvm_comfuse.bench.checks import RowCheck, check_row, run_seed
from tvm_comfuse.bench.isolate import IsolatedChecks, Limits
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import OurKernel, Records, compile_row, new_output
from tvm_comfuse.bench.report import BenchReport, RowResult, new_report
from tvm_comfuse.bench.suites import Row, SuiteError
from tvm_comfuse.errors import TargetError
from tvm_comfuse.forms import check_form
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.target import is_cuda, parse_target
from tvm_comfuse.tuning.database import Database

#: contenders besides ours
OTHERS = ("split", "mm", "eager", "inductor")
#: in front of the name of a setting of TorchInductor, among a row's contenders
INDUCTOR = "inductor "


def run_suite(
    suite: str | None = None,
    suite_file: str | Path | None = None,
    rows: Iterable[str] | None = None,
    *,
    target: str = "cuda",
    seeds: int = 3,
    inductor: str = "quick",
    inductor_budget: float = 240.0,
    json_path: str | Path | None = None,
    isolate: bool = True,
    limits: Limits | None = None,
    timed: bool = True,
    others: Iterable[str] = OTHERS,
    tuning_records: str | Path | None = None,
    use_pretuned: bool = True,
    form: str = "auto",
    progress: Callable[[RowResult], None] | None = None,
) -> BenchReport:
    """Check and time the rows of a suite.

    suite, rows      names; None for all of them
    suite_file       a file of one's own instead of the package's suites
    target           a short target name; "llvm" only with timed=False: it checks on the CPU
    seeds            seeds a row is checked on, 0 for no check
    inductor         which settings TorchInductor may use: none, default, quick or full
    inductor_budget  seconds a row after which no further setting is started
    json_path        written after every row, so that a run that is stopped leaves what it has
    isolate          make each kernel's first launch in a child process, with `limits`; a kernel that did not pass there
                     is not launched here
    others           contenders besides ours: the split form, mm, eager, inductor
    tuning_records   the folder of a tuning database to take plans from
    use_pretuned     whether plans of the package's own records are taken
    form             of ours: auto, fused or split
    progress         called with each finished row

    Errors of a row are recorded in the row.  Raises SuiteError for unknown names, PlanError for an unknown form,
    TargetError without a GPU, DatabaseError for tuning_records that are no database.
    """
    chosen = suites.select(suites.load(suite_file), suite, rows)
    check_form(form)
    records = Records(None if tuning_records is None else str(tuning_records), use_pretuned, form)
    settings = _Settings(target, range(seeds), inductor, inductor_budget, tuple(others), records)
    _validate(settings, timed)
    report = new_report(timing.PROTOCOL if timed else "not timed")
    with ExitStack() as stack:
        child = stack.enter_context(IsolatedChecks(limits)) if isolate and seeds else None
        for row in chosen:
            result = RowResult.of(row)
            report.rows.append(result)
            checker = child.check if child else check_row
            check = checker(row, settings.seeds, target, records)
            check.copy_to(result)
            if timed:
                _time_row(row, check, settings, result)
            if json_path is not None:
                report.write(json_path)
            if progress is not None:
                progress(result)
    return report


@dataclass(frozen=True)
class _Settings:
    """The options that reach a row."""

    target: str
    seeds: range
    inductor: str
    budget: float
    others: tuple[str, ...]
    records: Records


def _validate(settings: _Settings, timed: bool) -> None:
    unknown = [name for name in settings.others if name not in OTHERS]
    if unknown:
        raise SuiteError(f"contenders out of {', '.join(OTHERS)}", ", ".join(unknown), "correct the names")
    levels = contenders.INDUCTOR_LEVELS
    if settings.inductor not in levels:
        raise SuiteError(f"inductor out of {', '.join(levels)}", repr(settings.inductor), "use one of them")
    if settings.records.folder is not None:
        Database.open(settings.records.folder, create=False)
    parsed = parse_target(settings.target)
    if timed and not is_cuda(parsed):
        raise TargetError("a CUDA target to time", settings.target, "target h200, or check only")
    if is_cuda(parsed) and not torch.cuda.is_available():
        raise TargetError("a CUDA GPU that PyTorch can use", "none", "run on a machine with one, or check on llvm")


def _time_row(row: Row, check: RowCheck, settings: _Settings, result: RowResult) -> None:
    """Time every contender of a row; what fails is noted and the others go on."""
    op = OPS[row.op]
    try:
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        sets = timing.make_sets(op, row.M, row.N, row.K, row.dtype, l2_bytes=l2)
    except RuntimeError as error:  # out of memory, or a fault of an earlier row
        result.add_failure(f"inputs: {str(error)[:300]}")
        return
    makers: dict[str, Callable[[], Callable[..., Any] | None]] = {}
    if check.fused and check.passed is not False:
        makers["ours"] = lambda: _ours(row, settings.target, settings.records)
    makers["split"] = lambda: _split(row, settings.target, replace(settings.records, form="split"))
    makers |= {"mm": lambda: contenders.mm_call, "eager": lambda: op.eager}
    with torch.no_grad():
        captured = _capture(makers, settings.others, sets, result)
    if "inductor" in settings.others:
        for name, found in contenders.capture_inductor(op, sets, settings.inductor, settings.budget).items():
            if isinstance(found, contenders.Skipped):
                result.inductor[name] = found.why
            else:
                captured[f"{INDUCTOR}{name}"] = found
    record_rounds(result, timing.in_turns({name: graph.measure for name, graph in captured.items()}))
    for graph in captured.values():
        graph.release()
    sets.clear()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def _capture(
    makers: dict[str, Callable[[], Callable[..., Any] | None]],
    others: tuple[str, ...],
    sets: list[list[torch.Tensor]],
    result: RowResult,
) -> dict[str, timing.Captured]:
    """The contenders that are wanted, captured."""
    captured = {}
    for name, make in makers.items():
        if name != "ours" and name not in others:
            continue
        try:
            call = make()
            if call is not None:
                captured[name] = timing.capture(call, sets)
        except Exception as error:  # one contender's error must not cost the others their times
            result.add_failure(_failure(name, error))
    return captured


def record_rounds(result: RowResult, found: dict[str, list[float] | Exception]) -> None:
    """Puts the times of all rounds, and their medians, into a row's result.

    found  by contender: ours, split, mm, eager, and "inductor NAME" for each setting, of which the fastest counts
    """
    for name, times in found.items():
        setting = name.removeprefix(INDUCTOR) if name.startswith(INDUCTOR) else None
        if isinstance(times, Exception):
            if setting is None:
                result.add_failure(_failure(name, times))
            else:
                result.inductor[setting] = f"{type(times).__name__}: {times}"[:300]
            continue
        result.rounds[name] = times
        us = timing.median(times)
        if setting is None:
            setattr(result, f"{name}_us", us)
            continue
        result.inductor[setting] = us
        if result.inductor_us is None or us < result.inductor_us:
            result.inductor_us, result.inductor_setting = us, setting


def _failure(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {str(error).strip()[-300:]}"


def _ours(row: Row, target: str, records: Records) -> Callable[..., Any]:
    kernel = compile_row(row, parse_target(target), records)
    if isinstance(kernel, Refusal):
        raise RuntimeError(f"refused, but was fused in the check: {kernel}")
    return _with_output(row, kernel)


def _split(row: Row, target: str, records: Records) -> Callable[..., Any] | None:
    """A row's split form if it is right; None for a row without one."""
    kernel = compile_row(row, parse_target(target), records)
    if isinstance(kernel, Refusal) or kernel.via != "split":
        return None
    report = run_seed(row, kernel, 0, "cuda")
    if not report["passed"]:
        raise RuntimeError(f"error {report['error']:.3g}, eager's {report['eager_error']:.3g}")
    return _with_output(row, kernel)


def _with_output(row: Row, kernel: OurKernel) -> Callable[..., Any]:
    out = new_output(row, "cuda")
    return lambda *inputs: kernel.run(list(inputs), out)
