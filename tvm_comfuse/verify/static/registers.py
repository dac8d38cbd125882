"""Registers: what the roles take together, and what wgmma needs before setmaxnreg gives more."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.schedules.registers import REGISTER_UNIT, THREADS_OF_GROUP, WGMMA_OVERHEAD, entry_registers
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.evaluate import WARP_GROUP
from tvm_comfuse.verify.static.index import KernelIndex, loads
from tvm_comfuse.verify.static.scene import Scene

#: values of setmaxnreg
LEAST, MOST, STEP = 24, 256, REGISTER_UNIT


def check(index: KernelIndex, scene: Scene, device: Device) -> Iterator[Finding]:
    """The register budget."""
    entry = entry_registers(index.threads, device.registers)
    limits = [entry] * index.warp_groups
    for instruction in index.named("setmaxnreg"):
        value = int(instruction.args[0])
        groups = [int(g) for g in scene.count(instruction, (WARP_GROUP,)).ravel().nonzero()[0]]
        where = f"setmaxnreg {value} of warp groups {groups}"
        if value % STEP or not LEAST <= value <= MOST:
            text = f"setmaxnreg takes a multiple of {STEP} from {LEAST} to {MOST}; found {value}"
            yield Finding("register-value", where, text, {"registers": value})
        raises = instruction.words[0] == "inc"
        if (value < entry) if raises else (value > entry):
            text = f"setmaxnreg.{instruction.words[0]} {value} at {entry} registers a thread ({index.threads} threads)"
            yield Finding("register-direction", where, text, {"registers": value, "entry": entry})
        for group in groups:
            limits[group] = value
    used = sum(THREADS_OF_GROUP * limit for limit in limits)
    pool = entry * index.threads
    if used > pool:
        parts = " + ".join(f"{THREADS_OF_GROUP} x {limit}" for limit in limits)
        text = (
            f"the warp groups may hold {parts} = {used} registers, the CTA starts with {index.threads} x {entry} = {pool}: "
            "setmaxnreg waits for ever"
        )
        yield Finding("register-budget", "setmaxnreg", text, {"limits": limits, "used": used, "registers": pool})
    yield from _wgmma(index, scene, limits, entry)


def _wgmma(index: KernelIndex, scene: Scene, limits: list[int], entry: int) -> Iterator[Finding]:
    registers: dict[int, set[tuple[int, ...]]] = {group: set() for group in range(index.warp_groups)}
    largest = 0
    for instruction in index.instructions:
        if not instruction.is_product:
            continue
        cells = [loads(argument)[0] for argument in instruction.args[:-7] if loads(argument)]
        largest = max(largest, len(cells))
        for group in scene.groups(instruction):
            registers[group] |= {tuple(int(i) for i in cell.indices) for cell in cells}
    if largest + WGMMA_OVERHEAD > entry:
        text = (
            f"a wgmma of {largest} accumulators needs {largest} + {WGMMA_OVERHEAD} = {largest + WGMMA_OVERHEAD} registers at "
            f"entry; {index.threads} threads start with {entry}, whatever setmaxnreg gives later"
        )
        yield Finding("registers-at-entry", "wgmma", text, {"accumulators": largest, "entry": entry})
    for group, held in registers.items():
        if len(held) + WGMMA_OVERHEAD > limits[group]:
            text = (
                f"{len(held)} accumulators + {WGMMA_OVERHEAD} = {len(held) + WGMMA_OVERHEAD} registers do not fit into "
                f"the {limits[group]} of the role: they would be spilled"
            )
            numbers = {"accumulators": len(held), "registers": limits[group]}
            yield Finding("accumulator-registers", f"warp group {group}", text, numbers)
