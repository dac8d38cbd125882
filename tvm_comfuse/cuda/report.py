"""What a CUDA compiler says about the kernels of one source: registers, spills, shared memory, warnings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
#: lines that tell of lost speed or wrong use; "Performance Loss" covers serialised wgmma, which comes as info only
_WARNING = re.compile(r"warning|performance loss", re.IGNORECASE)


@dataclass(frozen=True)
class KernelReport:
    """One entry function.

    registers     32-bit registers of a thread
    stack_frame   bytes of local memory of a thread, spill_stores and spill_loads bytes moved to and from it
    shared_bytes  statically sized shared memory of a block in bytes, as the compiler counts it
    dynamic_shared_bytes  what the launch adds to it; the compiler does not know it
    """

    name: str
    registers: int
    stack_frame: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    dynamic_shared_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class CubinReport:
    """One compiled source: the binary and the report of each kernel in it, in the order the compiler names them."""

    cubin: bytes = field(repr=False)
    kernels: tuple[KernelReport, ...]
    warnings: tuple[str, ...]
    compiler: str
    arch: str

    @property
    def registers(self) -> int:
        """The most registers a thread of any kernel needs; 0 without kernels."""
        return max((kernel.registers for kernel in self.kernels), default=0)

    @property
    def spill_stores(self) -> int:
        """Bytes spilled, summed over the kernels."""
        return sum(kernel.spill_stores for kernel in self.kernels)

    @property
    def spill_loads(self) -> int:
        """Bytes of spills read back, summed over the kernels."""
        return sum(kernel.spill_loads for kernel in self.kernels)

    @property
    def shared_bytes(self) -> int:
        """The most shared memory a block of any kernel needs, static and dynamic, in bytes."""
        return max((kernel.shared_bytes + kernel.dynamic_shared_bytes for kernel in self.kernels), default=0)

    def with_dynamic_shared(self, sizes: Mapping[str, int]) -> CubinReport:
        """The same report with the bytes that launches add, by kernel name."""
        kernels = (replace(kernel, dynamic_shared_bytes=sizes.get(kernel.name, 0)) for kernel in self.kernels)
        return replace(self, kernels=tuple(kernels))

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values, without the binary."""
        return {
            "compiler": self.compiler,
            "arch": self.arch,
            "warnings": list(self.warnings),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }


def parse_ptxas(log: str) -> tuple[tuple[KernelReport, ...], tuple[str, ...]]:
    """Kernels and warnings from the text of ``ptxas -v``."""
    kernels: list[KernelReport] = []
    warnings: list[str] = []
    name: str | None = None
    frame = (0, 0, 0)
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name, frame = entry["name"], (0, 0, 0)
        elif found := _FRAME.search(line):
            frame = (int(found[1]), int(found[2]), int(found[3]))
        elif (used := _REGISTERS.search(line)) and name is not None:
            shared = _SHARED.search(line)
            kernels.append(KernelReport(name, int(used[1]), *frame, int(shared[1]) if shared else 0))
            name = None
        elif _WARNING.search(line):
            warnings.append(line.strip())
    return tuple(kernels), tuple(warnings)
