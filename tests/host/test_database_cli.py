"""``comfuse db`` and the options that take a database."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from database_examples import commit, function, module, some_plan
from permissions import open_folder, unprivileged, without_permission_to_write
from tvm import relax
from tvm.s_tir import meta_schedule as ms

import tvm_comfuse
from tvm_comfuse.bench import run_suite
from tvm_comfuse.errors import PlanError
from tvm_comfuse.tuning.database import Database, DatabaseError, best_plan
from tvm_comfuse.tuning.database.files import LOCK_NAME
from tvm_comfuse.tuning.database.store import EVIDENCE

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 128), torch.nn.LayerNorm(128)

    def forward(self, h, x):
        return self.norm(x + self.linear(h))


def build():
    torch.manual_seed(0)
    inputs = torch.randn(24, 64), torch.randn(24, 128)
    return Block().to(torch.bfloat16).eval(), tuple(each.to(torch.bfloat16) for each in inputs)
"""


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "records")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:build"


def doubt_all(database: Database) -> None:
    path = database.directory(tvm_comfuse.parse_target("h200")) / EVIDENCE
    path.write_text("")


def test_list(comfuse: Any, database: Database) -> None:
    commit(database, function(), 61.2, label="bert", rows=24)
    commit(database, function(None), 7.0, rows=4096)
    code, out, _ = comfuse("db", "list", database.path)
    assert code == 0
    for words in ("bert", "sm_90a-h200", "61.2", "24 x 128 x 64", "M x 128 x 64", "1.00e-03"):
        assert words in out
    assert out.rstrip().endswith("2 records, 2 of them answer with these versions")
    records = json.loads(comfuse("db", "list", database.path, "--json")[1])["records"]
    assert [record["plan"] for record in records] == [record.plan.to_dict() for record in database.records()]
    assert records[0]["us"] == pytest.approx(61.2)
    doubt_all(database)
    code, out, _ = comfuse("db", "list", database.path)
    assert (code, out.count("not believed: no evidence")) == (0, 2)
    assert "0 of them answer" in out


def test_merge_prune_export(comfuse: Any, database: Database, tmp_path: Path) -> None:
    func, other = function(), Database.open(tmp_path / "other")
    commit(database, func, 9.0, 3)
    commit(other, func, 8.0, 4)
    commit(other, function(32), 8.0, 4)
    assert comfuse("db", "merge", tmp_path / "all", database.path, other.path)[:2] == (0, "3 new records\n")
    # nothing is wrong with any of them
    assert comfuse("db", "prune", tmp_path / "all")[:2] == (0, "0 dropped, 3 left\n")
    assert comfuse("db", "prune", tmp_path / "all", "--keep", "1")[:2] == (0, "1 dropped, 2 left\n")
    code, out, _ = comfuse("db", "export", tmp_path / "all", "-o", tmp_path / "stock", "--target", "h200", "--json")
    assert (code, json.loads(out)["exported"]) == (0, 2)
    records = ms.database.JSONDatabase(work_dir=str(tmp_path / "stock")).get_all_tuning_records()
    assert [float(record.run_secs[0]) for record in records] == pytest.approx([8e-6, 8e-6])


def test_an_export_without_records_is_an_error(comfuse: Any, database: Database, tmp_path: Path) -> None:
    arguments = ("db", "export", database.path, "-o", tmp_path / "new", "--target", "h100")
    code, out, err = comfuse(*arguments)
    assert (code, out) == (2, "")
    assert "found none for any target" in err
    commit(database, function(), 9.0, 3)
    code, _, err = comfuse(*arguments)
    assert code == 2
    assert "needed records for sm_90a-h100.kernel" in err
    assert "found 1 for sm_90a-h200.kernel" in err
    assert not (tmp_path / "new").exists()


