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
#: headers that generated code includes
_RUNTIME, _CCCL = ("cuda_runtime.h",), ("cuda/std/cstdint",)


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


def _include_folders(roots: list[Path], needed: tuple[str, ...]) -> tuple[str, ...]:
    """Header folders of the first root that has every needed header; () if none has.

    CCCL, the C++ library, has a folder of its own inside.
    """
    for root in roots:
        for folder in (root / "include", *sorted(root.glob("targets/*/include"))):
            folders = [f for f in (folder, folder / "cccl") if f.is_dir()]
            if all(any((f / header).is_file() for f in folders) for header in needed):
                return tuple(map(str, folders))
    return ()


@lru_cache(maxsize=1)
def find_nvcc() -> Compiler | None:
    """nvcc on PATH, in CUDA_PATH or CUDA_HOME, in /usr/local/cuda or in pip wheels; None if there is none."""
    candidates: list[tuple[str, tuple[str, ...]]] = []
    if found := shutil.which("nvcc"):
        candidates.append((found, ()))
    candidates += [(str(root / "bin" / "nvcc"), ()) for root in _toolkit_roots()]
    # nvcc of the wheels does not know where the wheel of the C++ library is
    candidates += [(str(root / "bin" / "nvcc"), _include_folders([root], _RUNTIME)) for root in wheel_roots()]
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
    # PyTorch's wheels bring the runtime's headers without CCCL
    include = _include_folders([*wheel_roots(), *_toolkit_roots()], (*_RUNTIME, *_CCCL))
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
    NVRTC 13.0 itself looks for its second library on the system's path only, unless it is loaded already.
    """
    for root in wheel_roots():
        found = [*sorted(root.glob("lib/libnvrtc-builtins.so.*")), *sorted(root.glob("lib/libnvrtc.so.*"))]
        for library in found:
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                break
        else:
            if found:
                return
