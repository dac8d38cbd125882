"""Lines, locks and repairs: the part of the tuning database that knows nothing of TVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from filelock import FileLock
from permissions import without_permission_to_write

from tvm_comfuse.tuning.database import DatabaseError, TornLineWarning, files, store
from tvm_comfuse.tuning.database.store import EVIDENCE, FILES, RECORDS, WORKLOADS, Store, key_of, write_stock

PAYLOAD = [[[], []], [1e-5], {"kind": "llvm"}, []]


def workload(name: str, digest: str | None = None) -> str:
    return json.dumps([digest or f"hash of {name}", name])


def payload(seconds: float) -> list:
    return [PAYLOAD[0], [seconds], *PAYLOAD[2:]]


def index_lines(folder: Path) -> list[tuple[int, float]]:
    """(workload line, seconds) of every record as stock TVM sees it."""
    lines = (folder / RECORDS).read_text().splitlines()
    return [(index, values[1][0]) for index, values in map(json.loads, lines)]


def test_the_file_layer_does_not_import_tvm() -> None:
    code = "import sys, tvm_comfuse.tuning.database.store; print('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_torn_line_goes_beside_with_a_warning(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit(workload("a"), payload(1.0), {})
    whole = (tmp_path / RECORDS).read_bytes()
    torn = b'[0,[[[["GetSBl'
    (tmp_path / RECORDS).write_bytes(whole + torn)
    with pytest.warns(TornLineWarning, match=r"database_tuning_record.json .*14 bytes are now in .*\.torn"):
        (entry,) = Store(tmp_path).entries()
    assert entry.payload == payload(1.0)
    assert (tmp_path / RECORDS).read_bytes() == whole
    assert (tmp_path / f"{RECORDS}.torn").read_bytes() == torn + b"\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(tmp_path).entries()


@pytest.mark.parametrize("name", [WORKLOADS, EVIDENCE, RECORDS])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_commit_after_a_torn_line_is_whole(tmp_path: Path, name: str, size: int) -> None:
    store = Store(tmp_path)
    store.commit(workload("a"), payload(1.0), {})
    with (tmp_path / name).open("ab") as file:
        file.write(b'["' + b"x" * size)
    with pytest.warns(TornLineWarning):
        store.commit(workload("b"), payload(2.0), {})
    assert index_lines(tmp_path) == [(0, 1.0), (1, 2.0)]
    assert [json.loads(entry.workload)[1] for entry in Store(tmp_path).entries()] == ["a", "b"]


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit(workload("a"), payload(1.0), {"task": 1})
    for name in (WORKLOADS, EVIDENCE, RECORDS):
        path = tmp_path / name
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.commit(workload("a"), payload(2.0), {"task": 2})
    assert [(e.evidence or {})["task"] for e in Store(tmp_path).entries()] == [1, 2]


def test_writers_that_know_only_an_older_state_take_the_index_from_the_file(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    one.commit(workload("a"), payload(1.0), {})
    other.commit(workload("b"), payload(2.0), {})
    one.commit(workload("c"), payload(3.0), {})
    other.commit(workload("c"), payload(4.0), {})
    assert index_lines(tmp_path) == [(0, 1.0), (1, 2.0), (2, 3.0), (2, 4.0)]


def test_equal_hashes_of_different_workloads(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit(workload("a", "1"), payload(1.0), {})
    store.commit(workload("b", "1"), payload(2.0), {})
    store.commit(workload("B", "1"), payload(3.0), {}, lambda old, new: old.lower() == new.lower())
    assert index_lines(tmp_path) == [(0, 1.0), (1, 2.0), (1, 3.0)]


def test_evidence_is_of_one_record_of_one_workload(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit(workload("a"), payload(1.0), {"task": "a"})
    store.commit(workload("b"), payload(2.0), {"task": "b"})
    path = tmp_path / RECORDS
    first, second = path.read_text().splitlines()
    # somebody moves a record to another workload, and one to a workload that is not there
    path.write_text(f"{first.replace('[0,', '[1,', 1)}\n{second.replace('[1,', '[7,', 1)}\n{second}\n")
    moved, nowhere, kept = Store(tmp_path).entries()
    assert (moved.evidence, nowhere.evidence, nowhere.workload) == (None, None, "")
    assert kept.evidence is not None
    assert kept.evidence["task"] == "b"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, calls = tmp_path / "lines", os.write, []
    files.append_line(path, "one")

    def full(descriptor: int, data: bytes) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DatabaseError, match="No space left on device"):
        files.append_line(path, "two")
    assert path.read_text() == "one\n"


def test_a_taken_lock_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.05)
    with FileLock(tmp_path / files.LOCK_NAME), pytest.raises(DatabaseError, match=r"taken for 0\.05 s"):
        Store(tmp_path).entries()
    assert Store(tmp_path).entries() == []


def test_a_read_only_store_writes_nothing(tmp_path: Path) -> None:
    Store(tmp_path).commit(workload("a"), payload(1.0), {})
    (tmp_path / files.LOCK_NAME).unlink()
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b"[0,")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(Store(tmp_path, read_only=True).entries()) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_reader_without_the_lock_sees_whole_records_at_every_moment_of_a_commit(tmp_path: Path) -> None:
    """Whatever bytes of a commit are there: the records before it, or those and its own, with their evidence."""
    store = Store(tmp_path / "made")
    store.commit(workload("a"), payload(1.0), {"task": "a"})
    before = {name: (store.folder / name).read_bytes() for name in FILES}
    store.commit(workload("b"), payload(2.0), {"task": "b"})
    added = [(name, (store.folder / name).read_bytes()[len(before[name]) :]) for name in FILES]
    seen, reader = set(), Store(tmp_path / "partly", read_only=True)
    reader.folder.mkdir()
    for name in FILES:
        (reader.folder / name).write_bytes(before[name])
    for name, line in added:
        for byte in range(len(line)):
            with (reader.folder / name).open("ab") as file:
                file.write(line[byte : byte + 1])
            tasks = "".join((entry.evidence or {})["task"] for entry in reader.entries())
            seen.add((name == RECORDS and byte == len(line) - 1, tasks))
    assert seen == {(False, "a"), (True, "ab")}


def test_a_reader_without_the_lock_while_others_drop_and_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, read = Store(tmp_path), files.read_lines
    for name in "ab":
        writer.commit(workload(name), payload(1.0), {"task": name})

    def meanwhile(path: Path, start: int = 0) -> tuple[list[str], int]:
        """Between the reader's first file and its others both happen."""
        lines = read(path, start)
        monkeypatch.setattr(store, "read_lines", read)
        writer.keep(lambda entries: entries[1:])
        writer.commit(workload("c"), payload(1.0), {"task": "c"})
        return lines

    monkeypatch.setattr(store, "read_lines", meanwhile)
    found = Store(tmp_path, read_only=True).entries()
    assert [entry.evidence and entry.evidence["task"] for entry in found] == [None, "b"]
    assert [(entry.evidence or {})["task"] for entry in writer.entries()] == ["b", "c"]


