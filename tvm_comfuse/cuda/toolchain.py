"""Finding a CUDA compiler: nvcc of a toolkit or of pip wheels, or NVRTC through cuda-bindings."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: where the CUDA 13 wheels of pip put their files, below a folder of sys.path
_WHEEL_ROOT = Path("nvidia") / "cu13"


@dataclass(frozen=True)
class Compiler:
    """A usable compiler.

    kind     ``nvcc`` or ``nvrtc``
    version  e.g. ``13.0``
    path     of the executable; empty for NVRTC
    include  folders to search for CUDA's headers
    """

    kind: str
    version: str
    path: str
    include: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.version}"


def wheel_roots() -> list[Path]:
    """Folders ``.../nvidia/cu13`` of installed wheels."""
    return [root for folder in sys.path if (root := Path(folder or ".") / _WHEEL_ROOT).is_dir()]


def _toolkit_roots() -> list[Path]:
    named = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return [Path(root) for root in named if root and Path(root).is_dir()]


def _include_folders(roots: list[Path]) -> tuple[str, ...]:
    """Header folders of the first root that has the CUDA runtime's headers; CCCL's own folder is one of them."""
    for root in roots:
        for folder in (root / "include", *sorted(root.glob("targets/*/include"))):
            if (folder / "cuda_runtime.h").is_file():
                return tuple(str(f) for f in (folder, folder / "cccl") if f.is_dir())
    return ()


@lru_cache(maxsize=1)
def find_nvcc() -> Compiler | None:
    """nvcc on PATH, in CUDA_PATH or CUDA_HOME, in /usr/local/cuda or in pip wheels; None if there is none."""
    candidates: list[tuple[str, tuple[str, ...]]] = []
    if found := shutil.which("nvcc"):
        candidates.append((found, ()))
    candidates += [(str(root / "bin" / "nvcc"), ()) for root in _toolkit_roots()]
    # nvcc of the wheels does not know where the wheel of the C++ library is
    candidates += [(str(root / "bin" / "nvcc"), _include_folders([root])) for root in wheel_roots()]
    for path, include in candidates:
        version = _nvcc_version(path)
        if version:
            return Compiler("nvcc", version, path, include)
    return None


def _nvcc_version(path: str) -> str | None:
    """The version an nvcc executable gives, or None if it does not run."""
    if not os.access(path, os.X_OK):
        return None
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    words = run.stdout.replace(",", " ").split()
    return words[words.index("release") + 1] if "release" in words else "unknown"


@lru_cache(maxsize=1)
def find_nvrtc() -> Compiler | None:
    """NVRTC if cuda-bindings, the library and the headers are there, else None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    include = _include_folders([*wheel_roots(), *_toolkit_roots()])
    if not include:
        return None
    _preload_nvrtc()
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError):  # DynamicLibNotFoundError is a RuntimeError
        return None
    if int(status) != 0:
        return None
    return Compiler("nvrtc", f"{major}.{minor}", "", include)


def _preload_nvrtc() -> None:
    """Load NVRTC's library from wheels anywhere on sys.path.

    cuda-bindings searches site-packages only, and misses a folder given by PYTHONPATH or ``pip install --target``.
    """
    for root in wheel_roots():
        for library in sorted(root.glob("lib/libnvrtc.so.*")):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return
