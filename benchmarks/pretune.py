"""Turn measured plans into the records that come with the package.

    python benchmarks/pretune.py FILE.json [--database FOLDER] [--suite-file FILE]

FILE.json is a list, one object a measured plan:

    {"row": "post_norm/bert_base_attn",   a row of a suite, with or without the suite's name
     "plan": {...},                       as `comfuse explain --json` prints plans
     "us": 44.9,                          microseconds of a call
     "error": 0.00166,                    relative error against float64, the worst seed's
     "eager_error": 0.00226,              of eager PyTorch on that seed
     "seeds": 3,                          seeds that were compared; 1 if left out
     "device": "NVIDIA H200",
     "versions": {"tvm_comfuse": "0.1.0", "apache-tvm": "0.27.0.post1", ...},
     "date": "2026-11-29T19:16:17+00:00", when; now if left out
     "commit": "4afbebb",
     "split_us": 52.5}                    microseconds of the split form, if it was measured beside

Without a number for the kernel emitter ("kernel") in the versions, the plans count as measured with that of this
checkout.  A plan that is not legal, or whose error is more than twice eager's, ends the script; what came before it is
kept.  At the end the fastest record of each row stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from tvm.target import Target
from tvm.tirx import PrimFunc

from tvm_comfuse.bench import suites
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.relay_patterns import FuseClusters
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import HOPPER_MODELS, parse_target
from tvm_comfuse.tuning.database import Accuracy, Database, DatabaseError
from tvm_comfuse.tuning.database.best import PRETUNED
from tvm_comfuse.tuning.database.binding import KERNEL, current_versions
from tvm_comfuse.verify.numeric import DEFAULT_FACTOR

REQUIRED = ("row", "plan", "us", "error", "eager_error", "device", "versions")


def main(arguments: list[str] | None = None) -> int:
    """Run the script; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--database", type=Path, default=PRETUNED, help="default: the package's own")
    parser.add_argument("--suite-file", type=Path, help="default: the package's suites")
    options = parser.parse_args(arguments)
    try:
        rows = suites.load(options.suite_file)
        database = Database.open(options.database)
        for number, measured in enumerate(json.loads(options.file.read_text())):
            print(add(database, rows, measured, f"{options.file}: entry {number}"))
        print(f"{database.prune(1)} slower records dropped, {len(database.records())} left")
    except (ComfuseError, OSError, ValueError) as error:
        print(f"pretune: {error}", file=sys.stderr)
        return 1
    return 0


def add(database: Database, rows: dict[str, list[suites.Row]], measured: Any, place: str) -> str:
    """Commit one measured plan; what was done, in words.  Raises ComfuseError."""
    missing = [name for name in REQUIRED if not isinstance(measured, dict) or name not in measured]
    if missing:
        raise DatabaseError(f"{', '.join(REQUIRED)} in {place}", f"no {', '.join(missing)}", "add them")
    (row,) = suites.select(rows, None, [measured["row"]])
    record = database.commit(
        function_of(row),
        Plan.from_dict(measured["plan"]),
        [measured["us"] * 1e-6],
        target_of(measured["device"]),
        accuracy=Accuracy(measured["error"], DEFAULT_FACTOR * measured["eager_error"], measured.get("seeds", 1)),
        versions={KERNEL: current_versions()[KERNEL], **measured["versions"]},
        time=datetime.fromisoformat(measured["date"]) if "date" in measured else None,
        device_name=measured["device"],
        commit=measured.get("commit", ""),
        label=row.label,
        split_us=measured.get("split_us"),
    )
    return f"{row.label}: {record}"


def function_of(row: suites.Row) -> PrimFunc:
    """The canonical function of a row's cluster.  Raises DatabaseError if the row is not one cluster."""
    found: list[PrimFunc] = []
    module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
    FuseClusters(lambda func: found.append(func) or func)(module)
    if len(found) != 1:
        raise DatabaseError("a row with one cluster", f"{len(found)} in {row.label}", "leave the row out")
    return found[0]


def target_of(device: str) -> Target:
    """The target of a GPU called so by its driver.  Raises DatabaseError for others than H100 and H200."""
    for model in HOPPER_MODELS:
        if model in device.lower():
            return parse_target(model)
    raise DatabaseError(f"a device out of {', '.join(HOPPER_MODELS)}", repr(device), "correct the name")


if __name__ == "__main__":
    sys.exit(main())
