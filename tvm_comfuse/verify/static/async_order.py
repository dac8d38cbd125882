"""Order between asynchronous copies and products and the code that uses their memory, in the program of each warp group.

The program of a warp group is gone through with each loop body twice, so that the end of an iteration meets the start of
the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tvm_comfuse.verify.finding import Finding
from tvm_comfuse.verify.static.barriers import ARRIVE, INIT, LOAD, REMOTE, WAIT
from tvm_comfuse.verify.static.index import Instruction, KernelIndex, Loop, Store, accessed, loads
from tvm_comfuse.verify.static.named_barriers import SYNC
from tvm_comfuse.verify.static.scene import Scene
from tvm_comfuse.verify.static.shared_memory import STORE

Item = Instruction | Store


def program(index: KernelIndex, scene: Scene, group: int) -> list[Item]:
    """What a warp group executes, in order, each loop body twice."""
    items: list[Item] = sorted([*index.instructions, *index.stores], key=lambda item: item.order)
    return list(_twice([item for item in items if group in scene.groups(item)], 0))


def _twice(items: list[Item], depth: int) -> Iterator[Item]:
    at = 0
    while at < len(items):
        level = items[at].nest[depth] if len(items[at].nest) > depth else None
        end = at + 1
        while (
            level is not None and end < len(items) and len(items[end].nest) > depth and items[end].nest[depth] is level
        ):
            end += 1
        run = items[at:end]
        if level is None:
            yield run[0]
        else:
            # an unrolled loop is straight code: once is enough
            for _ in range(2 if isinstance(level, Loop) and not level.unrolled else 1):
                yield from _twice(run, depth + 1)
        at = end


@dataclass
class _State:
    """What is under way.  Accumulators are told apart by buffer: the products of one group are committed together."""

    issued: bool = False
    committed: int = 0
    written: bool = False
    fenced: bool = True
    pinned: bool = True
    dirty: bool = False
    unshared: bool = False
    bulk: bool = False
    bulk_committed: bool = False
    initialised: bool = False
    found: dict[str, Finding] = field(default_factory=dict)

    def report(self, code: str, where: str, text: str) -> None:
        """Keeps the first finding of each code."""
        self.found.setdefault(code, Finding(code, where, text))


def check(index: KernelIndex, scene: Scene) -> Iterator[Finding]:
    """Every warp group."""
    accumulators = {load.source for i in index.instructions if i.is_product for a in i.args[:-7] for load in loads(a)}
    # views of shared memory that TMA has no address of (vectors, mailboxes) are for threads alone
    tiles = {load.source for i in index.named(STORE, LOAD) for argument in i.args for load in loads(argument)}
    # what waits on the other barriers are threads that read shared memory themselves
    copiers = {group for instruction in index.named(STORE, LOAD) for group in scene.groups(instruction)}
    of_copies = {accessed(wait.args[0])[0] for wait in index.named(WAIT) if not copiers.isdisjoint(scene.groups(wait))}
    reported: set[str] = set()
    for group in range(index.warp_groups):
        state = _State()
        for item in program(index, scene, group):
            _step(state, item, accumulators, tiles, of_copies)
        for code, finding in state.found.items():
            if code not in reported:
                reported.add(code)
                yield finding


def _step(state: _State, item: Item, accumulators: set[Any], tiles: set[Any], of_copies: set[Any]) -> None:
    _reads(state, item, accumulators)
    if isinstance(item, Store):
        if item.buffer in accumulators:
            state.written = True
        if str(item.buffer.scope()).startswith("shared"):
            state.unshared = True
            state.dirty = state.dirty or item.buffer in tiles
        return
    _meetings(state, item)
    _products(state, item)
    _proxies(state, item, of_copies)
    _bulk(state, item)


def _reads(state: _State, item: Item, accumulators: set[Any]) -> None:
    waiting = state.issued or state.committed
    if (state.pinned and not waiting) or (isinstance(item, Instruction) and item.is_product):
        return
    values = [item.value] if isinstance(item, Store) else list(item.args)
    touched = [load.source for value in values for load in loads(value)]
    touched += [item.buffer] if isinstance(item, Store) else []
    if not any(buffer in accumulators for buffer in touched):
        return
    if not waiting and isinstance(item, Instruction) and item.name == "comfuse_pin":
        state.pinned = True
    elif not waiting:
        text = (
            "an accumulator is used behind the wait for its wgmma, but nothing keeps the compiler from reading the register "
            "before the wait: it must be pinned first"
        )
        state.report("accumulator-pin", getattr(item, "shown", "a store"), text)
    else:
        text = (
            f"an accumulator is used while {state.committed} committed groups of wgmma may still write it; "
            "wait_group 0 must come first"
        )
        state.report("accumulator-early", getattr(item, "shown", "a store"), text)


def _meetings(state: _State, item: Instruction) -> None:
    """What one thread stored to shared memory another one loads only behind a barrier of both."""
    if item.name in ("cta_sync", SYNC):
        state.unshared = False
    elif state.unshared and item.name in ("ld", "ld_vec") and any(word.startswith("shared") for word in item.words):
        text = "shared memory is read that other threads wrote, and no barrier of these threads stands in between"
        state.report("shared-sync", item.shown, text)


def _products(state: _State, item: Instruction) -> None:
    if item.name == "wgmma_fence":
        state.fenced, state.written = True, False
    elif item.is_product:
        if not state.fenced or state.written:
            state.report("wgmma-fence", item.shown, "registers change between wgmma.fence and wgmma")
        state.issued = True
    elif item.name == "wgmma_commit_group":
        state.committed += int(state.issued)
        state.issued, state.fenced = False, False
    elif item.name == "wgmma_wait_group":
        if state.issued:
            state.report("wgmma-commit", item.shown, "wgmmas before it belong to no group: commit_group is missing")
        state.committed = min(state.committed, int(item.args[0]))
        if state.committed == 0:
            state.pinned = False


def _proxies(state: _State, item: Instruction, of_copies: set[Any]) -> None:
    if item.name.startswith("st") and any(word.startswith("shared") for word in item.words):
        state.dirty = True
    elif item.name == INIT:
        state.initialised = True
    elif item.name == "fence_mbarrier_init":
        state.initialised = False
    elif item.name == "fence_proxy" and "async" in item.words:
        state.dirty = False
    elif item.name == "cta_sync":
        if state.initialised:
            text = (
                "barriers were initialised, but no fence.mbarrier_init makes that visible to the other CTAs and to TMA"
            )
            state.report("init-fence", item.shown, text)
        if state.dirty:
            text = "shared memory was written, but no fence.proxy.async orders that before copies by TMA"
            state.report("proxy-fence", item.shown, text)
    elif item.name in (ARRIVE, REMOTE) and accessed(item.args[0])[0] not in of_copies:
        state.dirty = False
    elif item.name in (ARRIVE, REMOTE) and state.dirty:
        name = accessed(item.args[0])[0].name
        text = (
            f"shared memory was written, and {name} says so, but no fence.proxy.async orders that before copies by TMA"
        )
        state.report("proxy-fence", item.shown, text)


def _bulk(state: _State, item: Instruction) -> None:
    if item.name == STORE:
        state.bulk, state.bulk_committed = True, False
    elif item.name == "cp_async_bulk_commit_group":
        state.bulk_committed = True
    elif item.name == "cp_async_bulk_wait_group":
        if state.bulk and not state.bulk_committed:
            state.report("bulk-commit", item.shown, "stores before it belong to no group: commit_group is missing")
        if int(item.args[0]) == 0:
            state.bulk = False
    elif item.name in (ARRIVE, REMOTE) and state.bulk:
        name = accessed(item.args[0])[0].name
        text = f"{name} gives the tile away while TMA may still read it; wait_group.read 0 must come first"
        state.report("bulk-early", item.shown, text)
