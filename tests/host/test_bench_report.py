"""The report's JSON form, and the README's table that is made from it."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tvm_comfuse.bench import report as report_module
from tvm_comfuse.bench.report import BenchReport, ReportError, RowResult, commit, environment, new_report
from tvm_comfuse.bench.suites import Row

ROOT = Path(__file__).resolve().parents[2]
WON = RowResult(
    "post_norm",
    "won",
    "layer_norm",
    16384,
    768,
    768,
    "bfloat16",
    fused=True,
    ours_us=40.0,
    mm_us=32.5,
    eager_us=88.0,
    inductor_us=52.0,
    inductor_setting="default",
    error=1.7e-3,
    eager_error=2.3e-3,
    plan={"tile_m": 128},
    via="kernel",
    passed=True,
)
LOST = replace(WON, name="lost", ours_us=104.0)
REFUSED = RowResult(
    "ragged", "no", "rms", 7, 12, 9, "float16", refusal={"code": "k-alignment", "text": "K"}, eager_us=9.0
)
WRONG = replace(WON, suite="ragged", name="bad", ours_us=None, passed=False, error=math.nan)


def a_report(*rows: RowResult, date: str = "2026-01-02T03:04:05+00:00") -> BenchReport:
    return BenchReport("NVIDIA H200", date, "c0ffee" * 6, {"torch": "2.11", "driver": "580"}, "as agreed", list(rows))


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("comfuse_table", ROOT / "benchmarks" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_json_has_the_agreed_form(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    a_report(WON, WRONG).write(path)
    values = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"device", "date", "commit", "versions", "protocol", "rows"} <= set(values)
    assert set(values["rows"][0]) >= {
        *("suite", "name", "op", "M", "N", "K", "dtype", "fused", "ours_us", "mm_us", "eager_us", "inductor_us"),
        *("inductor_setting", "error", "eager_error", "plan"),
    }
    assert values["rows"][0]["plan"] == {"tile_m": 128}
    assert values["rows"][1]["error"] is None
    assert BenchReport.read(path).rows == [WON, replace(WRONG, error=None)]


def test_writing_replaces_the_whole_file_and_leaves_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    a_report(WON).write(path)
    a_report(WON, LOST).write(path)
    assert len(BenchReport.read(path).rows) == 2

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(report_module.json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        a_report().write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert len(BenchReport.read(path).rows) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "report at"), ("[]", "no device"), ('{"device": "x"}', "no date"), ("", "report at")],
)
def test_bad_reports_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=words):
        BenchReport.read(path)
    path.write_text(json.dumps({**a_report().to_json(), "rows": [{"suite": "x"}]}))
    with pytest.raises(ReportError, match="rows as in"):
        BenchReport.read(path)


def test_speedup_is_over_the_faster_other_contender() -> None:
    assert WON.speedup == pytest.approx(1.3)
    assert replace(WON, eager_us=20.0).speedup == pytest.approx(0.5)
    assert LOST.speedup == pytest.approx(0.5)
    assert REFUSED.speedup is None
    assert RowResult.of(Row("a", "b", "rms", 1, 2, 3)).speedup is None


def test_environment_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = environment()
    assert versions["apache-tvm"].startswith("0.27.0")
    assert versions["torch"] != "none"
    assert all(isinstance(value, str) and value for value in versions.values())
    monkeypatch.setenv("COMFUSE_COMMIT", "abc")
    assert new_report("p").commit == "abc"
    monkeypatch.delenv("COMFUSE_COMMIT")
    found = commit().removesuffix("-dirty")
    assert found == "unknown" or (len(found) == 40 and int(found, 16) >= 0)


def test_table_shows_wins_losses_refusals_and_failures(table: ModuleType) -> None:
    text = table.render([a_report(WON, LOST, REFUSED, WRONG)])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 40.0 | - | 52.0 (default) | 88.0 | 32.5 | 1.30 | 1.7e-03 (2.3e-03) |" in lines["won"]
    assert "| 104.0 |" in lines["lost"]
    assert "| 0.50 |" in lines["lost"]
    assert "refused: k-alignment" in lines["no (float16)"]
    assert "| wrong |" in lines["bad"]
    # sqrt(1.3 * 0.5)
    assert "Geometric mean of the speed-up 0.81 over 2 of 2 rows, 1 lost." in text
    assert "No row has been measured" in text
    assert "NVIDIA H200" in text
    assert "torch 2.11" in text


def test_table_takes_the_latest_run_of_a_row(table: ModuleType) -> None:
    old = a_report(replace(WON, ours_us=99.0), LOST, date="2026-01-01T00:00:00+00:00")
    rows = table.latest_rows([old, a_report(WON)])
    assert [(row.name, row.ours_us) for _, row in rows] == [("won", 40.0), ("lost", 104.0)]


def test_table_script_rewrites_between_the_markers(table: ModuleType, tmp_path: Path) -> None:
    results, readme = tmp_path / "h200", tmp_path / "README.md"
    a_report(LOST).write(results / "b.json")
    a_report(WON, date="2026-02-02T00:00:00+00:00").write(results / "a.json")
    readme.write_text("before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n")
    arguments = ["--results", str(results), "--readme", str(readme)]
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench:begin -->\n")
    assert text.endswith("<!-- bench:end -->\nafter\n")
    assert "old" not in text
    assert "| won |" in text
    assert "| lost |" in text
    assert table.main([*arguments, "--check"]) == 0
    assert table.main(arguments) == 0
    assert readme.read_text() == text


def test_table_leaves_out_records_of_other_kinds(table: ModuleType, tmp_path: Path) -> None:
    a_report(WON).write(tmp_path / "a.json")
    (tmp_path / "other.json").write_text(json.dumps({"device": "x", "date": "y", "rows": [{"M": 1}], "protocol": "z"}))
    (tmp_path / "list.json").write_text("[1]")
    assert [report.rows[0].name for report in table.read_reports(tmp_path)] == ["won"]
    # those of this repository are read, whatever lies beside them
    for report in table.read_reports(table.ROOT / "benchmarks/results/h200"):
        assert report.commit
    broken = a_report(WON).to_json()
    del broken["date"]
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(ReportError, match="date"):
        table.read_reports(tmp_path)


def test_table_script_without_reports_or_markers(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["--results", str(tmp_path)]) == 1
    assert "no reports" in capsys.readouterr().err
    with pytest.raises(ValueError, match="bench:begin"):
        table.insert("no markers", "table")
