"""Stock TVM, without an import of ours, applies a database to a Relax module and gets the fused kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm
from database_examples import RIGHT, commit, function, module, some_plan
from tvm import relax
from tvm.s_tir import meta_schedule as ms

import tvm_comfuse
from tvm_comfuse.schedules.apply import has_plan, has_schedule, plan_of
from tvm_comfuse.tuning.database import Database

#: what a user of TVM writes who only has this package installed
STOCK = """
import sys

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

kind, model, folder = sys.argv[1:]
M, N, K = 24, 128, 64
HOPPER = {"kind": "cuda", "arch": "sm_90a", "host": "llvm", "max_num_threads": 1024, "max_threads_per_block": 1024,
          "max_shared_memory_per_block": 49152, "thread_warp_size": 32, "registers_per_block": 65536}
target = tvm.target.Target(HOPPER if kind == "cuda" else "llvm")
mod = tvm.ir.load_json(open(model).read())
with target:
    mod = relax.get_pipeline("comfuse_clusters")(mod)
    assert "comfuse.plan" not in mod.script()
    mod = relax.transform.MetaScheduleApplyDatabase(folder)(mod)
    assert mod.script().count("comfuse.plan") == 1
    executable = tvm.compile(
        mod, target, relax_pipeline="comfuse", tir_pipeline="comfuse" if kind == "cuda" else "default"
    )
if kind == "llvm":
    random = np.random.default_rng(0)
    shapes = ((M, K), (N, K), (M, N), (N,), (N,), (N,))
    h, w, x, b, g, e = inputs = [random.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]
    vm = relax.VirtualMachine(executable, tvm.cpu())
    out = vm["main"](*map(tvm.runtime.tensor, inputs)).numpy().astype("float64")
    h, w, x, b, g, e = (each.astype("float64") for each in inputs)
    value = x + h @ w.T + b
    value = (value - value.mean(1, keepdims=True)) / np.sqrt(value.var(1, keepdims=True) + 1e-5) * g + e
    error = np.linalg.norm(out - value) / np.linalg.norm(value)
    assert error < 4e-3, error
else:
    parts = [executable.mod]
    for part in parts:
        parts.extend(part.imports)
    (source,) = (part.inspect_source() for part in parts if part.kind == "cuda")
    assert "comfuse_gemm_reduce_kernel" in source and "wgmma" in source and source.count("__global__") == 2, source
print("done")
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Database:
    database = Database.open(tmp_path_factory.mktemp("stock") / "records")
    commit(database, function())
    return database


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_stock_script(filled: Database, tmp_path: Path, kind: str) -> None:
    model, script = tmp_path / "model.json", tmp_path / "script.py"
    model.write_text(tvm.ir.save_json(module()))
    assert "tvm_comfuse" not in STOCK
    # the installed package is found by its entry point, which a checkout on the path alone has not
    script.write_text(STOCK if _has_entry_point() else "import tvm, tvm_comfuse; tvm_comfuse._autoload()\n" + STOCK)
    folder = filled.directory(tvm_comfuse.parse_target("h200"))
    run = subprocess.run(
        [sys.executable, str(script), kind, str(model), str(folder)], capture_output=True, text=True, check=False
    )
    assert run.stdout.endswith("done\n"), run.stderr[-3000:]


def _has_entry_point() -> bool:
    from importlib.metadata import entry_points

    return any(point.value.startswith("tvm_comfuse") for point in entry_points(group="tvm.backends"))


def clusters(mod: tvm.IRModule) -> Any:
    with tvm_comfuse.parse_target("h200"):
        return relax.get_pipeline("comfuse_clusters")(mod)


def kernels(mod: tvm.IRModule) -> list[Any]:
    return [func for _, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)]


@pytest.mark.parametrize("rows", [24, None], ids=["static", "symbolic"])
def test_stock_pass_replays_the_plan(tmp_path: Path, rows: int | None) -> None:
    database, func = Database.open(tmp_path / "records"), function(rows)
    commit(database, func, rows=24)
    target = tvm_comfuse.parse_target("h200")
    mod = clusters(module(rows))
    (unscheduled,) = kernels(mod)
    assert not has_schedule(unscheduled)
    results = []
    with target:
        results.append(relax.transform.MetaScheduleApplyDatabase(str(database.directory(target)))(mod))
    database.export(target, tmp_path / "exported")
    with target:
        results.append(relax.transform.MetaScheduleApplyDatabase(str(tmp_path / "exported"))(mod))
    with target, database.to_stock(target):
        results.append(relax.transform.MetaScheduleApplyDatabase()(mod))
    for result in results:
        (scheduled,) = kernels(result)
        assert plan_of(scheduled) == some_plan(func)
        assert has_schedule(scheduled)


def test_stock_pass_leaves_other_clusters_and_the_pipeline_schedules_them(filled: Database) -> None:
    target = tvm_comfuse.parse_target("h200")
    mod = clusters(module(op="rms_norm"))
    with target:
        mod = relax.transform.MetaScheduleApplyDatabase(str(filled.directory(target)))(mod)
        (func,) = kernels(mod)
        assert not has_plan(func)
        executable = tvm.compile(mod, target, relax_pipeline="comfuse", tir_pipeline="comfuse")
    assert executable is not None


def test_clusters_without_a_plan_are_not_taken() -> None:
    with tvm_comfuse.parse_target("cuda -arch=sm_80"):
        mod = relax.get_pipeline("comfuse_clusters")(module())
    assert kernels(mod) == []
    assert "R.matmul" in mod.script()


def test_stock_tasks_are_the_workloads(tmp_path: Path) -> None:
    """A record of the task that stock MetaSchedule extracts answers for the cluster."""
    target = tvm_comfuse.parse_target("h200")
    tasks = ms.relax_integration.extract_tasks(clusters(module()), target, {})
    (task,) = (each for each in tasks if "comfuse" in each.task_name)
    (tuned,) = task.dispatched
    database, func = Database.open(tmp_path / "records"), function()
    database.commit(tuned["main"], some_plan(func), [1e-5], target, accuracy=RIGHT)
    assert database.query(func, target) is not None


def test_stock_tvm_makes_a_folder_that_is_not_there(filled: Database, tmp_path: Path) -> None:
    """What docs/database.md warns of: a mistyped folder schedules nothing, without an error."""
    target = tvm_comfuse.parse_target("h200")
    with target:
        mod = relax.get_pipeline("comfuse_clusters")(module())
        scheduled = [
            relax.transform.MetaScheduleApplyDatabase(str(folder))(mod).script().count("comfuse.plan")
            for folder in (filled.directory(target), tmp_path / "mistyped")
        ]
    assert scheduled == [1, 0]
    assert (tmp_path / "mistyped").is_dir()
