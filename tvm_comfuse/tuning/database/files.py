"""Files of whole lines that several processes append to, and that survive a process killed while it writes.

This module and `store` know nothing of TVM, so that they can be tested with processes that start in milliseconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tvm_comfuse.errors import ComfuseError

#: seconds to wait for another writer; a commit takes milliseconds, a merge or prune of thousands of records seconds
LOCK_TIMEOUT = 60.0
#: seconds between two tries
LOCK_POLL = 0.005
LOCK_NAME = ".lock"
TORN_SUFFIX = ".torn"


class DatabaseError(ComfuseError, RuntimeError):
    """A tuning database cannot be read or written, or does not take a record."""


class TornLineWarning(UserWarning):
    """A line of a tuning database or of its log is damaged: it was moved to a file beside, or is left out."""


@contextmanager
def file_errors(needed: str, hint: str = "check its permissions") -> Iterator[None]:
    """What the system refuses in here is a DatabaseError."""
    try:
        yield
    except OSError as error:
        raise DatabaseError(needed, str(error), hint) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here for a folder.  The kernel frees the lock of a process that is killed.

    Raises DatabaseError if the lock stays taken for LOCK_TIMEOUT seconds or the folder cannot be written.
    """
    lock = FileLock(folder / LOCK_NAME, timeout=LOCK_TIMEOUT, poll_interval=LOCK_POLL)
    try:
        lock.acquire()
    except Timeout as error:
        hint = "end the process that holds it, or try again"
        raise DatabaseError(f"the lock of {folder}", f"it taken for {LOCK_TIMEOUT:g} s", hint) from error
    except OSError as error:
        raise DatabaseError(f"a folder to write in at {folder}", str(error), "check its permissions") from error
    try:
        yield
    finally:
        lock.release()


def may_write(folder: Path, names: Iterable[str]) -> bool:
    """Whether this process may lock a folder and repair the files in it that have these names."""
    paths = [folder, *(folder / name for name in (LOCK_NAME, *names))]
    return all(os.access(path, os.W_OK) for path in paths if os.path.lexists(path))


def append_line(path: Path, line: str) -> None:
    """Append one line and wait until it is on the disk.  The caller holds the lock.

    If the write fails (a full disk) the file is cut back to what it was; raises DatabaseError.
    """
    with file_errors(f"to append to {path}"):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, (line + "\n").encode())
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, before)
            raise DatabaseError(f"to append to {path}", str(error), "make room on the disk") from error
    finally:
        os.close(descriptor)


def replace_file(path: Path, lines: list[str]) -> None:
    """Put a file of these lines in the place of another; a reader sees the old one or the new one, whole.

    Raises DatabaseError if it cannot be written.
    """
    with file_errors(f"to write {path}", "check permissions and room on the disk"):
        _replace(path, lines)


def _replace(path: Path, lines: list[str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a database is as readable as any new file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_lines(path: Path, start: int = 0) -> tuple[list[str], int]:
    """The whole lines behind the byte `start`, and the byte behind the last of them.

    What follows the last line end is left out: somebody is writing it, or was killed.  No file has no lines.
    Raises DatabaseError if it cannot be read.
    """
    with file_errors(f"to read {path}"):
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return [], 0
    end = data.rfind(b"\n") + 1
    text = data[:end].decode("utf-8", errors="replace")
    return text.split("\n")[:-1], start + end


def repair(path: Path) -> None:
    """Make the file end with a whole line.  The caller holds the lock.

    What a killed writer left of its last line goes to a file beside, named with ``.torn`` at the end, and a
    TornLineWarning says so.  A line that only lacks its end is given it.
    """
    tail, start = _tail(path)
    if not tail:
        return
    if _is_json(tail):
        with path.open("ab") as file:
            file.write(b"\n")
        return
    torn = path.with_name(path.name + TORN_SUFFIX)
    # the copy first: killed in between, the next repair copies once more, and nothing is lost
    with torn.open("ab") as file:
        file.write(tail + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, start)
    text = f"the last line of {path} was not written to its end; its {len(tail)} bytes are now in {torn.name}"
    warnings.warn(text, TornLineWarning, stacklevel=2)


def _tail(path: Path) -> tuple[bytes, int]:
    """The bytes behind the last line end, and where they start."""
    step = 1 << 16
    try:
        with path.open("rb") as file:
            start = end = file.seek(0, os.SEEK_END)
            tail = b""
            while start:
                start = max(0, start - step)
                file.seek(start)
                tail = file.read(min(step, end - start - len(tail))) + tail
                found = tail.rfind(b"\n")
                if found >= 0:
                    return tail[found + 1 :], start + found + 1
    except FileNotFoundError:
        return b"", 0
    return tail, 0


def _is_json(data: bytes) -> bool:
    """Whether this is a whole JSON array or object; no beginning of one is."""
    try:
        return isinstance(json.loads(data), (list, dict))
    except ValueError:
        return False


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; the system may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
