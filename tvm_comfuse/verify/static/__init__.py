"""Static checks of a lowered kernel: one walk over its IR, then every rule by arithmetic.  Milliseconds a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tvm_ffi
from tvm import tirx

from tvm_comfuse.errors import VerifyError
from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static import (
    accumulators,
    async_order,
    barriers,
    cluster,
    convergence,
    dependency,
    descriptors,
    named_barriers,
    registers,
    residency,
    shared_memory,
    tensor_maps,
    turns,
)
from tvm_comfuse.verify.static.index import KernelIndex, index_of
from tvm_comfuse.verify.static.scene import Scene, scenes

# raised in a pass of TVM, it comes out of TVM as what it is
tvm_ffi.register_error(VerifyError)

Check = Callable[[KernelIndex, Scene, Scene, Device], Iterator[Finding]]

#: every check by the name it is reported under
CHECKS: dict[str, Check] = {
    "registers": lambda index, small, large, device: registers.check(index, small, device),
    "shared memory": lambda index, small, large, device: shared_memory.check(index, small, device),
    "tensor maps": lambda index, small, large, device: tensor_maps.check(index, small),
    "descriptors": lambda index, small, large, device: descriptors.check(index, small),
    "barriers": lambda index, small, large, device: barriers.check(index, small, large),
    "turns": lambda index, small, large, device: turns.check(index, small, large),
    "named barriers": lambda index, small, large, device: named_barriers.check(index, small),
    "convergence": lambda index, small, large, device: convergence.check(index, small),
    "register arrays": lambda index, small, large, device: accumulators.check(index),
    "asynchronous order": lambda index, small, large, device: async_order.check(index, small),
    "cluster": lambda index, small, large, device: cluster.check(index, small),
    "residency": lambda index, small, large, device: residency.check(index, small, device),
    "dependency": lambda index, small, large, device: dependency.check(index, small),
}


def check(kernel: tirx.PrimFunc, device: Device) -> list[Finding]:
    """Every violation of a static rule in a lowered kernel; [] if there is none.

    Raises LoweringError for a kernel with statements that no emitter of ours makes.
    """
    index = index_of(kernel)
    small, large = scenes(index)
    return [finding for run in CHECKS.values() for finding in run(index, small, large, device)]


def verify_or_raise(kernel: tirx.PrimFunc, device: Device) -> None:
    """Raises VerifyError that lists every violation."""
    findings = check(kernel, device)
    if findings:
        name = str((kernel.attrs or {}).get("global_symbol", "a kernel"))
        raise VerifyError(
            f"a kernel that keeps the rules of {device.name}",
            f"{len(findings)} violations in {name}: " + " | ".join(map(str, findings)),
            "report this: the emitter or a hand-made plan is wrong",
        )
