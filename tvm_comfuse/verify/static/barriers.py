"""mbarrier arrivals, bytes and waits, counted.

A barrier's phase completes when its arrivals are as many as it was initialised with and the bytes announced have landed.
Over the life of a CTA the arrivals must be whole phases, and in the steady state as many phases must complete as are waited
for: by every warp group that waits, or, where warp groups take turns, by all of them together.  A barrier that has no steady
state, as it is used in the first step only, is counted over the life of the CTA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP, Array, UnknownValueError
from tvm_comfuse.verify.static.index import Instruction, KernelIndex, accessed
from tvm_comfuse.verify.static.scene import Scene

INIT, ARRIVE, ARM, REMOTE, LOAD, WAIT = (
    "mbarrier_init",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "comfuse_arrive_at",
    "cp_async_bulk_tensor_g2s_cluster",
    "mbarrier_wait",
)
#: position of the barrier's address among the operands; of a load it comes behind address, map and two coordinates
_ADDRESS = {INIT: 0, ARRIVE: 0, ARM: 0, REMOTE: 0, LOAD: 4, WAIT: 0}
MULTICAST_MASK = 5


@dataclass(eq=False)
class Uses:
    """The instructions on one barrier array, by name, each with the index it uses."""

    buffer: Any
    sites: dict[str, list[tuple[Instruction, Any]]] = field(default_factory=dict)

    def of(self, *names: str) -> list[tuple[Instruction, Any]]:
        """Sites of some instructions."""
        return [site for name in names for site in self.sites.get(name, [])]

    @property
    def slots(self) -> int:
        """Barriers in the array."""
        return int(self.buffer.shape[0])


@dataclass(frozen=True)
class Tally:
    """What happens on a barrier (or on a ring of them, taken together) of each CTA of a cluster.

    arrivals, expected, landed  by rank
    waits                       by rank and warp group, of the thread that waits most
    """

    arrivals: Array
    expected: Array
    landed: Array
    waits: Array


def barrier_uses(index: KernelIndex) -> list[Uses]:
    """Every barrier array that is used, in order of appearance."""
    found: dict[Any, Uses] = {}
    for instruction in index.instructions:
        if instruction.name in _ADDRESS:
            buffer, at = accessed(instruction.args[_ADDRESS[instruction.name]])
            uses = found.setdefault(buffer, Uses(buffer))
            uses.sites.setdefault(instruction.name, []).append((instruction, at))
    return list(found.values())


def is_ring(scene: Scene, uses: Uses) -> bool:
    """Whether some access goes to the slot a cursor points to."""
    return any(index_value(scene, at) is None for sites in uses.sites.values() for _, at in sites)


def index_value(scene: Scene, at: Any) -> Array | None:
    """The index, None if a cursor decides it."""
    try:
        return scene.value(at)
    except UnknownValueError:
        return None


def tally(scene: Scene, uses: Uses, slot: int | None) -> Tally:
    """Counts for one barrier of the array, or for all (slot None)."""
    size = scene.index.cluster_size
    arrivals, expected, landed = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    waits = np.zeros((size, scene.index.warp_groups), np.int64)
    for instruction, at in uses.of(ARRIVE):
        arrivals += _by_rank(scene, instruction, scene.value(instruction.args[1]), *_at_slot(scene, at, slot))
    for instruction, at in uses.of(ARM):
        arrivals += _by_rank(scene, instruction, *_at_slot(scene, at, slot))
    for instruction, at in uses.of(ARM):
        expected += _by_rank(scene, instruction, scene.value(instruction.args[1]), *_at_slot(scene, at, slot))
    for instruction, at in uses.of(REMOTE):
        target = scene.value(instruction.args[1])
        for rank in range(size):
            arrivals[rank] += scene.count(instruction, (), target == rank, *_at_slot(scene, at, slot)).item()
    for instruction, at in uses.of(LOAD):
        landed += _landed(scene, instruction, _at_slot(scene, at, slot))
    for instruction, at in uses.of(WAIT):
        counted = scene.count(instruction, (RANK, WARP_GROUP, WARP, LANE), *_at_slot(scene, at, slot))
        waits += counted.max(axis=(WARP, LANE)).reshape(size, -1)
    return Tally(arrivals, expected, landed, waits)


def _at_slot(scene: Scene, at: Any, slot: int | None) -> list[Array]:
    value = index_value(scene, at) if slot is not None else None
    return [] if value is None else [value == slot]


def _by_rank(scene: Scene, instruction: Instruction, *extra: Array) -> Array:
    return scene.count(instruction, (RANK,), *extra).reshape(-1)


def _landed(scene: Scene, instruction: Instruction, extra: list[Array]) -> Array:
    tensor_map = scene.index.map_of(instruction.args[1])
    size, box = scene.index.cluster_size, tensor_map.box_bytes if tensor_map is not None else 0
    if len(instruction.args) <= MULTICAST_MASK:
        return _by_rank(scene, instruction, *extra) * box
    mask = scene.value(instruction.args[MULTICAST_MASK])
    return np.array([scene.count(instruction, (), (mask >> r) & 1, *extra).item() * box for r in range(size)])


def check(index: KernelIndex, small: Scene, large: Scene) -> Iterator[Finding]:
    """Every barrier of the kernel."""
    for uses in barrier_uses(index):
        ring = is_ring(small, uses)
        for slot in [None] if ring else range(uses.slots):
            yield from _check_barrier(uses, slot, small, large)


def _check_barrier(uses: Uses, slot: int | None, small: Scene, large: Scene) -> Iterator[Finding]:
    where = str(uses.buffer.name) + ("[slot]" if slot is None else f"[{slot}]")
    before, after = tally(small, uses, slot), tally(large, uses, slot)
    used = after.arrivals.any() or after.waits.any() or after.landed.any()
    if not used:
        return
    counts = list(_initial_counts(small, uses, slot))
    if len(set(counts)) != 1 or len(counts) != (uses.slots if slot is None else 1):
        numbers = {"initialised": len(counts), "barriers": uses.slots if slot is None else 1, "counts": counts}
        text = f"each barrier must be initialised once, all of a ring with one count; found {counts}"
        yield Finding("mbarrier-init", where, text, numbers)
        return
    yield from _bytes(where, after)
    yield from _phases(where, counts[0], before, after)


def _initial_counts(scene: Scene, uses: Uses, slot: int | None) -> Iterator[int]:
    for instruction, at in uses.of(INIT):
        for index in range(uses.slots):
            if slot in (None, index):
                times = scene.count(instruction, (RANK,), *_at_slot(scene, at, index)).ravel()
                yield from [int(scene.value(instruction.args[1]).item())] * int(times.max())


def _bytes(where: str, after: Tally) -> Iterator[Finding]:
    for rank in np.flatnonzero(after.expected != after.landed):
        expected, landed = int(after.expected[rank]), int(after.landed[rank])
        text = (
            f"the bytes announced must be the bytes that land; in CTA {rank} of the cluster {expected} are announced and "
            f"boxes of {landed} bytes land: "
            + ("the phase never completes" if expected > landed else "it completes early")
        )
        yield Finding("mbarrier-bytes", where, text, {"rank": int(rank), "expected": expected, "landed": landed})
        return


def _phases(where: str, count: int, before: Tally, after: Tally) -> Iterator[Finding]:
    for rank in range(len(after.arrivals)):
        more = int(after.arrivals[rank] - before.arrivals[rank])
        waits = (after.waits[rank] - before.waits[rank]).tolist()
        once = more == 0 and not any(waits)
        if once:
            more, waits = int(after.arrivals[rank]), after.waits[rank].tolist()
        numbers = {"rank": rank, "count": count, "arrivals": more, "waits": waits}
        head = f"in CTA {rank} of the cluster, {more} {'' if once else 'more '}arrivals on a barrier of {count}"
        if more % count or int(after.arrivals[rank]) % count:
            text = f"arrivals must make whole phases; {head} are {more / count:.3g} phases"
            yield Finding("mbarrier-arrivals", where, text, numbers)
            return
        phases = more // count
        if phases not in (max(waits), sum(waits)):
            text = (
                f"as many phases must complete as are waited for; {head} are {phases} phases, "
                f"and the warp groups wait {waits} times: "
                + ("a wait never ends" if phases < max(waits) else "the barrier runs ahead of its waiters")
            )
            yield Finding("mbarrier-phases", where, text, numbers)
            return