def test_where_an_export_cannot_go(comfuse: Any, database: Database, tmp_path: Path) -> None:
    commit(database, function(), 9.0, 3)
    folder = database.directory(tvm_comfuse.parse_target("h200"))
    before = {path: path.read_bytes() for path in database.path.rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    for output, words in (
        (tmp_path / "file", "a folder to write at"),
        (tmp_path / "file" / "new", "a folder to write at"),
        (database.path, "a folder outside of any tuning database"),
        (folder, "a folder outside of any tuning database"),
        (database.path / "new", "a folder outside of any tuning database"),
        (tmp_path / "link", "a folder outside of any tuning database"),
    ):
        code, out, err = comfuse("db", "export", database.path, "-o", output)
        assert (code, out) == (2, "")
        assert err.startswith(f"comfuse: needed {words}")
        assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in database.path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_files_without_permission(comfuse: Any) -> None:
    with open_folder() as folder:
        database = Database.open(folder / "records")
        commit(database, function(), 9.0, 3)
        records = database.directory(tvm_comfuse.parse_target("h200"))
        for arguments in (("list",), ("export", "-o", folder / "first")):  # imports what they need
            assert comfuse("db", *arguments, database.path)[0] == 0
        folder.chmod(0o555)
        with unprivileged():
            code, out, err = comfuse("db", "export", database.path, "-o", folder / "new")
            assert (code, out) == (2, "")
            assert err.startswith(f"comfuse: needed a folder to write at {folder / 'new'}; found ")
        for path in (records / EVIDENCE, records):
            path.chmod(0o000)
            with unprivileged():
                code, out, err = comfuse("db", "list", database.path)
            assert (code, out) == (2, "")
            assert err.startswith("comfuse: needed to ")
            assert "Permission denied" in err
            assert err.count("\n") == 1
            path.chmod(0o755)
        # the command line's own check says it of the folder that was named
        database.path.chmod(0o000)
        with unprivileged(), pytest.raises(DatabaseError, match="to look for a tuning database at"):
            Database.open(database.path, create=False)


def test_a_database_that_cannot_be_written(comfuse: Any) -> None:
    with open_folder() as folder:
        database, other = Database.open(folder / "records"), Database.open(folder / "other")
        commit(database, function(), 9.0, 3)
        # imports what they need
        for arguments in (("prune", database.path), ("merge", folder / "first", database.path)):
            assert comfuse("db", *arguments)[0] == 0
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        for arguments in (
            ("prune", database.path),
            ("merge", other.path, database.path),
            ("merge", folder / "new", database.path),
        ):
            with unprivileged():
                code, out, err = comfuse("db", *arguments)
            assert (code, out) == (2, "")
            assert "permission" in err.lower()
            assert err.count("\n") == 1


def test_prune_says_what_would_go(comfuse: Any, database: Database) -> None:
    for us, number in ((9.0, 3), (8.0, 4)):
        commit(database, function(), us, number)
    with (database.directory(tvm_comfuse.parse_target("h200")) / EVIDENCE).open("a") as file:
        file.write("{}\n")
    slow = database.records()[0].entry.key
    options = ("db", "prune", database.path, "--keep", "1")
    expected = f"{slow[:12]} sm_90a-h200 24 x 128 x 64: not among the 1 fastest: 9.0 us\n"
    assert comfuse(*options, "--dry-run")[1] == expected + "1 would be dropped, 1 left; 1 broken line\n"
    told = json.loads(comfuse(*options, "--dry-run", "--json")[1])
    assert told["records"] == [{"key": slow, "why": "not among the 1 fastest: 9.0 us"}]
    assert len(database.records()) == 2
    done = json.loads(comfuse(*options, "--json")[1])
    assert done == {**told, "dry_run": False}
    assert (len(database.records()), database.bad_lines()) == (done["left"], 0)
    assert comfuse(*options, "--stale", "--dry-run")[1] == "0 would be dropped, 1 left\n"


def test_verify(comfuse: Any, database: Database) -> None:
    commit(database, function())
    code, out, _ = comfuse("db", "verify", database.path)
    assert (code, out.splitlines()[-1]) == (0, "1 of 1 records hold")
    doubt_all(database)
    code, out, _ = comfuse("db", "verify", database.path, "--json")
    report = json.loads(out)
    assert (code, report["passed"], report["problems"][0]["question"]) == (1, False, "believed")


def test_wrong_folders_are_one_line(comfuse: Any, tmp_path: Path, model: str) -> None:
    for arguments in (
        ("db", "list", tmp_path / "none"),
        ("explain", model, "--tuning-records", tmp_path / "none"),
        ("bench", "--check-only", "--target", "llvm", "--tuning-records", tmp_path / "none"),
    ):
        code, out, err = comfuse(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("comfuse: needed an existing tuning database; found nothing at ")
        assert err.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_explain_says_where_plans_come_from(comfuse: Any, database: Database, model: str) -> None:
    before = json.loads(comfuse("explain", model, "--json")[1])["matmuls"][0]
    assert "plan_source" not in before
    _, out, _ = comfuse("explain", model, "--tuning-records", database.path)
    assert "plan is default: no tuning record answers" in out
    func = function()
    record = commit(database, func, 61.2)
    (matmul,) = json.loads(comfuse("explain", model, "--json", "--tuning-records", database.path)[1])["matmuls"]
    assert matmul["plan"] == some_plan(func).to_dict() != before["plan"]
    assert matmul["plan_source"] == str(record)
    _, out, _ = comfuse("explain", model, "--tuning-records", database.path)
    assert f"plan is {record}" in out
    (matmul,) = json.loads(
        comfuse("explain", model, "--json", "--tuning-records", database.path, "--target", "h100")[1]
    )["matmuls"]
    assert matmul["plan"] == before["plan"]
    # given plans come first
    compiled = tvm_comfuse.compile(
        module(), "llvm", plans={matmul_name(module()): before["plan"]}, tuning_records=database
    )
    assert compiled.explanation is not None
    assert compiled.explanation.matmuls[0].plan.to_dict() == before["plan"]
    assert compiled.explanation.matmuls[0].plan_source == ""


def test_a_database_that_cannot_answer_says_so(comfuse: Any, database: Database, model: str, tmp_path: Path) -> None:
    commit(database, function(), 61.2)
    compile_ = ("compile", model, "--target", "llvm", "-o", tmp_path / "m.so", "--tuning-records", database.path)
    assert comfuse(*compile_)[2] == ""
    (workloads,) = database.path.glob("*/database_workload.json")
    workloads.write_text("[]\n")
    for command in (compile_, ("explain", model, "--tuning-records", database.path)):
        code, _, err = comfuse(*command)
        assert code == 0
        assert err.splitlines()[-1].startswith(f"comfuse: warning: none of 1 record in {database.path} answers")
    assert "its workload" in comfuse("db", "list", database.path)[1]


SYMBOLIC = """
import torch
from tvm_comfuse.bench.ops import OPS


def build():
    shapes = (24, 64), (128, 64), (24, 128), (128,), (128,), (128,)
    return OPS["layer_norm"].relax_module(None, 128, 64, "bfloat16"), [torch.ones(s).bfloat16() for s in shapes]
"""


@pytest.fixture
def buckets(database: Database) -> dict[int, Any]:
    """Plans by the rows they were measured with."""
    measured = {256: (5.0, 3), 4096: (30.0, 9), 16384: (99.0, 13)}
    return {rows: commit(database, function(None), us, plan, rows=rows).plan for rows, (us, plan) in measured.items()}


def test_rows_choose_among_the_buckets_of_a_symbolic_m(
    comfuse: Any, database: Database, buckets: dict[int, Any], tmp_path: Path
) -> None:
    (tmp_path / "symbolic.py").write_text(SYMBOLIC)
    model, records = f"{tmp_path}/symbolic.py:build", ("--tuning-records", database.path, "--no-pretuned")
    for rows, bucket in ((1, 256), (1100, 4096), (None, 16384)):
        given = ("--rows", rows) if rows else ()
        (matmul,) = json.loads(comfuse("explain", model, "--json", *records, *given)[1])["matmuls"]
        assert matmul["plan"] == buckets[bucket].to_dict(), rows
        assert matmul["plan_source"].endswith(f" us for {bucket} rows")
    out, given = tmp_path / "m.so", ("--rows", 300, "--target", "llvm")
    (matmul,) = json.loads(comfuse("compile", model, "-o", out, "--json", *records, *given)[1])["matmuls"]
    assert matmul["plan"] == buckets[256].to_dict()
    assert comfuse("run", model, *records, *given)[0] == 0
    (kernel,) = json.loads(comfuse("verify", model, "--seeds", "1", "--json", *records, "--rows", 300)[1])["kernels"]
    assert kernel["plan"] == buckets[256].to_dict()
    assert comfuse("explain", model, "--rows", 0)[0] == 2


def test_rows_of_a_static_m(comfuse: Any, model: str) -> None:
    code, out, err = comfuse("explain", model, "--rows", 25)
    assert (code, out) == (2, "")
    assert "a symbolic M, to choose plans for 25 rows; found static M: 24 in lv" in err
    assert comfuse("explain", model, "--rows", 24)[0] == 0
    for rows in (0, -1, 2.5, True):
        with pytest.raises(PlanError, match="rows of at least 1"):
            tvm_comfuse.explain(module(), rows=rows)


def test_rows_are_of_the_matmuls_with_a_symbolic_m(database: Database, buckets: dict[int, Any]) -> None:
    """A static M beside a symbolic one keeps its own records, also near ones."""
    near = commit(database, function(48, "rms_norm"), 7.0, 4)
    commit(database, function(4096, "rms_norm"), 7.0, 5)
    target, rms = tvm_comfuse.parse_target("h200"), function(40, "rms_norm")
    assert best_plan(rms, target, database, 4096)[1].record.entry == near.entry
    mod = two_in_one(module(None), module(48, "rms_norm"))
    first, second = tvm_comfuse.explain(mod, tuning_records=database, rows=300, use_pretuned=False).matmuls
    assert (first.plan, second.plan) == (buckets[256], near.plan)


def two_in_one(first: Any, second: Any) -> Any:
    """A module that calls the main functions of both."""
    builder = relax.BlockBuilder()
    functions = [relax.utils.copy_with_new_vars(mod["main"]) for mod in (first, second)]
    params = [param for func in functions for param in func.params]
    with builder.function("main", params):
        with builder.dataflow():
            results = []
            for func in functions:
                for block in func.body.blocks:
                    for binding in block.bindings:
                        builder.emit_normalized(binding)
                results.append(func.body.body)
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.finalize()


def matmul_name(mod: Any) -> str:
    return tvm_comfuse.explain(mod).matmuls[0].name


def test_compile_run_and_verify_take_records(comfuse: Any, database: Database, model: str, tmp_path: Path) -> None:
    commit(database, function())
    options = ("--tuning-records", database.path)
    code, out, _ = comfuse("compile", model, "-o", tmp_path / "m.so", "--target", "h200", "--json", *options)
    assert code == 0
    assert json.loads(out)["matmuls"][0]["plan"] == some_plan(function()).to_dict()
    assert comfuse("run", model, "--target", "llvm", *options)[0] == 0
    code, out, _ = comfuse("verify", model, "--seeds", "1", "--json", *options)
    (kernel,) = json.loads(out)["kernels"]
    assert (code, kernel["passed"], kernel["plan"]) == (0, True, some_plan(function()).to_dict())


COMMANDS = """
import json
import sys

from tvm_comfuse.cli.main import main

for command in json.loads(sys.argv[1]):
    sys.argv = ["comfuse", *command]
    try:
        main()
    except SystemExit as error:
        print("exit", command[0], int(error.code or 0), file=sys.stderr)
"""


def test_a_folder_that_may_only_be_read(database: Database, model: str, tmp_path: Path) -> None:
    commit(database, function())
    inside = database.directory(tvm_comfuse.parse_target("h200"))
    (inside / LOCK_NAME).unlink()
    records, names = str(database.path), sorted(path.name for path in inside.iterdir())
    options = ["--target", "llvm", "--tuning-records", records]
    commands = [
        ["explain", model, *options],
        ["compile", model, "-o", str(tmp_path / "m.so"), *options],
        ["run", model, *options],
        ["db", "list", records],
        ["db", "prune", records],
        ["db", "merge", str(tmp_path / "copy"), records],
    ]
    folders = [database.path, inside, *inside.iterdir()]
    with without_permission_to_write(folders) as prefix:
        command = [*prefix, sys.executable, "-c", COMMANDS, json.dumps(commands)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "plan is tuned on sm_90a-h200" in run.stdout, run.stderr
    ends = [line for line in run.stderr.splitlines() if line.startswith("exit")]
    assert ends == ["exit explain 0", "exit compile 0", "exit run 0", "exit db 0", "exit db 2", "exit db 0"]
    assert "comfuse: needed a folder to write in at " in run.stderr
    assert sorted(path.name for path in inside.iterdir()) == names


def test_bench_takes_records(database: Database, tmp_path: Path) -> None:
    commit(database, function())
    suite = tmp_path / "suite.json"
    row = {"name": "small", "op": "layer_norm", "M": 24, "N": 128, "K": 64}
    suite.write_text(json.dumps({"families": {"mine": {"rows": [row]}}}))
    report = run_suite("mine", suite, target="llvm", seeds=1, timed=False, tuning_records=database.path)
    assert report.rows[0].plan == some_plan(function()).to_dict()
    assert report.rows[0].passed


def test_pretuned_records_are_used_and_can_be_left_out(
    comfuse: Any, database: Database, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(database, function())
    monkeypatch.setattr("tvm_comfuse.fusion.pretuned", lambda: Database.open(database.path, read_only=True))
    plans = [
        json.loads(comfuse("explain", model, "--json", *options)[1])["matmuls"][0]["plan"]
        for options in ((), ("--no-pretuned",))
    ]
    assert plans[0] == some_plan(function()).to_dict() != plans[1]


@pytest.fixture(scope="module")
def pretune() -> Any:
    spec = importlib.util.spec_from_file_location("pretune", ROOT / "benchmarks" / "pretune.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_pretune_makes_records_of_measured_rows(
    pretune: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, second, *_) = json.loads((ROOT / "benchmarks/results/h200/post_norm.json").read_text())["rows"]
    head = json.loads((ROOT / "benchmarks/results/h200/post_norm.json").read_text())
    measured = [
        {
            "row": f"{row['suite']}/{row['name']}",
            "us": row["ours_us"] * factor,
            **{key: row[key] for key in ("plan", "error", "eager_error")},
            **{key: head[key] for key in ("device", "versions", "date", "commit")},
        }
        for row, factor in ((first, 1.0), (second, 1.0), (first, 2.0))
    ]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(measured))
    assert pretune.main([str(file), "--database", str(tmp_path / "records")]) == 0
    database = Database.open(tmp_path / "records", create=False)
    assert [record.evidence.label for record in database.records() if record.evidence] == [
        m["row"] for m in measured[:2]
    ]
    plan, source = tvm_comfuse.tuning.database.best_plan(
        pretune.function_of(pretune.suites.select(pretune.suites.load(), None, [measured[0]["row"]])[0]),
        tvm_comfuse.parse_target("h200"),
        database,
    )
    assert plan == tvm_comfuse.Plan.from_dict(measured[0]["plan"])
    assert source.text == f"tuned on NVIDIA H200 at {head['date']}, {first['ours_us']:.1f} us"
    capsys.readouterr()
    for changes, words in (
        ({"error": 1.0}, "found right"),
        ({"plan": {**first["plan"], "ctas": 9999}}, "legal on h200"),
        ({"device": "NVIDIA A100"}, "a device out of h100, h200"),
        ({"row": "no_such_row"}, "no_such_row"),
    ):
        file.write_text(json.dumps([{**measured[0], **changes}]))
        assert pretune.main([str(file), "--database", str(tmp_path / "records")]) == 1
        assert words in capsys.readouterr().err
