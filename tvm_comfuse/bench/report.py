"""The report of a benchmark run, and its JSON form.

    {"device", "date", "commit", "versions": {...}, "protocol", "rows": [{
        "suite", "name", "op", "M", "N", "K", "dtype",
        "fused": bool, "plan": {...} | null, "refusal": {...} | null, "failure": str | null, "via": "kernel" | "split",
        "ours_us", "split_us", "mm_us", "eager_us", "inductor_us", "inductor_setting", "inductor": {setting: us or why not},
        "rounds": {contender: [us, ...]},
        "error", "eager_error", "passed": bool | null, "seeds": [{"seed", "error", "eager_error", ...}]}]}

ours is the form that `tvm_comfuse.compile` takes, one kernel or two ("via"); split is the form of two, checked as well.
Times are microseconds a call, the median of the rounds (bench/timing.py), where TorchInductor's settings are called
"inductor NAME"; errors are relative, in float64, of the seed with the largest error/eager_error.  What
was not measured is null.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tvm_comfuse.bench.suites import Row
from tvm_comfuse.errors import ComfuseError

#: says which commit is measured where the checkout has no git data
COMMIT_VARIABLE = "COMFUSE_COMMIT"
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "torch", "triton", "numpy")
REQUIRED = ("device", "date", "commit", "versions", "protocol", "rows")


class ReportError(ComfuseError, ValueError):
    """A report file does not have the form of a report."""


@dataclass
class RowResult:
    """One row: the workload, what was found out about our kernel, and the times.  Fields as in the module's text."""

    suite: str
    name: str
    op: str
    M: int
    N: int
    K: int
    dtype: str
    fused: bool = False
    ours_us: float | None = None
    split_us: float | None = None
    mm_us: float | None = None
    eager_us: float | None = None
    inductor_us: float | None = None
    inductor_setting: str | None = None
    error: float | None = None
    eager_error: float | None = None
    plan: dict[str, Any] | None = None
    refusal: dict[str, Any] | None = None
    failure: str | None = None
    via: str | None = None
    passed: bool | None = None
    seeds: list[dict[str, Any]] = field(default_factory=list)
    inductor: dict[str, float | str] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @staticmethod
    def of(row: Row) -> RowResult:
        """An empty result for a workload."""
        return RowResult(row.suite, row.name, row.op, row.M, row.N, row.K, row.dtype)

    @property
    def best_other_us(self) -> float | None:
        """The faster of eager and TorchInductor."""
        times = [time for time in (self.eager_us, self.inductor_us) if time is not None]
        return min(times) if times else None

    @property
    def speedup(self) -> float | None:
        """How many times faster than the best other one ours is; below 1 is a loss."""
        best = self.best_other_us
        return best / self.ours_us if best is not None and self.ours_us else None

    def add_failure(self, text: str) -> None:
        """Keep one more thing that went wrong."""
        self.failure = f"{self.failure}; {text}" if self.failure else text


@dataclass
class BenchReport:
    """A run: where and with what, and its rows in order."""

    device: str
    date: str
    commit: str
    versions: dict[str, str]
    protocol: str
    rows: list[RowResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; NaN and infinities become null."""
        return _plain(asdict(self))

    def write(self, path: str | Path) -> None:
        """Write the JSON so that a reader sees either the old file or the whole new one.

        Makes missing folders.  Raises OSError.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1, allow_nan=False)
                file.write("\n")
            # mkstemp makes the file private; a report is as readable as any new file
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def is_one(path: str | Path) -> bool:
        """Whether a JSON file is a report, whole or not, and not a record of another kind of measurement.

        A report says which commit it measured, and its rows are of suites.  Raises ReportError for a file that is no JSON.
        """
        values = _read_json(path)
        if not isinstance(values, dict) or "commit" not in values or not isinstance(values.get("rows"), list):
            return False
        return all(isinstance(row, dict) and "suite" in row for row in values["rows"])

    @staticmethod
    def read(path: str | Path) -> BenchReport:
        """The inverse of write; unknown fields of rows are ignored.  Raises ReportError."""
        values = _read_json(path)
        missing = [name for name in REQUIRED if not isinstance(values, dict) or name not in values]
        if missing:
            raise ReportError(f"the fields {', '.join(REQUIRED)} in {path}", f"no {', '.join(missing)}", "make it anew")
        known = RowResult.__dataclass_fields__
        try:
            rows = [RowResult(**{key: value for key, value in row.items() if key in known}) for row in values["rows"]]
        except (TypeError, AttributeError) as error:
            raise ReportError(f"rows as in tvm_comfuse.bench.report in {path}", str(error), "make it anew") from error
        return BenchReport(**{name: values[name] for name in REQUIRED[:-1]}, rows=rows)


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"a benchmark report at {path}", str(error), "make it with `comfuse bench`") from error


def environment() -> dict[str, str]:
    """Versions of everything that decides about speed; "none" for what is not installed."""
    from tvm_comfuse._version import __version__
    from tvm_comfuse.tir_passes import KERNEL_VERSION

    versions = {
        "tvm_comfuse": __version__,
        "kernel": str(KERNEL_VERSION),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    import torch

    versions["cuda"] = str(torch.version.cuda or "none")
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions["driver"] = drivers.split("\n")[0] or "none"
    return versions


def device_name() -> str:
    """The name of the current GPU, or "cpu"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def commit() -> str:
    """The commit of the checkout this package runs from, with "-dirty" if files differ from it; or "unknown".

    The environment variable COMFUSE_COMMIT wins: a copy of a checkout may have come without its git data.
    """
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    root = str(Path(__file__).resolve().parents[2])
    # an installed package may lie inside somebody else's repository: that commit would be a wrong answer
    if _output("git", "-C", root, "ls-files", "--error-unmatch", "tvm_comfuse/__init__.py") == "":
        return "unknown"
    head = _output("git", "-C", root, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = _output("git", "-C", root, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def new_report(protocol: str) -> BenchReport:
    """A report without rows for this machine, now (UTC)."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return BenchReport(device_name(), date, commit(), environment(), protocol)


def _output(*command: str) -> str:
    """Standard output of a command, "" if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
