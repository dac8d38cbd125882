"""Whether a file can be written, asked before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from tvm_comfuse.errors import OutputError

#: what TVM's exporter links a shared library for; other endings give an archive or an error of the linker
LIBRARY_SUFFIX = ".so"


def check_output(path: Path, suffix: str | None = None) -> None:
    """Raises OutputError unless `path` ends in `suffix` and is, or can become, a file in an existing folder."""
    check_suffix(path, suffix)
    if path.is_dir():
        raise OutputError("a file to write", f"{path}, a directory", "give the name of a file in it")
    folder = path.parent
    if not folder.is_dir():
        found = f"{folder}, which is no directory" if folder.exists() else f"no directory {folder}"
        raise OutputError(f"a directory to write {path.name} in", found, "make the directory or correct the path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"to write {path}", "no permission", "choose another place")


def check_suffix(path: Path, suffix: str | None = LIBRARY_SUFFIX) -> None:
    """Raises OutputError unless `path` ends in `suffix`."""
    if suffix is not None and path.suffix != suffix:
        raise OutputError(
            f"a file name that ends in {suffix}", path.name or str(path), f"{path.stem or 'model'}{suffix}"
        )
