"""Commit, query, merge, prune, export and verify on functions of TVM."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from database_examples import RIGHT, commit, function, module, some_plan
from tvm.s_tir import meta_schedule as ms

import tvm_comfuse
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of, schedule
from tvm_comfuse.schedules.choose import default_plan
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.tuning.database import Accuracy, Database, DatabaseError, TornLineWarning, best_plan, pretuned, verify
from tvm_comfuse.tuning.database.binding import Binding, current_versions
from tvm_comfuse.tuning.database.store import EVIDENCE, FILES, RECORDS, WORKLOADS
from tvm_comfuse.tuning.database.workload import trace_of, workload_module

OTHER_TARGETS = ("h100", "llvm", "cuda -arch=sm_80", "nvidia/nvidia-h100")


@pytest.fixture(scope="module")
def func() -> Any:
    return function()


@pytest.fixture(scope="module")
def symbolic() -> Any:
    return function(None)


@pytest.fixture(scope="module")
def target() -> Any:
    return tvm_comfuse.parse_target("h200")


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "records")


def change_evidence(database: Database, target: Any, **changes: Any) -> None:
    path = database.directory(target) / EVIDENCE
    values = [{**json.loads(line), **changes} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each) + "\n" for each in values))


def test_round_trip(database: Database, func: Any, target: Any) -> None:
    plan = some_plan(func)
    made = commit(database, func, device_name="NVIDIA H200", commit="abc", label="row")
    found = Database.open(database.path, create=False).query(func, target)
    assert found is not None
    assert found.plan == plan == plan_of(found.replay())
    assert found.entry == made.entry
    assert found.evidence is not None
    assert found.evidence == made.evidence
    assert (found.evidence.rows, found.evidence.accuracy, found.evidence.label) == (24, RIGHT, "row")
    assert found.evidence.versions == current_versions()
    assert found.seconds == pytest.approx(1e-5)
    tvm.ir.assert_structural_equal(found.replay().with_attr("global_symbol", "x"), scheduled(func, plan))
    assert str(found).startswith("tuned on NVIDIA H200 at ")
    assert str(found).endswith(", 10.0 us")


def test_one_outlier_does_not_move_a_record(database: Database, func: Any, target: Any) -> None:
    database.commit(func, some_plan(func, 1), [1e-5, 2e-5, 9e-1], target, accuracy=RIGHT)
    database.commit(func, some_plan(func, 2), [3e-5, 3e-5, 3e-5], target, accuracy=RIGHT)
    best = database.query(func, target)
    assert best is not None
    assert (best.plan, best.seconds) == (some_plan(func, 1), 2e-5)
    database.prune(1)
    assert [record.plan for record in database.records()] == [some_plan(func, 1)]


def test_what_was_tuned_on_a_cpu_is_used_there(database: Database, func: Any) -> None:
    record = commit(database, func, target="llvm")
    assert default_plan(analyze(func), H200) != record.plan
    for target, source in (("llvm", str(record)), ("h200", "")):
        (matmul,) = tvm_comfuse.explain(module(), target, tuning_records=database, use_pretuned=False).matmuls
        assert (matmul.plan == record.plan) == bool(source)
        assert matmul.plan_source == source or not source


def scheduled(func: Any, plan: Any) -> Any:
    result = schedule(func.with_attrs({"global_symbol": "x", "tirx.noalias": True}), H200, plan)
    assert isinstance(result, tvm.tirx.PrimFunc)
    return result


def test_the_fastest_record_answers(database: Database, func: Any, target: Any) -> None:
    for us, number in ((12.0, 3), (9.0, 5), (10.0, 8)):
        commit(database, func, us, number)
    found = database.query(func, target)
    assert found is not None
    assert found.plan == some_plan(func, 5)
    assert len((database.directory(target) / WORKLOADS).read_text().splitlines()) == 1


def test_another_process_finds_the_same_cluster(database: Database, func: Any) -> None:
    commit(database, func)
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "from database_examples import function; import tvm_comfuse\n"
        "from tvm_comfuse.tuning.database import Database\n"
        f"found = Database.open({str(database.path)!r}).query(function(), tvm_comfuse.parse_target('h200'))\n"
        "print(found.plan.to_json())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == some_plan(func).to_json(), run.stderr


@pytest.mark.parametrize("other", OTHER_TARGETS)
def test_a_record_never_answers_for_another_device(database: Database, func: Any, target: Any, other: str) -> None:
    wrong = tvm_comfuse.parse_target(other)
    commit(database, func)
    assert database.query(func, wrong) is None
    assert database.to_stock(wrong).get_all_tuning_records() == []
    # and the other way round: the same trace measured there
    mine = Database.open(database.path.with_name("other"))
    trace = trace_of(workload_module(func), some_plan(func))
    record = mine.commit(func, trace, [1e-6], wrong, accuracy=RIGHT)
    assert record.doubt == ""
    assert mine.query(func, wrong) is not None
    assert mine.query(func, target) is None
    assert best_plan(func, target, mine)[1].kind == "default"


def test_a_record_of_other_versions_does_not_answer(database: Database, func: Any, target: Any) -> None:
    for changed in ({"kernel": "0"}, {"apache-tvm": "0.26.1"}):
        record = commit(database, func, versions={**current_versions(), **changed})
        assert (record.doubt, record.is_current) == ("", False)
    assert database.query(func, target) is None
    assert len(database.records()) == 2
    # another release of this package is the same kernel
    assert commit(database, func, versions={**current_versions(), "tvm_comfuse": "9.9"}).is_current
    assert database.query(func, target) is not None


def test_a_record_moved_into_the_folder_of_another_device_is_not_believed(
    database: Database, func: Any, target: Any
) -> None:
    commit(database, func, target="h100")
    database.directory(tvm_comfuse.parse_target("h100")).rename(database.directory(target))
    (record,) = database.records(target)
    assert "stands in the folder of another" in record.doubt
    # nor with an evidence that says what it should
    change_evidence(database, target, device="sm_90a-h200")
    (record,) = database.records(target)
    assert record.doubt == "its target is not sm_90a-h200"
    assert database.query(func, target) is None


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"key": "0"}, "no evidence"),
        ({"shape": 3}, "no evidence"),
        ({"accuracy": {"error": 1.0, "allowed": 0.1, "seeds": 1}}, "its error 1 is above 0.1"),
        ({"accuracy": {"error": math.nan, "allowed": 0.1, "seeds": 1}}, "its error nan"),
        ({"plan": None}, "another plan"),
    ],
)
def test_doubted_records_do_not_answer(
    database: Database, func: Any, target: Any, changes: dict[str, Any], doubt: str
) -> None:
    commit(database, func)
    change_evidence(database, target, **changes)
    assert database.query(func, target) is None
    (record,) = database.records()
    assert doubt in record.doubt
    assert [problem.question for problem in verify(database)] == ["believed"]
    assert database.prune() == 1


def test_a_record_of_a_stock_writer_is_not_believed(database: Database, func: Any, target: Any) -> None:
    commit(database, func)
    stock = ms.database.JSONDatabase(work_dir=str(database.directory(target)))
    workload = stock.commit_workload(workload_module(func))
    trace = trace_of(workload_module(func), some_plan(func, 3))
    stock.commit_tuning_record(ms.database.TuningRecord(trace, workload, [1e-9], target, None))
    assert [bool(record.doubt) for record in database.records()] == [False, True]
    found = database.query(func, target)
    assert found is not None
    assert found.plan == some_plan(func)


def test_refused_records(database: Database, func: Any, target: Any, symbolic: Any) -> None:
    plan = some_plan(func)
    wrong = [Accuracy(5e-3, 4e-3), Accuracy(math.nan, 4e-3), Accuracy(1e-3, math.nan), Accuracy(1e-3, 4e-3, 0)]
    for accuracy in wrong:
        with pytest.raises(DatabaseError, match="found right"):
            database.commit(func, plan, [1e-5], target, accuracy=accuracy)
    for times in ([], [0.0], [1e10], [math.inf], [math.nan]):
        with pytest.raises(DatabaseError, match="not timed"):
            database.commit(func, plan, times, target, accuracy=RIGHT)
    with pytest.raises(DatabaseError, match="legal on h200"):
        database.commit(func, replace(plan, ctas=1000), [1e-5], target, accuracy=RIGHT)
    with pytest.raises(DatabaseError, match="rows="):
        database.commit(symbolic, some_plan(symbolic), [1e-5], target, accuracy=RIGHT)
    with pytest.raises(DatabaseError, match="before scheduling"):
        database.commit(scheduled(func, plan), plan, [1e-5], target, accuracy=RIGHT)
    unplanned = tvm.s_tir.Schedule(workload_module(func)).trace
    with pytest.raises(DatabaseError, match="with a plan"):
        database.commit(func, unplanned, [1e-5], target, accuracy=RIGHT)
    assert database.records() == []


def test_other_constants_are_another_function(database: Database, func: Any, target: Any) -> None:
    commit(database, function(24, "rms_norm"))
    assert database.query(func, target) is None
    assert database.query(function(25), target) is None
    commit(database, func)
    assert database.query(func.with_attr("global_symbol", "any_name"), target) is not None


def test_buckets_of_a_symbolic_m(database: Database, symbolic: Any, target: Any) -> None:
    plans = {}
    for rows, number, us in ((256, 3, 5.0), (4096, 9, 30.0), (4096, 11, 20.0), (16384, 13, 99.0)):
        plans[rows] = commit(database, symbolic, us, number, rows=rows).plan
    for rows, bucket in ((1, 256), (900, 256), (1100, 4096), (8000, 4096), (10**6, 16384), (None, 16384)):
        found = database.query(symbolic, target, rows)
        assert found is not None
        assert found.plan == plans[bucket], rows
        assert best_plan(symbolic, target, database, rows)[0] == plans[bucket]
    assert verify(database) == []
    # a stock reader compares times alone, so it gets one bucket
    assert database.export(target, database.path.with_name("stock")) == 1
    (record,) = ms.database.JSONDatabase(work_dir=str(database.path.with_name("stock"))).get_all_tuning_records()
    assert int(record.args_info[0].shape[0]) == 16384
    assert database.prune(1) == 1
    assert sorted(r.evidence.rows for r in database.records() if r.evidence) == [256, 4096, 16384]


def test_merge_copies_what_is_believed_once(tmp_path: Path, func: Any, target: Any) -> None:
    one, two = Database.open(tmp_path / "one"), Database.open(tmp_path / "two")
    commit(one, func, 10.0, 3)
    commit(two, function(32), 11.0, 4)
    commit(two, func, 9.0, 5)
    commit(two, func, 8.0, 6, target="h100")
    assert one.merge(two) == (3, 0)
    assert one.merge(two) == (0, 0)
    assert [binding.device for binding in one.bindings()] == ["sm_90a-h100", "sm_90a-h200"]
    found = one.query(func, target)
    assert found is not None
    assert found.plan == some_plan(func, 5)
    assert verify(one) == []
    change_evidence(two, target, accuracy={"error": 1.0, "allowed": 0.1, "seeds": 1})
    assert Database.open(tmp_path / "three").merge(two) == (1, 2)


def test_merge_keeps_one_workload_of_two_names(database: Database, func: Any, target: Any) -> None:
    """The same function, whose variables another model calls otherwise, has another text."""
    commit(database, func, 10.0, 3)
    text = tvm.ir.save_json(func)
    assert '"col_1"' in text
    renamed = tvm.ir.load_json(text.replace('"col_1"', '"bias"'))
    commit(database, renamed, 9.0, 5)
    assert len((database.directory(target) / WORKLOADS).read_text().splitlines()) == 1
    assert [record.doubt for record in database.records()] == ["", ""]
    found = database.query(func, target)
    assert found is not None
    assert found.plan == some_plan(func, 5)
    # the renamed function comes first in the other database; merged twice it is there once
    other = Database.open(database.path.with_name("other"))
    commit(other, renamed, 9.0, 5)
    assert other.merge(database) == (1, 0)
    assert other.merge(database) == (0, 0)
    assert len(other.records()) == 2
    assert verify(other) == []


def test_prune_keeps_the_best_and_drops_other_versions_on_demand(database: Database, func: Any, target: Any) -> None:
    for us, number in ((12.0, 3), (9.0, 5), (10.0, 8)):
        commit(database, func, us, number)
    commit(database, func, 1.0, 9, versions={**current_versions(), "kernel": "0"})
    assert database.prune(2) == 1
    assert [round(record.seconds * 1e6) for record in database.records(target)] == [9, 10]
    assert len(database.records()) == 3
    assert database.prune(2, stale=True) == 1
    assert all(record.is_current for record in database.records())
    with pytest.raises(DatabaseError, match="at least one"):
        database.prune(0)


def test_prune_without_a_number_keeps_all_that_is_believed(database: Database, func: Any, target: Any) -> None:
    for us, number in ((12.0, 3), (9.0, 5), (10.0, 8)):
        commit(database, func, us, number)
    folder = database.directory(target)
    evidence = (folder / EVIDENCE).read_text().splitlines(keepends=True)
    (folder / EVIDENCE).write_text("".join(evidence[1:]) + "{}\n")
    with (folder / RECORDS).open("a") as file:
        file.write("[0,[[\n[3]\n")
    before = {name: (folder / name).read_bytes() for name in FILES}
    with pytest.warns(TornLineWarning, match="without --keep removes it and no record that is believed"):
        (gone,) = database.removals()
    assert gone.why.startswith("not believed: no evidence")
    assert [round(each.record.seconds * 1e6) for each in database.removals(1)] == [12, 10]
    assert database.bad_lines() == 3
    assert {name: (folder / name).read_bytes() for name in FILES} == before
    with pytest.warns(TornLineWarning):
        assert database.prune() == 1
    assert [round(record.seconds * 1e6) for record in database.records()] == [9, 10]
    assert (database.removals(), database.bad_lines(), database.prune()) == ([], 0, 0)


def test_verify_finds_what_no_longer_holds(database: Database, func: Any, target: Any) -> None:
    commit(database, func, 9.0, 5)
    commit(database, func, 12.0, 3)
    assert verify(database) == []
    path = database.directory(target) / RECORDS
    original = path.read_text()
    path.write_text(original.replace('"comfuse.row_tile"', '"comfuse.row"'))
    assert [problem.question for problem in verify(database)] == ["believed", "believed"]
    # the same with evidence that fits: a trace that cannot be replayed, a plan that is not legal, another shape
    tamper(database, target, original, '"ReverseComputeAt"', '"NoSuchInstruction"')
    assert {problem.question for problem in verify(database)} == {"replays"}
    tamper(database, target, original, r'(\\"ctas\\"): \d+', r"\1: 999", ctas=999)
    assert {problem.question for problem in verify(database)} == {"legal"}


def tamper(database: Database, target: Any, text: str, old: str, new: str, **plan: Any) -> None:
    """Change the record file and make the evidence fit to it, as only somebody who knows this package can."""
    from tvm_comfuse.tuning.database.store import key_of

    changed_text, count = re.subn(old, new, text)
    assert count
    path = database.directory(target)
    (path / RECORDS).write_text(changed_text)
    workload = (path / WORKLOADS).read_text().splitlines()[0]
    keys = [key_of(workload, json.loads(line)[1]) for line in (path / RECORDS).read_text().splitlines()]
    lines = [json.loads(line) for line in (path / EVIDENCE).read_text().splitlines()][: len(keys)]
    changed = [{**e, "key": key, "plan": {**e["plan"], **plan}} for e, key in zip(lines, keys, strict=True)]
    (path / EVIDENCE).write_text("".join(json.dumps(each) + "\n" for each in changed))


def test_open_takes_only_databases(tmp_path: Path, func: Any, target: Any) -> None:
    with pytest.raises(DatabaseError, match="nothing at"):
        Database.open(tmp_path / "none", create=False)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(DatabaseError, match="something else at"):
        Database.open(tmp_path)
    made = Database.open(tmp_path / "made")
    commit(made, func)
    with pytest.raises(DatabaseError, match=f"try: open {made.path}"):
        Database.open(made.directory(target))
    made.export(target, tmp_path / "stock")
    with pytest.raises(DatabaseError, match="stock MetaSchedule"):
        Database.open(tmp_path / "stock")
    (made.path / "comfuse_database.json").write_text('{"format": 2}')
    with pytest.raises(DatabaseError, match="format 1; found format 2"):
        Database.open(made.path)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_empty_folder_is_called_empty(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(DatabaseError) as caught:
        Database.open(tmp_path, create=False, read_only=read_only)
    assert caught.value.needed == "an existing tuning database"
    assert caught.value.found == f"an empty folder at {tmp_path}"
    (tmp_path / "file.txt").touch()
    with pytest.raises(DatabaseError) as caught:
        Database.open(tmp_path, create=False, read_only=read_only)
    # an empty one would not do either, so the message must not ask for it
    assert caught.value.needed == "an existing tuning database"
    assert caught.value.found == f"something else at {tmp_path}"


@pytest.mark.parametrize("text", ["[]", "3", "{}", "{", ""])
def test_a_broken_marker_is_shown_as_it_is(database: Database, text: str) -> None:
    marker = database.path / "comfuse_database.json"
    marker.write_text(text)
    with pytest.raises(DatabaseError) as caught:
        Database.open(database.path)
    assert caught.value.needed == f'{{"format": 1}} in {marker}'
    assert caught.value.found == repr(text)
    marker.write_bytes(b"\xff")
    with pytest.raises(DatabaseError, match="a readable"):
        Database.open(database.path)


def test_torn_line_is_repaired_at_the_first_look(database: Database, func: Any, target: Any) -> None:
    commit(database, func)
    with (database.directory(target) / RECORDS).open("a") as file:
        file.write("[0,[[[[")
    again = Database.open(database.path)
    with pytest.warns(TornLineWarning):
        assert len(again.records()) == 1
    assert len(ms.database.JSONDatabase(work_dir=str(database.directory(target)))) == 1


def test_bindings_are_what_folders_say(database: Database, func: Any, target: Any) -> None:
    commit(database, func)
    (binding,) = database.bindings()
    assert binding == Binding.of(target)
    assert binding.folder == database.directory(target).name == "sm_90a-h200.kernel2.tvm0.27.0"
    assert Binding.of(tvm_comfuse.parse_target("cuda -arch=sm_90a")) == binding


def test_package_records_are_read_only() -> None:
    database = pretuned()
    assert database is not None
    assert database.read_only
    with pytest.raises(DatabaseError, match="opened to read"):
        database.prune()
    assert [record.doubt for record in database.records() if record.doubt] == []


def test_default_without_records(database: Database, func: Any, target: Any) -> None:
    plan, source = best_plan(func, target, database)
    assert plan == default_plan(analyze(func), H200)
    assert (source.kind, source.record) == ("default", None)
    refusal, _ = best_plan(func, tvm_comfuse.parse_target("llvm"), database)
    assert isinstance(refusal, tvm_comfuse.Refusal)
