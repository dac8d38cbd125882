"""``comfuse doctor``."""

from __future__ import annotations

import ctypes
import platform
from importlib import import_module, metadata
from typing import Any

import typer

from tvm_comfuse import __version__
from tvm_comfuse._versions import SUPPORTED, check_versions
from tvm_comfuse.cli.common import JsonFlag, console, print_json
from tvm_comfuse.errors import VersionError

_PACKAGES = (*SUPPORTED, "torch", "numpy", "xgboost", "cuda-bindings")


def doctor(json: JsonFlag = False) -> None:
    """Look at versions, driver, GPU and compilers.  Exit code 1 if models cannot be compiled to GPU code here.

    A GPU and its driver are reported and not required: without them everything but running works.
    """
    report = examine()
    if json:
        print_json(report)
    else:
        out = console()
        for name, value in report.items():
            if name == "problems":
                continue
            lines = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in lines:
                out.print(f"{f'{name} {key}'.strip():<24} {entry if entry is not None else '-'}")
        for problem in report["problems"]:
            out.print(f"problem: {problem}")
        out.print("not ready" if report["problems"] else "ready")
    if report["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """What doctor reports; "problems" is empty where models can be compiled."""
    problems: list[str] = []
    report: dict[str, Any] = {
        "comfuse": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "driver": _driver(),
        "gpu": None,
        "llvm": None,
        "compilers": {"nvcc": None, "nvrtc": None},
        "cache": {"path": None, "size": None},
        "problems": problems,
    }
    try:
        check_versions()
    except VersionError as error:
        problems.append(str(error))
        return report  # TVM is not even imported: a wrong version may crash the process
    _examine_tvm(report, problems)
    _examine_compilers(report, problems)
    _examine_cache(report)
    return report


def _examine_tvm(report: dict[str, Any], problems: list[str]) -> None:
    import tvm

    device = tvm.cuda(0)
    if device.exist:
        report["gpu"] = f"{device.device_name}, sm_{device.compute_version.replace('.', '')}"
    version = tvm.get_global_func("target.llvm_version_major", allow_missing=True)
    if version is None:
        problems.append("this TVM has no LLVM; try: pip install --force-reinstall apache-tvm==0.27.0.post1")
    else:
        report["llvm"] = str(version())


def _examine_compilers(report: dict[str, Any], problems: list[str]) -> None:
    from tvm_comfuse.cuda import find_nvcc, find_nvrtc

    found = {"nvcc": find_nvcc(), "nvrtc": find_nvrtc()}
    report["compilers"] = {name: tool.version if tool else None for name, tool in found.items()}
    if not any(found.values()):
        problems.append('no CUDA compiler; try: pip install "tvm-comfuse[nvrtc]"')


def _examine_cache(report: dict[str, Any]) -> None:
    from tvm_comfuse.cuda.cache import cache_folder, size

    used = size()
    report["cache"] = {"path": str(cache_folder()), "size": f"{used / 2**20:.1f} MiB", "bytes": used}


def _version(name: str) -> str | None:
    """Of a distribution, or of the module of that name where another distribution brings it, as xgboost-cpu does."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _module_version(name)


def _module_version(name: str) -> str | None:
    try:
        return str(import_module(name).__version__)
    # what an installation that is not whole raises: without its library XGBoost raises a ValueError
    except (ImportError, AttributeError, OSError, ValueError, RuntimeError):
        return None


def _driver() -> str | None:
    """The newest CUDA version the driver library supports, or None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
