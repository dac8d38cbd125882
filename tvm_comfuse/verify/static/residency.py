"""The grid against what runs at once; how exchanges through global memory begin, end and are launched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvm_comfuse.schedules.device import Device
from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import ARRIVE, WAIT
from tvm_comfuse.verify.static.evaluate import RANK, THREAD_AXES, along, constant, evaluate
from tvm_comfuse.verify.static.index import Instruction, KernelIndex, accessed, loads
from tvm_comfuse.verify.static.scene import Scene

POST, ENTER, LEAVE = "comfuse_post_grid", "comfuse_enter", "comfuse_leave"
#: attribute with the tags of a launch, and the tag of a cooperative one (names of TVM's runtime)
LAUNCH_PARAMS, COOPERATIVE = "tirx.kernel_launch_params", "tirx.use_cooperative_launch"


def check(index: KernelIndex, scene: Scene, device: Device) -> Iterator[Finding]:
    """One wave of kernels whose CTAs each fill an SM, and a grid exchange that ends."""
    size = index.cluster_size
    clusters, resident = index.ctas // size, device.clusters(size)
    # a kernel without products, that of a rows function, has small CTAs, of which none waits for another
    fills = bool(index.takes("grid")) or any(instruction.is_product for instruction in index.instructions)
    if clusters > resident and fills:
        waves = -(-clusters // resident) if resident else 0
        text = (
            f"{clusters} clusters of {size} CTAs are launched and {device.name} runs {resident} at once: {waves} waves"
            + ("; the first waits for rows of CTAs that cannot start: it hangs" if index.takes("grid") else "")
        )
        numbers = {"clusters": clusters, "cluster_size": size, "resident": resident, "waves": waves}
        yield Finding("two-waves", "the grid", text, numbers)
    if index.takes("grid"):
        yield from _launch(index)
        yield from _enter(index, scene)
        yield from _leave(index, scene)


def launch_tags(index: KernelIndex) -> list[str]:
    """The tags of a kernel's launch."""
    return [str(tag) for tag in (index.kernel.attrs or {}).get(LAUNCH_PARAMS, [])]


def _launch(index: KernelIndex) -> Iterator[Finding]:
    tags = launch_tags(index)
    if COOPERATIVE not in tags:
        text = (
            "CTAs wait for each other across the grid: only a cooperative launch guarantees that all of them run, and gives "
            f"the launch a name that its CTAs share; its tags are {tags}"
        )
        yield Finding("cooperative-launch", "the launch", text, {"needed": COOPERATIVE, "tags": tags})


def _enter(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    enters = index.named(ENTER)
    times = [int(t) for enter in enters for t in scene.count(enter, (RANK,)).ravel()]
    if len(enters) != 1 or set(times) != {1}:
        text = (
            "one thread of each CTA must wait once until its launch owns the mailboxes; "
            f"found {sum(times)} in {index.cluster_size} CTAs"
        )
        yield Finding("grid-enter", "mailboxes", text, {"enters": sum(times), "ctas": index.cluster_size})
        return
    (enter,) = enters
    # clusters vary along the axis of the outermost loop, of which there is none around it
    clusters = along(THREAD_AXES, np.arange(index.ctas // index.cluster_size))
    takes = evaluate(enter.args[1], {**scene.env, index.cta_variable: clusters}, scene.cells).astype(bool)
    taking = [tuple(int(at[axis]) for axis in (THREAD_AXES, RANK)) for at in np.argwhere(takes)]
    last = (index.ctas // index.cluster_size - 1, index.cluster_size - 1)
    if taking != [last]:
        text = (
            f"the last CTA, {last} by cluster and rank, takes the mailboxes for the launch, as the others run by then; found "
            f"{taking[:4]}: another one may take them while CTAs of this launch find no SM"
        )
        yield Finding("grid-enter", enter.shown, text, {"taking": taking[:4], "last": last})
    yield from _entered(index, scene, enter)


def _entered(index: KernelIndex, scene: Scene, enter: Instruction) -> Iterator[Finding]:
    """Whoever uses the mailboxes waits for a barrier at which the thread that entered arrives."""
    arrives = [i for i in index.named(ARRIVE) if i.order > enter.order and i.nest == enter.nest]
    barriers = {accessed(i.args[0])[0] for i in arrives}
    waits = [i for i in index.named(WAIT) if accessed(i.args[0])[0] in barriers]
    for user in sorted([*index.named(POST), *index.takes("grid")], key=lambda i: i.order):
        covered = {group for wait in waits if _comes_before(scene, wait, user) for group in scene.groups(wait)}
        missing = [group for group in scene.groups(user) if group not in covered]
        if missing:
            text = f"warp groups {missing} use the mailboxes before anything tells them that their launch owns these"
            yield Finding("grid-enter", user.shown, text, {"warp_groups": missing})
            return


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


def _comes_before(scene: Scene, wait: Instruction, user: Instruction) -> bool:
    """In program order; or in the first round of a loop around both, where the user does not run in that round."""
    if wait.order < user.order:
        return True
    shared = [loop for loop in wait.loops if loop in user.loops]
    return any(not scene.count(user, (), scene.value(loop.variable) == 0).any() for loop in shared)