READER = """
import sys
from pathlib import Path

from tvm_comfuse.tuning.database.files import DatabaseError
from tvm_comfuse.tuning.database.store import Store

store = Store(Path(sys.argv[1]))
print(len(store.entries()))
try:
    store.commit("[]", [], {})
except DatabaseError as error:
    print(error)
"""


@pytest.mark.parametrize("protected", ["folder", "files"])
def test_reading_needs_no_permission_to_write(tmp_path: Path, protected: str) -> None:
    Store(tmp_path).commit(workload("a"), payload(1.0), {})
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b"[0,")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with without_permission_to_write([tmp_path] if protected == "folder" else list(tmp_path.iterdir())) as prefix:
        command = [*prefix, sys.executable, "-c", READER, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    count, refused = run.stdout.splitlines()
    assert count == "1", run.stderr
    assert "check its permissions" in refused
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_bad_line_in_the_middle_is_left_out_and_removed_by_keep(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.commit(workload("a"), payload(1.0), {})
    with (tmp_path / RECORDS).open("ab") as file:
        file.write(b"[0,[[\n")
    store.commit(workload("a"), payload(2.0), {})
    with pytest.warns(TornLineWarning, match="comfuse db prune"):
        assert [entry.payload[1] for entry in store.entries()] == [[1.0], [2.0]]
    with pytest.warns(TornLineWarning):
        store.keep(lambda entries: entries)
    assert index_lines(tmp_path) == [(0, 1.0), (0, 2.0)]


def test_keep_drops_records_with_their_evidence(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seconds in (3.0, 1.0, 2.0):
        store.commit(workload("a"), payload(seconds), {})
    assert store.keep(lambda entries: [entry for entry in entries if entry.payload[1][0] < 3]) == 1
    assert index_lines(tmp_path) == [(0, 1.0), (0, 2.0)]
    evidence = [json.loads(line)["key"] for line in (tmp_path / EVIDENCE).read_text().splitlines()]
    assert evidence == [key_of(workload("a"), payload(seconds)) for seconds in (1.0, 2.0)]


def test_write_stock_numbers_workloads_anew_and_overwrites_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "from")
    for number, name in enumerate("abc"):
        store.commit(workload(name), payload(float(number)), {})
    write_stock(tmp_path / "to", store.entries()[1:])
    assert index_lines(tmp_path / "to") == [(0, 1.0), (1, 2.0)]
    assert (tmp_path / "to" / WORKLOADS).read_text().splitlines() == [workload("b"), workload("c")]
    with pytest.raises(DatabaseError, match="export to a new folder"):
        write_stock(tmp_path / "to", [])
