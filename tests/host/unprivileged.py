"""Permissions hold for everybody but root, as whom containers run tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


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
