"""Named barriers: ids, thread counts, and who syncs and arrives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP, Array
from tvm_comfuse.verify.static.index import Instruction, KernelIndex
from tvm_comfuse.verify.static.scene import Scene

SYNC, ARRIVE = "barrier_sync_count", "barrier_arrive"
#: a CTA has 16 barriers; 0 is that of __syncthreads
HIGHEST_ID = 15
WARP_THREADS = 32
_THREADS = (RANK, WARP_GROUP, WARP, LANE)


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Every id that some thread uses."""
    sites = index.named(SYNC, ARRIVE)
    ids = sorted({int(v) for site in sites for v in scene.values(site.args[0], site)})
    for number in ids:
        where = f"named barrier {number}"
        if not 1 <= number <= HIGHEST_ID:
            text = f"ids of named barriers are 1 to {HIGHEST_ID} (0 belongs to the CTA barrier); found {number}"
            yield Finding("named-barrier-id", where, text, {"id": number, "highest": HIGHEST_ID})
            continue
        counts = sorted(
            {int(v) for site in sites if _uses(scene, site, number) for v in scene.values(site.args[1], site)}
        )
        if len(counts) != 1 or counts[0] % WARP_THREADS or not 0 < counts[0] <= index.threads:
            text = (
                f"all instructions on a named barrier must name one thread count, a multiple of {WARP_THREADS} "
                f"of at most {index.threads}; found {counts}"
            )
            yield Finding("named-barrier-count", where, text, {"counts": counts, "threads": index.threads})
            continue
        yield from _participants(index, scene, number, counts[0])


def _uses(scene: Scene, site: Instruction, number: int) -> bool:
    return bool((scene.values(site.args[0], site) == number).any())


def _executions(scene: Scene, sites: list[Instruction], number: int) -> Array:
    counted = [scene.count(site, _THREADS, scene.value(site.args[0]) == number) for site in sites]
    return np.sum(counted, axis=0) if counted else np.zeros(1, np.int64)


def _participants(index: KernelIndex, scene: Scene, number: int, count: int) -> Iterator[Finding]:
    syncs = _executions(scene, index.named(SYNC), number)
    arrivals = _executions(scene, index.named(ARRIVE), number)
    # per CTA: each phase takes `count` threads, and a thread takes part once in a phase
    size = index.cluster_size
    took_part, phases = int(syncs.sum() + arrivals.sum()) / size, int(max(syncs.max(), arrivals.max()))
    both = bool(((syncs > 0) & (arrivals > 0)).any())
    threads = int((syncs > 0).sum() + (arrivals > 0).sum()) // size
    if took_part == count * phases and syncs.max() == phases and not both:
        return
    text = (
        ("a thread that arrives must not also wait there; " if both else "")
        + f"each phase needs {count} threads; {int((syncs > 0).sum()) // size} threads sync {int(syncs.max())} times and "
        f"{int((arrivals > 0).sum()) // size} arrive {int(arrivals.max())} times: {took_part:g} arrivals for "
        f"{phases} phases of {count}"
    )
    numbers = {"count": count, "threads": threads, "syncs": int(syncs.max()), "arrivals": int(arrivals.max())}
    yield Finding("named-barrier-threads", f"named barrier {number}", text, numbers)
