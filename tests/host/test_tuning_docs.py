"""docs/tuning.md is run: from a model to a tuned library on LLVM, then the command line over the same folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tvm
import typer
from typer.testing import CliRunner

from tvm_comfuse.cli.main import app
from tvm_comfuse.cli.tune import address
from tvm_comfuse.errors import OutputError, TargetError
from tvm_comfuse.schedules.cost import NOMINAL_ROWS
from tvm_comfuse.tuning.api import tune
from tvm_comfuse.tuning.database import Database, DatabaseError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
MODEL = """
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128)).to(torch.bfloat16).eval()
    return model, (torch.randn(96, 64, dtype=torch.bfloat16),)
"""


def test_the_walk_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    (task,) = scope["result"].tasks
    assert scope["result"].stopped == "trials"
    assert task.trials == 3
    assert task.failures == {}
    assert task.us <= task.default_us
    assert task.speedup >= 1.0
    with scope["torch"].no_grad():
        expected = scope["model"](scope["x"])
    scope["torch"].testing.assert_close(scope["y"], expected, rtol=2e-2, atol=2e-2)
    assert len(Database.open("records").records()) == 3
    # the command line goes on in the same folder
    (tmp_path / "model.py").write_text(MODEL)
    options = "--target llvm --trials 2 --time-budget 5m --parallel 1 --tuning-records records"
    shown = CliRunner().invoke(app, ["tune", "model.py:build", *options.split()])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.strip().splitlines()
    assert lines[-1] == "to use them: comfuse compile model.py:build -o model.so --target llvm --tuning-records records"
    assert "2 of 2 trials, ended: trials" in shown.output
    assert "96 x 128 x 64" in shown.output
    assert len(Database.open("records").records()) == 5
    words = lines[-1].removeprefix("to use them: comfuse ").split()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "model.so").is_file()


def test_json_is_the_whole_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["tune", "model.py:build", "--target", "llvm", "--time-budget", "0s", "--json"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["stopped"] == "time"
    assert [task["plan"] for task in report["tasks"]] == [None]
    assert report["records"] is None


def test_options_of_the_page_exist() -> None:
    command = typer.main.get_command(app).commands["tune"]  # type: ignore[attr-defined]
    known = {parameter.opts[0] for parameter in command.params}
    named = set(re.findall(r"^\| `(--[a-z-]+)", PAGE.read_text(), re.MULTILINE))
    assert named == known - {"model", "--target", "--help"}


def test_the_rows_of_a_symbolic_m_are_those_of_the_code() -> None:
    words = f"symbolic; {NOMINAL_ROWS} if left out"
    (option,) = (each for each in typer.main.get_command(app).commands["tune"].params if each.name == "rows")  # type: ignore[attr-defined]
    assert words in PAGE.read_text()
    assert words in option.help


def test_addresses() -> None:
    assert address("some.host:9190") == ("some.host", 9190)
    for text in ("host", "host:", ":9190", "host:port"):
        with pytest.raises(typer.BadParameter, match="HOST:PORT"):
            address(text)


def test_folders_and_targets_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(DatabaseError, match="tuning database or an empty folder"):
        tune("model.py:build", "llvm", records=tmp_path / "other")
    with pytest.raises((OutputError, DatabaseError)):
        tune("model.py:build", "llvm", records=tmp_path / "other" / "file")
    if not tvm.cuda(0).exist:
        with pytest.raises(TargetError, match="a GPU to measure on"):
            tune("model.py:build", "h200")
    with pytest.raises(TargetError, match="a Hopper GPU or llvm"):
        tune("model.py:build", "cuda -arch=sm_80")
