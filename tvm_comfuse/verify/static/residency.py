"""The grid against what runs at once, and the tags of exchanges through global memory."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.evaluate import RANK, constant
from tvm_comfuse.verify.static.index import KernelIndex, loads
from tvm_comfuse.verify.static.scene import Scene

POST, LEAVE = "comfuse_post_grid", "comfuse_leave"


def check(index: KernelIndex, scene: Scene, device: Device) -> Iterator[Finding]:
    """One wave, and a grid exchange that ends."""
    size = index.cluster_size
    clusters, resident = index.ctas // size, device.clusters(size)
    if clusters > resident:
        waves = -(-clusters // resident) if resident else 0
        text = (
            f"{clusters} clusters of {size} CTAs are launched and {device.name} runs {resident} at once: {waves} waves"
            + ("; the first waits for rows of CTAs that cannot start: it hangs" if index.takes("grid") else "")
        )
        numbers = {"clusters": clusters, "cluster_size": size, "resident": resident, "waves": waves}
        yield Finding("two-waves", "the grid", text, numbers)
    if index.takes("grid"):
        yield from _leave(index, scene)


def _leave(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    leaves = index.named(LEAVE)
    times = [int(t) for leave in leaves for t in scene.count(leave, (RANK,)).ravel()]
    if len(leaves) != 1 or set(times) != {1}:
        text = (
            f"one thread of each CTA must leave once, so that the next launch gets new tags; found {sum(times)} leaves in "
            f"{index.cluster_size} CTAs: its partials would be taken for this launch's"
        )
        yield Finding("grid-leave", "the end of the kernel", text, {"leaves": sum(times), "ctas": index.cluster_size})
        return
    (leave,) = leaves
    ctas = int(leave.args[1])
    if ctas != index.ctas:
        text = f"the last of {ctas} CTAs moves the tags on, but the grid has {index.ctas}"
        yield Finding("grid-leave", leave.shown, text, {"ctas": ctas, "grid": index.ctas})
    # the tags in use are those of the CTA with the most steps, at the kernel's own size
    scene, used = Scene(index, 0, scene.symbol), 0
    tags = int(scene.value(leave.args[2]).max())
    for post in index.named(POST):
        base = {load.source: constant(0) for load in loads(post.args[2])}
        used = max(used, int(scene.values(post.args[2], post, base).max(initial=0)))
    if used >= tags:
        text = f"this launch uses tags up to base + {used}, and the next one's base is {tags} further: they collide"
        yield Finding("grid-tags", leave.shown, text, {"used": used, "tags": tags})
