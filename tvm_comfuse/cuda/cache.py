"""Compiled sources on disk, found again by a hash of everything that decides the binary."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from tvm_comfuse.cuda.report import CubinReport, KernelReport

_LOG = logging.getLogger(__name__)
#: raise when the meaning of a stored entry changes
_FORMAT = 1


def cache_folder() -> Path:
    """``$TVM_COMFUSE_CACHE``, else ``tvm_comfuse`` in the user's cache directory.  It need not exist."""
    if own := os.environ.get("TVM_COMFUSE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm_comfuse"


def size() -> int:
    """Bytes of all files in the folder; 0 without one."""
    total = 0
    for path in cache_folder().rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # another process has replaced or removed it
            continue
    return total


def key_of(source: str, compiler: str, options: list[str]) -> str:
    """The hash that names an entry."""
    parts = json.dumps([_FORMAT, compiler, options, source])
    return hashlib.sha256(parts.encode()).hexdigest()


def read(key: str) -> CubinReport | None:
    """The entry, or None if there is none or it cannot be read."""
    try:
        values: dict[str, Any] = json.loads(_path(key).read_text())
        return CubinReport(
            cubin=base64.b64decode(values["cubin"]),
            kernels=tuple(KernelReport(**kernel) for kernel in values["kernels"]),
            warnings=tuple(values["warnings"]),
            compiler=values["compiler"],
            arch=values["arch"],
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("ignored the unreadable cache entry %s: %s", _path(key), error)
        return None


def write(key: str, report: CubinReport) -> None:
    """Store an entry.  A cache that cannot be written is logged and otherwise without effect."""
    text = json.dumps({**report.to_dict(), "cubin": base64.b64encode(report.cubin).decode()})
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a second process may write the same entry: each writes a file of its own and renames it
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        _LOG.warning("could not write the cache entry %s: %s", path, error)


def _path(key: str) -> Path:
    return cache_folder() / "cubin" / key[:2] / f"{key}.json"
