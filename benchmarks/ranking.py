"""How well the cost model ranks measured candidates, next to TVM's features alone, the estimate and chance.

    python benchmarks/ranking.py RECORDS_FOLDER             tuning records, see docs/database.md
    python benchmarks/ranking.py search.json --json FILE    what benchmarks/search.py has measured

Of each workload half of the candidates are held out (``plans``), then each workload in turn (``tasks``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm.target import Target

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.report import ReportError
from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.schedules.device import H200, Device, device_of
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.tuning.plan_times import PlanTimes, RowTimes
from tvm_comfuse.tuning.quality import TOP, Measurements, compare, measurements
from tvm_comfuse.tuning.record import DatabaseStore
from tvm_comfuse.tuning.task import tasks_of

#: candidates without which a ranking says nothing
FEWEST = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of records, or a JSON file of plan times")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--most", type=int, default=300, help="candidates of a workload, taken at random")
    parser.add_argument("--json", type=Path, help="where the table goes too")
    options = parser.parse_args(arguments)
    try:
        target = tvm_comfuse.parse_target(options.target)
        device = device_of(target) or H200
        header, measured = read(options.source, target, device)
        measured = [some for group in measured if len((some := _sample(group, options.most)).plans) >= FEWEST]
        if not measured:
            hint = "measure some, with `comfuse tune` or benchmarks/search.py"
            raise ReportError(
                f"a workload with {FEWEST} measured plans of this version", f"none in {options.source}", hint
            )
        lines = judge(measured, device)
        if options.json is not None:
            options.json.write_text(json.dumps({**header, "source": options.source.name, "rankings": lines}, indent=1))
    except (ComfuseError, OSError) as error:
        print(f"ranking: {error}", file=sys.stderr)
        return 1
    print(f"{'held out':9} {'model':9} {'pairs':>6} {f'best of {TOP}':>10} {'candidates':>10}")
    for line in lines:
        print("{held_out:9} {model:9} {pairs:6.3f} {best_of:10.3f} {candidates:10}".format(**line))
    return 0


def read(source: Path, target: Target, device: Device) -> tuple[dict[str, Any], list[Measurements]]:
    """Where and with what plans were measured, as far as that is one thing, and the measurements by workload.

    Raises ComfuseError for what is neither a database nor a file of plan times.
    """
    if source.is_file():
        file = PlanTimes.read(source)
        return file.header, [of_row(times, target, device) for times in file.rows.values()]
    database = Database.open(source, create=False, read_only=True)
    return {}, measurements(DatabaseStore(database).records(target), device)


def of_row(times: RowTimes, target: Target, device: Device) -> Measurements:
    """The measured plans of a suite's row."""
    row = times.row
    ((task,), _) = tasks_of(from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype)), device)
    known = {plan: us for plan in times.plans if (us := times.us(plan)) is not None}
    return Measurements.of(task.workload, target, device, known)


def judge(measured: Sequence[Measurements], device: Device) -> list[dict[str, Any]]:
    """One entry for each way of holding out, where there is something left to learn from, and model."""
    found = []
    for held, across in (("plans", False), ("tasks", True)):
        if not across or len(measured) > 1:
            lines = compare(measured, device, across=across)
            found += [{"held_out": held, "workloads": len(measured), **asdict(line)} for line in lines]
    return found


def _sample(group: Measurements, most: int) -> Measurements:
    count = len(group.plans)
    return group.some(sorted(random.Random(0).sample(range(count), min(most, count))))


if __name__ == "__main__":
    sys.exit(main())
