"""Writers killed in the middle of their writes leave a database that stock TVM reads, and lose nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from database_examples import function, some_plan
from tvm.s_tir import meta_schedule as ms

import tvm_comfuse
from tvm_comfuse.tuning.database.store import RECORDS, WORKLOADS, Store, workload_line
from tvm_comfuse.tuning.database.workload import arguments, trace_of, workload_module

KILLS, WRITERS = 200, 4
ROWS = [8 * number for number in range(1, 13)]


def tasks() -> list:
    """A workload line and a payload for each number of rows."""
    target, made = tvm_comfuse.parse_target("h200"), []
    for rows in ROWS:
        func = function(rows, "rms")
        module = workload_module(func)
        trace = trace_of(module, some_plan(func))
        record = ms.database.TuningRecord(
            trace, ms.database.Workload(module), [1.0], target, arguments(module["main"], rows)
        )
        made.append([workload_line(list(record.workload.as_json())), record.as_json()])
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: a process that waits for a disk cannot be killed until the disk is done."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as parent:
        made = Path(parent) / "database"
        made.mkdir()
        yield made


def test_200_kills_of_four_writers(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(tasks()))
    script = Path(__file__).with_name("database_writers.py")
    command = [sys.executable, str(script), str(folder), str(file), str(KILLS), str(WRITERS), "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    task_of = dict(told["begun"])

    # the kills did hit lines, and every one was told of or is beside
    torn = sum(len(file.read_bytes().splitlines()) for file in folder.glob("*.torn"))
    assert torn >= KILLS // 40
    assert len(told["done"]) > KILLS // 2
    entries = Store(folder).entries()
    names = [round(entry.payload[1][0] * 1e9) - 1 for entry in entries]
    assert max(Counter(names).values()) == 1
    # what a writer was told is there, is there; so a killed writer lost at most the record it was writing
    assert set(told["done"]) - set(names) == set()
    assert len(task_of) - len(names) <= KILLS + WRITERS - 1
    for name, entry in zip(names, entries, strict=True):
        assert entry.evidence is not None
        assert entry.evidence["task"] == task_of[name]

    # stock TVM reads it, and each record stands under the workload it was measured on
    stock = ms.database.JSONDatabase(work_dir=str(folder))
    records = stock.get_all_tuning_records()
    assert sorted(round(float(record.run_secs[0]) * 1e9) - 1 for record in records) == sorted(names)
    for record in records:
        name = round(float(record.run_secs[0]) * 1e9) - 1
        rows = int(record.workload.mod["main"].params[0].shape[0])
        assert rows == int(record.args_info[0].shape[0]) == ROWS[task_of[name]]
    # no workload twice
    lines = (folder / WORKLOADS).read_text().splitlines()
    assert len(lines) == len(set(lines)) == len(ROWS)
    assert (folder / f"{RECORDS}.torn").exists()
