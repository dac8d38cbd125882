"""What CTAs of a cluster do to each other: only between two cluster barriers, and only to CTAs that exist."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import INIT, LOAD, MULTICAST_MASK, REMOTE, WAIT
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP
from tvm_comfuse.verify.static.index import Instruction, KernelIndex
from tvm_comfuse.verify.static.scene import Scene

POST = "comfuse_post_cluster"
SYNC_ARRIVE, SYNC_WAIT = "barrier_cluster_arrive", "barrier_cluster_wait"
_THREADS = (RANK, WARP_GROUP, WARP, LANE)


def remote(index: KernelIndex) -> list[Instruction]:
    """Instructions that write to, or signal, other CTAs of the cluster."""
    multicast = [i for i in index.named(LOAD) if len(i.args) > MULTICAST_MASK]
    return sorted([*multicast, *index.named(REMOTE, POST)], key=lambda instruction: instruction.order)


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Barriers around the traffic, ranks inside the cluster, and the CTA barrier behind the prologue."""
    yield from _prologue(index)
    far = remote(index) if index.cluster_size > 1 else []
    if far:
        yield from _bracket(index, far[0], far[-1])
    yield from _ranks(index, scene)
    for name, order in ((SYNC_ARRIVE, "release"), (SYNC_WAIT, "acquire")):
        weak = [i for i in index.named(name) if order not in i.words]
        if weak:
            text = f"what a CTA wrote before the cluster barrier must be seen behind it: the {name} needs .{order}"
            yield Finding("cluster-order", weak[0].shown, text, {"needed": order})
        times = sum((scene.count(i, _THREADS) for i in index.named(name)), np.zeros(1, np.int64))
        other = sum((scene.count(i, _THREADS) for i in index.named(SYNC_ARRIVE, SYNC_WAIT)), np.zeros(1, np.int64))
        if (2 * times != other).any():
            text = (
                f"each thread must arrive at the cluster barrier as often as it waits; {name} {int(times.max())} times"
            )
            yield Finding("cluster-barrier", name, text, {"times": int(times.max()), "both": int(other.max())})
            return


def _prologue(index: KernelIndex) -> Iterator[Finding]:
    last, first = index.named(INIT)[-1:], index.named(WAIT)[:1]
    syncs = [i.order for i in index.named("cta_sync")]
    if last and first and not any(last[0].order < order < first[0].order for order in syncs):
        text = "barriers are initialised by one thread and used by others; a CTA barrier must stand in between"
        yield Finding("init-sync", first[0].shown, text)


def _bracket(index: KernelIndex, first: Instruction, last: Instruction) -> Iterator[Finding]:
    inits = [i.order for i in index.named(INIT)]
    start = max(inits, default=0)
    if not _synced(index, start, first.order):
        text = "a CTA may signal or write to another one only when that has initialised its barriers and mailboxes"
        yield Finding("cluster-start", first.shown, text, {"needed": "barrier.cluster arrive and wait before it"})
    if not _synced(index, last.order, 1 << 60):
        text = "a CTA may not leave while others can still signal it or write to its shared memory"
        yield Finding("cluster-end", last.shown, text, {"needed": "barrier.cluster arrive and wait behind it"})


def _synced(index: KernelIndex, after: int, before: int) -> bool:
    arrives = [i.order for i in index.named(SYNC_ARRIVE) if after < i.order < before and not i.loops]
    waits = [i.order for i in index.named(SYNC_WAIT) if after < i.order < before and not i.loops]
    return bool(arrives and waits and arrives[0] < waits[-1])


def _ranks(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    size = index.cluster_size
    for instruction in index.named(REMOTE, POST):
        values = scene.values(instruction.args[1], instruction)
        wrong = values[(values < 0) | (values >= size)]
        if wrong.size:
            text = f"ranks of a cluster of {size} are 0 to {size - 1}; found {int(wrong[0])}"
            yield Finding("cluster-rank", instruction.shown, text, {"rank": int(wrong[0]), "size": size})
    for instruction in index.named(LOAD):
        if len(instruction.args) > MULTICAST_MASK:
            masks = scene.values(instruction.args[MULTICAST_MASK], instruction)
            wrong = masks[(masks <= 0) | (masks >= 1 << size)]
            if wrong.size:
                text = f"a multicast mask has bits of the {size} CTAs of the cluster only; found {int(wrong[0]):#x}"
                yield Finding("multicast-mask", instruction.shown, text, {"mask": int(wrong[0]), "size": size})
