"""Warp groups that take turns on one ring need an order between their waits.

A wait names the parity of a phase, so it tells only the next phase from the one before.  A warp group that skips the
slots of the others' steps would wait for a phase further ahead, and a phase long past satisfies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import WAIT, Uses, barrier_uses, is_ring, tally
from tvm_comfuse.verify.static.index import Instruction, KernelIndex
from tvm_comfuse.verify.static.named_barriers import ARRIVE, SYNC
from tvm_comfuse.verify.static.scene import Scene


def check(index: KernelIndex, small: Scene, large: Scene) -> Iterator[Finding]:
    """Every ring on which more than one warp group waits for a part of the phases."""
    for uses in barrier_uses(index):
        if not is_ring(small, uses):
            continue
        waits = (tally(large, uses, None).waits - tally(small, uses, None).waits)[0]
        waiting = [group for group, count in enumerate(waits) if count]
        arrived = int((tally(large, uses, None).arrivals - tally(small, uses, None).arrivals)[0])
        if len(waiting) < 2 or max(waits) == arrived:
            continue
        yield from _ordered(index, small, uses, waiting)


def _ordered(index: KernelIndex, scene: Scene, uses: Uses, waiting: list[int]) -> Iterator[Finding]:
    for wait, _ in uses.of(WAIT):
        outer = wait.loops[0] if wait.loops else None
        before = _groups(scene, [i for i in index.named(SYNC) if i.order < wait.order and outer in i.loops])
        after = _groups(scene, [i for i in index.named(ARRIVE) if i.order > wait.order and outer in i.loops])
        missing = [group for group in waiting if group not in before or group not in after]
        if missing:
            slots = int(scene.trips(wait.loops[-1]).max()) if wait.loops else 1
            phases = -(-slots // uses.slots)
            text = (
                f"warp groups {waiting} take turns on a ring of {uses.slots} slots, and nothing orders their turns: while one "
                f"works on its {slots} slots the next waits {phases} {'phase' if phases == 1 else 'phases'} further ahead "
                f"than the next one, and the parity of a phase that is over lets it through"
            )
            numbers = {"slots": uses.slots, "slots_of_a_turn": slots, "ahead": phases, "warp_groups": missing}
            yield Finding("phase-aliasing", f"{uses.buffer.name}[slot]", text, numbers)
            return


def _groups(scene: Scene, instructions: list[Instruction]) -> set[int]:
    return {group for instruction in instructions for group in scene.groups(instruction)}
