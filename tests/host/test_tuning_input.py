"""What a user may get wrong about tuning: arguments, folders, damaged files, models with nothing to tune."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from permissions import open_folder, unprivileged
from tuning_examples import InstantBuilder, MadeUpRunner, made_up, search, task
from tvm.s_tir.meta_schedule.utils import shash2hex

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.errors import ModelError, OutputError
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.tuning import api
from tvm_comfuse.tuning.arguments import TuneError, seconds
from tvm_comfuse.tuning.database import Database, DatabaseError
from tvm_comfuse.tuning.log import NAME, Log
from tvm_comfuse.tuning.model import CostModelWarning, PlanModel

SMALL = ("layer_norm", 1024, 256, 256)
MODELS = """
import torch


def layer():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128)).to(torch.bfloat16).eval()
    return model, (torch.randn(96, 64, dtype=torch.bfloat16),)


def odd():
    return torch.nn.Linear(100, 64).to(torch.bfloat16), (torch.randn(8, 100).to(torch.bfloat16),)


def relu():
    return torch.nn.ReLU(), (torch.randn(8),)
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trials", "early_stopping", "parallel", "rows"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", True])
def test_counts_are_whole_and_positive(name: str, value: Any) -> None:
    with pytest.raises(TuneError, match=f"a whole number of {name}, 1 or more; found {value!r}; try: {name}=1"):
        tvm_comfuse.tune("model.py:build", "llvm", **{name: value})


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), "ten", "5d", "-3s", "", True, (1,)])
def test_a_time_budget_is_a_duration(value: Any) -> None:
    with pytest.raises(TuneError, match=r"90, 90s, 10m or 1\.5h"):
        tvm_comfuse.tune("model.py:build", "llvm", time_budget=value)


def test_durations_may_be_text_or_numbers() -> None:
    given = [0, 90, np.float32(1.5), "90", "90s", "10m", " 1.5h "]
    assert [seconds(value) for value in given] == [0.0, 90.0, 1.5, 90.0, 90.0, 600.0, 5400.0]


@pytest.mark.parametrize("value", [3, b"records", ["records"], Database])
def test_records_are_a_path(value: Any) -> None:
    with pytest.raises(TuneError, match="the path of a folder for tuning records"):
        tvm_comfuse.tune("model.py:build", "llvm", records=value)


@pytest.mark.parametrize("value", [-1, "one", None])
def test_a_seed_is_a_number(value: Any) -> None:
    with pytest.raises(TuneError, match="a whole number of seed, 0 or more"):
        tvm_comfuse.tune("model.py:build", "llvm", seed=value)


@pytest.mark.parametrize("tracker", ["host:9190", ("host", "9190"), ("host",), 9190])
def test_a_tracker_is_host_and_port(tracker: Any) -> None:
    with pytest.raises(TuneError, match="host and port of a tracker"):
        tvm_comfuse.tune("model.py:build", "llvm", tracker=tracker, key="h200")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--key", "h200"), "key"),
        (("--workers", "1"), "workers"),
        (("--key", "a", "--workers", "2"), "key and workers"),
    ],
)
def test_options_of_a_tracker_need_one(comfuse: Any, options: tuple[str, ...], found: str) -> None:
    code, out, err = comfuse("tune", "model.py:build", "--target", "llvm", *options)
    assert (code, out) == (2, "")
    assert f"found {found} without one; try: --tracker HOST:PORT" in err
    assert err.count("\n") == 1


def test_rows_need_a_symbolic_m(comfuse: Any, models: str, tmp_path: Path) -> None:
    options = ("--target", "llvm", "--rows", "32", "--tuning-records", tmp_path / "records")
    code, out, err = comfuse("tune", f"{models}:layer", *options)
    assert (code, out) == (2, "")
    assert err.startswith("comfuse: needed a model with a symbolic M to measure with other rows; found M = 96;")
    assert not (tmp_path / "records").exists()


# --- models with nothing to tune --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("odd", "100"), ("relu", "it has no matmul")])
def test_nothing_to_tune_is_said(comfuse: Any, models: str, tmp_path: Path, name: str, words: str) -> None:
    model, records = f"{models}:{name}", tmp_path / "records"
    options = ("tune", model, "--target", "llvm", "--tuning-records", records)
    code, out, _ = comfuse(*options)
    assert code == 0
    assert out.startswith("nothing to tune: nothing of the model is fused (")
    assert words in out
    assert out.rstrip().endswith(f"see `comfuse explain {model}`")
    report = json.loads(comfuse(*options, "--json")[1])
    assert (report["stopped"], report["tasks"], report["records"]) == ("nothing", [], None)
    assert words in report["note"]
    assert not records.exists()


def test_no_legal_plan_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusal = tvm_comfuse.Refusal("none", "no plan at all")
    monkeypatch.setattr(api, "tasks_of", lambda *_: ([], [refusal]))
    found = tvm_comfuse.tune(OPS["layer_norm"].relax_module(64, 128, 64), "llvm", records=tmp_path / "records")
    assert found.note == "nothing to tune: no cluster of the model has a legal plan"
    assert found.refusals == (refusal,)
    assert not (tmp_path / "records").exists()


# --- folders ----------------------------------------------------------------------------------------------------------


def tune_into(folder: Path) -> None:
    """The model is not reached."""
    tvm_comfuse.tune("model.py:build", "llvm", records=folder)


def test_folders_without_permission_to_write(tmp_path: Path) -> None:
    with pytest.raises(ModelError):  # has everything imported
        tune_into(tmp_path)
    with open_folder() as folder:
        kept = folder / "records"
        Database.open(kept)
        Log(kept).create()
        (kept / NAME).chmod(0o444)
        for path in (kept, folder):
            path.chmod(0o555)
        with unprivileged():
            for records in (kept, folder / "new", folder / "new" / "deep"):
                with pytest.raises(OutputError, match="no permission to write; try: choose another place"):
                    tune_into(records)
        kept.chmod(0o777)
        with unprivileged(), pytest.raises(OutputError, match=rf"{NAME}: no permission to write"):
            tune_into(kept)
    with open_folder() as folder:
        folder.chmod(0o000)
        with unprivileged(), pytest.raises((OutputError, DatabaseError)):
            tune_into(folder)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for records in (tmp_path / "file", tmp_path / "file" / "records"):
        with pytest.raises(OutputError, match=r"a folder for tuning records; found .*file, which is none"):
            tune_into(records)


# --- damaged files ---------------------------------------------------------------------------------------------------


def test_a_search_teaches_the_records_where_the_cost_model_is_damaged(tmp_path: Path) -> None:
    what = task(*SMALL)
    us = made_up(what.spec, 1)

    def run(trials: int) -> Any:
        found = search(InstantBuilder(), MadeUpRunner(lambda plan, _: us(plan)), folder=tmp_path, trials=trials)
        api._run(found, [what], tmp_path)
        return found

    run(8)
    (tmp_path / api.MODEL_NAME).write_text("{")
    with pytest.warns(CostModelWarning):
        again = run(8)
    (group,) = again.model.data.values()
    assert len(group.costs) == 8 + 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PlanModel(H200)
        model.resume(tmp_path / api.MODEL_NAME)
    assert list(model.data) == [shash2hex(what.workload)]
