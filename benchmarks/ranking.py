"""How well the cost model ranks measured candidates:  python benchmarks/ranking.py RECORDS_FOLDER [--target h200]

Of each workload half of the records are held out (``plans``), then each workload in turn (``tasks``).
"""

from __future__ import annotations

import argparse

import tvm_comfuse
from tvm_comfuse.schedules.device import H200, device_of
from tvm_comfuse.tuning.database import Database
from tvm_comfuse.tuning.quality import TOP, compare, measurements
from tvm_comfuse.tuning.record import DatabaseStore


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--target", default="h200")
    options = parser.parse_args()
    target = tvm_comfuse.parse_target(options.target)
    device = device_of(target) or H200
    store = DatabaseStore(Database.open(options.folder, create=False, read_only=True))
    measured = measurements(store.records(target), device)
    print(f"{'held out':9} {'model':9} {'pairs':>6} {f'best of {TOP}':>10} {'candidates':>10}")
    for held, across in (("plans", False), ("tasks", True)):
        if across and len(measured) < 2:
            continue
        for line in compare(measured, device, across=across):
            print(f"{held:9} {line.model:9} {line.pairs:6.3f} {line.best_of:10.3f} {line.candidates:10}")


if __name__ == "__main__":
    main()
