"""Permissions also where the tests run as root, for whom there are none: for commands that are started, and in this process."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
#: root passes over permissions by these two capabilities
DROPPED = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--"]
NOBODY = 65534


@contextmanager
def without_permission_to_write(paths: list[Path]) -> Iterator[list[str]]:
    """Takes the permission for the time of the block; gives what to put in front of a command that is to lack it."""
    prefix = [] if os.geteuid() else DROPPED
    if prefix and shutil.which(prefix[0]) is None:
        pytest.skip("root may write everywhere, and without setpriv it cannot be kept from it")
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root may write everywhere, and setpriv may not keep it from that here")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~WRITE)
        yield prefix
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@contextmanager
def unprivileged() -> Iterator[None]:
    """In here this process has no more rights than another user's; it must have imported what it needs."""
    if os.geteuid() != 0:
        yield
        return
    try:
        # the real user too, about whom os.access asks
        os.setresuid(NOBODY, NOBODY, 0)
    except OSError as error:
        pytest.skip(f"root cannot become somebody else here: {error}")
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(folder)
