"""Nsight Compute's figures of a kernel, from `ncu` in a child process."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_comfuse.profile.report import ProfileError
from tvm_comfuse.profile.subject import Subject

if TYPE_CHECKING:
    from tvm.target import Target

#: what is shown, and the names that versions of ncu have for it: the first that is there counts, and of several the largest
TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("duration", (r"gpu__time_duration\.sum", r"gpu__time_duration\.avg")),
    ("SM clock", (r"smsp?__cycles_elapsed\.avg\.per_second", r"gpc__cycles_elapsed\.avg\.per_second")),
    (
        "tensor pipe",
        (
            r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_active",
            r"sm__pipe_tensor\w*\.avg\.pct_of_peak_sustained_elapsed",
        ),
    ),
    (
        # of the rate at which such instructions could be issued; a wgmma keeps the pipe busy for long
        "tensor instructions issued",
        (r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",),
    ),
    ("issue slots busy", (r"sm__inst_issued\.avg\.pct_of_peak_sustained_active", r"sm__issue_active\.avg\.pct\w*")),
    ("instructions a cycle", (r"sm__inst_executed\.avg\.per_cycle_active",)),
    ("L2 throughput", (r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",)),
    ("DRAM throughput", (r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed", r"dram__throughput\.avg\.pct\w*")),
    ("L1 and shared memory throughput", (r"l1tex__throughput\.avg\.pct_of_peak_sustained_active", r"l1tex__throughput.*")),
    (
        "shared memory wavefronts",
        (
            r"l1tex__data_pipe_lsu_wavefronts_mem_shared\.avg\.pct_of_peak_sustained_elapsed",
            r"l1tex__data_pipe_lsu_wavefronts_mem_shared\.sum",
        ),
    ),
    ("shared memory bank conflicts", (r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared\.sum", r".*bank_conflicts.*\.sum")),
    ("registers a thread", (r"launch__registers_per_thread",)),
)  # fmt: skip
_SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats", "LaunchStats",
)  # fmt: skip
#: asked for besides; a version that does not know them is asked again without
_EXTRA = (
    "sm__cycles_elapsed.avg.per_second",
    "regex:sm__(inst_executed_)?pipe_tensor",
    "regex:l1tex__data_(bank_conflicts|pipe_lsu_wavefronts)_.*mem_shared",
)
#: of TVM's name of the device function, and launches before the one that is looked at
_KERNEL, _SKIP = "regex:main_kernel", 3
_TIME_LIMIT = 300.0


def find_ncu() -> str:
    """Path of Nsight Compute's command line.  Raises ProfileError."""
    found = shutil.which("ncu")
    if found is None:
        raise ProfileError("Nsight Compute (ncu on PATH)", "none", "install it, or leave out --ncu")
    return found


def ask(subject: Subject, target: Target) -> dict[str, Any]:
    """{"metrics": [...]} of one launch of the kernel without stamps, or {"failure": text} if ncu gives none.

    Raises ProfileError if it is not there.
    """
    import tvm

    from tvm_comfuse.target import name_of

    program = find_ncu()
    with tempfile.TemporaryDirectory(prefix="comfuse-") as folder:
        request = Path(folder) / "request.json"
        values = {"func": tvm.ir.save_json(subject.func), "rows": subject.rows, "target": name_of(target)}
        request.write_text(json.dumps(values), encoding="utf-8")
        failure = ""
        for extra in (_EXTRA, ()):
            text, failure = _run([program, *_options(extra), *_child(request)])
            metrics = parse_raw(text)
            if metrics:
                return {"metrics": select(metrics)}
    return {"failure": failure}


def _options(extra: tuple[str, ...]) -> list[str]:
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    metrics = ["--metrics", ",".join(extra)] if extra else []
    launches = ["--kernel-name", _KERNEL, "--launch-skip", str(_SKIP), "--launch-count", "1"]
    # the clock that the other figures were measured with
    return ["--csv", "--page", "raw", "--clock-control", "none", *launches, *sections, *metrics]


def _child(request: Path) -> list[str]:
    return [sys.executable, "-m", "tvm_comfuse.profile.child", str(request)]


def _run(command: list[str]) -> tuple[str, str]:
    """Standard output, and the end of what was said if it is no use."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.stdout, " | ".join(lines[-4:])[-600:] or f"nothing was said, exit status {done.returncode}"


def parse_raw(text: str) -> dict[str, tuple[str, str]]:
    """(value, unit) by name, of the last kernel in the text of ``ncu --csv --page raw``; {} for text without a table.

    The table is a line of names, a line of units and a line for each kernel, behind lines of other kinds.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    names, *rows = [row for row in csv.reader(lines[start:]) if row]
    rows = [row for row in rows if len(row) == len(names)]
    if len(rows) < 2:
        return {}
    return {name: (value, unit) for name, unit, value in zip(names, rows[0], rows[-1], strict=True)}


def select(metrics: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """{"label", "metric", "value", "unit"} of each line of TABLE; value is None where nothing of that name was measured."""
    return [{"label": label, **_chosen(metrics, patterns)} for label, patterns in TABLE]


def _chosen(metrics: dict[str, tuple[str, str]], patterns: tuple[str, ...]) -> dict[str, Any]:
    for pattern in patterns:
        found = [
            {"metric": name, "value": number, "unit": unit}
            for name, (value, unit) in metrics.items()
            if re.fullmatch(pattern, name) and (number := _number(value)) is not None
        ]
        if found:
            return max(found, key=lambda each: each["value"])
    return {"metric": None, "value": None, "unit": ""}


def _number(text: str) -> float | None:
    """A number with commas between thousands; None for "n/a" and the like."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
