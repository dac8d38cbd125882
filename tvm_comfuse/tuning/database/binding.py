"""What a tuning record is bound to: the device it was measured on and the versions that made the kernel."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

from tvm_comfuse._version import __version__
from tvm_comfuse._versions import release

if TYPE_CHECKING:
    from tvm.target import Target

KERNEL = "kernel"
TVM = "apache-tvm"
#: versions that a record must have in common with the process that asks
BINDING_VERSIONS = (KERNEL, TVM)
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Binding:
    """One folder of a database.

    device  architecture and model, e.g. ``sm_90a-h200``, ``sm_80``, ``llvm-znver3``
    kernel  version of the kernel emitter (tir_passes.KERNEL_VERSION)
    tvm     release of apache-tvm, e.g. ``0.27.0``
    """

    device: str
    kernel: str
    tvm: str

    @property
    def folder(self) -> str:
        """The name of the folder; equal bindings have equal names and others have others."""
        return f"{self.device}.kernel{self.kernel}.tvm{self.tvm}"

    @staticmethod
    def of(target: Target, versions: Mapping[str, str] | None = None) -> Binding:
        """What a record for a target is bound to; versions are those of this process if not given."""
        return Binding.from_versions(device_key(target), versions or current_versions())

    @staticmethod
    def from_versions(device: str, versions: Mapping[str, str]) -> Binding:
        """The binding of a record measured with these versions; what they do not say is ``unknown``."""
        tvm = versions.get(TVM)
        number = ".".join(map(str, release(str(tvm)))) if tvm else "unknown"
        return Binding(device, _safe(str(versions.get(KERNEL, "unknown"))), number)

    @staticmethod
    def of_folder(name: str) -> Binding:
        """The inverse of `folder`."""
        device, _, rest = name.partition(".kernel")
        kernel, _, tvm = rest.partition(".tvm")
        return Binding(device, kernel, tvm)

    @property
    def is_current(self) -> bool:
        """Whether the versions are those of this process."""
        return self == Binding.from_versions(self.device, current_versions())


def device_key(target: Target) -> str:
    """The architecture and, where that leaves several GPUs, the model of a target.

    Hopper GPUs are told apart as in schedules.device: ``sm_90a`` alone is an H200.
    """
    from tvm_comfuse.schedules.device import device_of

    kind = str(target.kind.name)
    if kind != "cuda":
        return _safe("-".join([kind, *([str(target.attrs["mcpu"])] if "mcpu" in target.attrs else [])]))
    arch = str(target.attrs.get("arch", "unknown"))
    device = device_of(target)
    model = device.name if device is not None else str(target.attrs.get("model") or "")
    return _safe("-".join([arch, *([model] if model and model != "unknown" else [])]))


def current_versions() -> dict[str, str]:
    """Versions of this process that a record notes."""
    from tvm_comfuse.tir_passes import KERNEL_VERSION

    return {
        "tvm_comfuse": __version__,
        KERNEL: str(KERNEL_VERSION),
        TVM: metadata.version(TVM),
        "apache-tvm-ffi": metadata.version("apache-tvm-ffi"),
        "python": platform.python_version(),
    }


@lru_cache(maxsize=64)
def names_device(target: str, device: str) -> bool:
    """Whether a record's own target, as JSON, is of the device of its folder."""
    from tvm.target import Target

    try:
        return device_key(Target(json.loads(target))) == device
    except (TypeError, ValueError, RuntimeError):
        return False


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)
