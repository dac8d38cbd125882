"""A kernel that may start before the kernel in front of it in its stream has ended (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import LOAD
from tvm_comfuse.verify.static.evaluate import LANE, RANK, WARP, WARP_GROUP
from tvm_comfuse.verify.static.index import TAKE, Instruction, KernelIndex, loads
from tvm_comfuse.verify.static.residency import ENTER, LEAVE, POST, launch_tags
from tvm_comfuse.verify.static.scene import Scene
from tvm_comfuse.verify.static.shared_memory import STORE

#: the tag of such a launch, as TVM's runtime spells it
DEPENDENT = "tirx.use_programtic_dependent_launch"
DEPENDENCY, PREFETCH = "griddepcontrol", "cp_async_bulk_prefetch_tensor"
STAMP, ANCHOR = "comfuse_stamp", "comfuse_anchor"


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """All threads wait for the kernel in front, before anything is read or written that it may read or write."""
    if DEPENDENT not in launch_tags(index):
        return
    waits = [i for i in index.named(DEPENDENCY) if "wait" in i.words]
    executed = [scene.count(wait, (RANK, WARP_GROUP, WARP, LANE)).min() for wait in waits if not wait.loops]
    first = next((i for i in index.instructions if _is_global(i)), None)
    early = first is not None and not any(w.order < first.order and n for w, n in zip(waits, executed, strict=False))
    if early and first is not None:
        text = (
            "the kernel may start before the one in front of it has ended; every thread must execute griddepcontrol.wait "
            "before the first access to global memory"
        )
        yield Finding("dependent-wait", first.shown, text, {"waits": len(waits)})
    for store in index.stores:
        names = sorted({str(load.source.name) for load in loads(store.value) if str(load.source.scope()) == "global"})
        if names:
            text = (
                f"{', '.join(names)}: the compiler takes an operand for constant while the kernel runs and may move a plain "
                "load of it above the wait for the kernel in front; it must be a load instruction"
            )
            yield Finding("dependent-load", str(store.buffer.name), text, {"operands": names})
            return


def _is_global(instruction: Instruction) -> bool:
    if instruction.name.startswith(("ld", "st")):
        return "global" in instruction.words
    return instruction.name.startswith((LOAD, STORE, PREFETCH, POST, ENTER, LEAVE, STAMP, ANCHOR, f"{TAKE}grid"))
