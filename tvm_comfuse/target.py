"""Targets by short names.

TVM 0.27 takes a target as a JSON dictionary only.  This module also takes the names of the supported GPUs, ``llvm``,
and the older one-line form ``kind -key=value``.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import tvm
from tvm.target import Target

from tvm_comfuse.errors import TargetError

HOPPER_ARCH = "sm_90a"
#: GPUs known by name and the bytes of their L2 cache, which is what tells targets of one architecture apart
HOPPER_MODELS = {"h100": 50 * 1024 * 1024, "h200": 60 * 1024 * 1024}
_DEFAULT_MODEL = "h200"
#: what every Hopper GPU has; the values stock TVM schedules ask for
_HOPPER = {
    "kind": "cuda",
    "arch": HOPPER_ARCH,
    "max_num_threads": 1024,
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "registers_per_block": 65536,
    "thread_warp_size": 32,
}
_KINDS = ("cuda", "llvm")
_HINT = "h200, h100, cuda, 'cuda -arch=sm_90a', llvm, or a tvm.target.Target"


def parse_target(spec: str | dict[str, Any] | Target) -> Target:
    """A TVM target with an LLVM host.

    spec  ``"h200"`` or ``"h100"``; ``"cuda"`` (the GPU of this machine, an H200 if there is none); ``"llvm"`` (the CPU
          of this machine); ``"kind -key=value ..."``; a TVM tag such as ``"nvidia/nvidia-h100"``; JSON text or a
          dictionary; a ``Target``, which only gets a host if it lacks one

    Raises TargetError for anything else and for kinds other than cuda and llvm.
    """
    if isinstance(spec, Target):
        target = spec
    else:
        config = _config(spec) if isinstance(spec, str) else spec
        try:
            target = Target(config)
        except (ValueError, TypeError, RuntimeError) as error:
            raise TargetError("a target", f"{spec!r} ({_first_line(error)})", _HINT) from error
    if target.kind.name not in _KINDS:
        raise TargetError(f"a target of kind {' or '.join(_KINDS)}", f"kind {target.kind.name!r}", _HINT)
    if target.kind.name == "cuda" and target.host is None:
        return target.with_host(Target({"kind": "llvm"}))
    return target


def is_cuda(target: Target) -> bool:
    """Whether code for the target runs on a GPU."""
    return bool(target.kind.name == "cuda")


def name_of(target: Target) -> str:
    """A short name for messages and reports: ``h200``, ``cuda sm_80`` or ``llvm``."""
    if not is_cuda(target):
        return str(target.kind.name)
    return str(target.attrs.get("model") or f"cuda {target.attrs.get('arch', '?')}")


def _config(spec: str) -> dict[str, Any] | str:
    """The argument for TVM's Target of a one-line target; raises TargetError."""
    words = shlex.split(spec)
    if not words:
        raise TargetError("a target", "an empty string", _HINT)
    if spec.lstrip().startswith("{"):
        try:
            return dict(json.loads(spec))
        except ValueError as error:
            raise TargetError("a target as a JSON object", str(error), "check the JSON text") from error
    if len(words) == 1:
        return _by_name(words[0])
    config: dict[str, Any] = {"kind": words[0]}
    for word in words[1:]:
        key, separator, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not separator or not key:
            raise TargetError("options of the form -key=value", f"{word!r} in {spec!r}", _HINT)
        config[key] = int(value) if value.isdigit() else value
    return config


def _by_name(name: str) -> dict[str, Any] | str:
    lowered = name.lower()
    if lowered in HOPPER_MODELS:
        return _hopper(lowered)
    if lowered == "cuda":
        return _local_gpu() or _hopper(_DEFAULT_MODEL)
    if lowered == "llvm":
        return {"kind": "llvm", "mcpu": str(tvm.get_global_func("target.llvm_get_system_cpu")())}
    return name


def _hopper(model: str) -> dict[str, Any]:
    return {**_HOPPER, "model": model, "l2_cache_size_bytes": HOPPER_MODELS[model]}


def _local_gpu() -> dict[str, Any] | None:
    """The configuration of the first GPU of this machine, or None."""
    device = tvm.cuda(0)
    if not device.exist:
        return None
    arch = "sm_" + device.compute_version.replace(".", "")
    if arch != "sm_90":
        return {"kind": "cuda", "arch": arch}
    name = device.device_name.lower()
    model = next((model for model in HOPPER_MODELS if model in name), None)
    return _hopper(model) if model else dict(_HOPPER)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
