"""Damaged files of a records folder: what is left of them is used, and a warning says what is not."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from tuning_examples import TARGET, InstantBuilder, MadeUpRunner, made_up, search, space_of, task

from tvm_comfuse.errors import OutputError
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.tuning.database import Database, TornLineWarning
from tvm_comfuse.tuning.log import NAME, Log
from tvm_comfuse.tuning.model import CostModelWarning, PlanModel

SMALL = ("layer_norm", 1024, 256, 256)


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    for use in (lambda log: log.write("start"), lambda log: list(log.events()), Log.create):
        with pytest.raises(OutputError, match="a log to read and write"):
            use(Log(tmp_path))


def test_damaged_lines_of_a_log_are_left_out_with_one_warning(tmp_path: Path) -> None:
    Database.open(tmp_path)
    what, log = task(*SMALL), Log(tmp_path)
    failed = {"task": what.key, "target": str(TARGET), "reason": "wrong"}
    first, second = list(space_of(what).legal)[:2]
    log.write("failed", **failed, plan=first.to_dict())
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'[1,2]\n"text"\n\xff\xfe\x80 \x00\n{"event": "fai\n' + b"[" * 100_000 + b"\n")
    for plan in (None, [], {"tile_m": 1}):
        log.write("failed", **failed, plan=plan)
    log.write("failed", **failed)
    log.write("failed", **failed, plan=second.to_dict())
    log = Log(tmp_path)
    with pytest.warns(TornLineWarning, match=rf"^5 lines of .*{NAME} cannot be read"):
        plans = log.failed_plans(what.key, str(TARGET))
    assert plans == [first, second]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(log.events())) == 6
    # a search goes on over such a folder
    us = made_up(what.spec, 1)
    found = search(InstantBuilder(), runner := MadeUpRunner(lambda plan, _: us(plan)), folder=tmp_path, trials=8)
    with pytest.warns(TornLineWarning):
        found.run([what])
    assert found.trials == 8
    assert not {first, second} & set(runner.measured)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"version": 1, "groups": []}',
        b'{"version": 1, "groups": {"a": []}}',
        b'{"version": 1, "groups": {"a": {"features": [[[1.0]], [[2.0]]], "seconds": [1.0]}}}',
        b'{"version": 1, "groups": {"a": {"features": [[1.0], [2.0]], "seconds": [1.0, 1.0]}}}',
        b'{"version": 1, "groups": {"a": {"features": [[[1.0]], [[2.0]]], "seconds": [0.0, 1.0]}}}',
        b'{"version": 1, "groups": {"a": {"features": [[[NaN]], [[2.0]]], "seconds": [1.0, 1.0]}}}',
        b'{"version": 1, "groups": {"a": {"features": [[[1.0]], [[2.0, 3.0]]], "seconds": [1.0, 1.0]}}}',
    ],
)
def test_a_damaged_cost_model_is_learnt_again(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "cost_model.json"
    path.write_bytes(data)
    model = PlanModel(H200)
    with pytest.warns(CostModelWarning, match="the cost model is left out and learns again"):
        model.resume(path)
    assert (len(model.data), model.data_size, model.booster) == (0, 0, None)


def test_a_cost_model_that_cannot_be_kept_loses_no_result(tmp_path: Path) -> None:
    (tmp_path / "cost_model.json").mkdir()
    with pytest.warns(CostModelWarning, match="the cost model is not kept"):
        PlanModel(H200).keep(tmp_path / "cost_model.json")
    assert os.listdir(tmp_path) == ["cost_model.json"]
