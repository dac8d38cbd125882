"""Faults of mbarriers: counts, bytes, waits, arrivals, parities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.verify.faults.changes import Match, argument, moved, number, remove, replace
from tvm_comfuse.verify.faults.registry import Apply, add
from tvm_comfuse.verify.rewrite import Stmt, barrier_of, contains, is_on, map_expr, map_exprs, name_of, rewrite

ARRIVALS = ("mbarrier_arrive", "comfuse_arrive_at")


def on(barrier: str, *names: str) -> Match:
    """Matches some instructions on a barrier array."""
    return lambda node: is_on(node, barrier, *names)


def _counts() -> None:
    changes: list[tuple[str, str, Callable[[int], int]]] = [
        ("one-more", "one arrival more than come", lambda count: count + 1),
        ("twice", "twice the arrivals that come", lambda count: 2 * count),
    ]
    for barrier in ("full", "empty", "w_full", "tile_full", "tile_ready", "given", "taken"):
        for suffix, text, change in changes:
            apply = _if_awaited(barrier, argument(on(barrier, "mbarrier_init"), 1, number(change)))
            add(f"count-{barrier}-{suffix}", "static", f"barriers {barrier} are initialised for {text}", apply)
    quarter = number(lambda count: count // 4)
    apply = _if_awaited("tile_ready", argument(on("tile_ready", "mbarrier_init"), 1, quarter))
    add("count-tile_ready-warp", "static", "tile_ready counts a warp in place of a warp group", apply)
    add(
        "init-slot-missing",
        "static",
        "the first slot's full barrier is not initialised",
        remove(on("full", "mbarrier_init"), 0),
    )


def _if_awaited(barrier: str, apply: Apply) -> Apply:
    """A change of a barrier that nobody waits for would be no mistake."""
    return lambda kernel: apply(kernel) if contains(kernel.body, on(barrier, "mbarrier_wait")) else None


def _bytes() -> None:
    for barrier in ("full", "w_full", "tile_full"):
        for suffix, change in (("less", lambda size: size - 128), ("twice", lambda size: 2 * size)):
            apply = argument(on(barrier, "mbarrier_arrive_expect_tx"), 1, number(change))
            add(f"bytes-{barrier}-{suffix}", "static", f"{barrier} announces other bytes than land ({suffix})", apply)


def _missing() -> None:
    for barrier, which, text in (
        ("empty", 0, "the producer fills a slot without waiting for it to be free"),
        ("full", 0, "products read a slot without waiting for it to be full"),
        ("w_full", 0, "products read a tile of a W that stays without waiting for it"),
        ("tile_full", 0, "stages read an operand's tile without waiting for it"),
        ("tile_ready", 0, "a result is stored before its warp group has written it"),
        ("tile_empty", 0, "a staging tile is filled without waiting for it to be free"),
        ("given", 0, "the memory warp group reads a tile before it is handed over"),
        ("taken", 0, "a tile is handed over where the memory warp group may still read the one before"),
    ):
        add(f"wait-{barrier}-missing", "static", text, remove(on(barrier, "mbarrier_wait"), which))
    for barrier, which, name, text in (
        ("empty", 0, "loop", "slots of the main loop are not given back"),
        ("empty", 1, "last", "the last slot of a step is not given back"),
        ("tile_ready", 0, "ready", "nobody says that a result is written"),
        ("tile_empty", 0, "tile", "a staging tile is not given back"),
        ("given", 0, "given", "nobody says that a tile is handed over"),
        ("taken", 0, "taken", "nobody says that a tile was taken"),
    ):
        add(f"arrive-{barrier}-missing-{name}", "static", text, remove(on(barrier, *ARRIVALS), which))


def _parities() -> None:
    for barrier, text in (
        ("w_full", "a tile of a W that stays"),
        ("tile_full", "an operand's tile"),
        ("tile_ready", "a written result"),
        ("tile_empty", "a free staging tile"),
        ("given", "a tile that is handed over"),
        ("taken", "a tile that was taken"),
    ):
        apply = argument(on(barrier, "mbarrier_wait"), 1, lambda old: 1 - old, 0)
        add(f"parity-{barrier}", "interpreter", f"the wait for {text} names the other parity", apply)
    add(
        "parity-fill-start",
        "interpreter",
        "the producer starts with the parity of a phase that nobody completes",
        _start("fill_parity"),
    )
    add(
        "parity-read-start",
        "interpreter",
        "the products start with the parity that passes on a fresh barrier",
        _start("read_parity"),
    )
    add(
        "parity-fill-stuck",
        "interpreter",
        "the producer's parity does not change when the ring wraps",
        _without_store("fill_parity"),
    )
    add(
        "parity-read-stuck",
        "interpreter",
        "the products' parity does not change when the ring wraps",
        _without_store("read_parity"),
    )


def _start(cell: str) -> Apply:
    """With the other start value of a cursor's parity."""
    return replace(
        lambda node: _stores(node, cell) and isinstance(node.value, tirx.IntImm),
        lambda node: [tirx.BufferStore(node.buffer, tirx.IntImm("int32", 1 - int(node.value)), list(node.indices))],
    )


def _without_store(cell: str) -> Apply:
    return remove(lambda node: _stores(node, cell) and not isinstance(node.value, tirx.IntImm))


def _stores(node: Stmt, cell: str) -> bool:
    return isinstance(node, tirx.BufferStore) and str(node.buffer.name) == cell


def _slots() -> None:
    add(
        "release-current",
        "interpreter",
        "the slot under way is given back in place of the one before",
        _release_current,
    )
    add(
        "release-early",
        "interpreter",
        "a slot is given back before its products are complete",
        moved(lambda node: name_of(node) == "wgmma_wait_group", lambda node: contains(node, _releases)),
    )
    add("tile-released-early", "interpreter", "an operand's tile is given back before it is read", _release_tile_early)
    add(
        "wait-after-products",
        "interpreter",
        "the wait for a slot comes behind its products",
        moved(on("full", "mbarrier_wait"), _commits),
    )
    add("wrap-late", "interpreter", "a cursor goes one slot past the end of the ring", _wrap_late)


def _releases(node: Stmt) -> bool:
    return is_on(node, "empty", *ARRIVALS)


def _release_current(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Any) -> Any:
        return node.false_value.a if isinstance(node, tirx.Select) and isinstance(node.false_value, tirx.Sub) else None

    return map_exprs(kernel, change, _releases)


def _release_tile_early(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    arrivals: list[Stmt] = []

    def collect(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        # the producer's own arrival follows a store, so it is the consumer's that stands behind a wait for tile_full
        if _releases_tile(node) and any(
            contains(outer, _waits_tile) for outer in around if isinstance(outer, tirx.For)
        ):
            arrivals.append(node)
            return []
        return None

    def put(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        return [node, arrivals[0]] if _waits_tile(node) else None

    without = rewrite(kernel, collect)
    return rewrite(without, put) if without is not None and len(arrivals) == 1 else None


def _releases_tile(node: Stmt) -> bool:
    return is_on(node, "tile_empty", "mbarrier_arrive")


def _waits_tile(node: Stmt) -> bool:
    return is_on(node, "tile_full", "mbarrier_wait")


def _wrap_late(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if isinstance(node, tirx.IfThenElse) and isinstance(node.condition, tirx.GE) and barrier_of(node) == "":
            at = node.condition
            if isinstance(at.b, tirx.IntImm) and "slot" in str(getattr(getattr(at.a, "source", None), "name", "")):
                return [tirx.IfThenElse(at.a > at.b, node.then_case, node.else_case)]
        return None

    return rewrite(kernel, visit)


def _resident() -> None:
    first = argument(on("w_full", "mbarrier_wait"), 0, _first_of)
    add("resident-wait-first", "static", "every wait for a tile of a W that stays is for the first one", first)
    add("resident-load-again", "static", "a W that stays is loaded in every step", _load_again)
    add(
        "resident-wait-late",
        "interpreter",
        "the wait for a tile of a W that stays comes behind its products",
        moved(lambda node: contains(node, on("w_full", "mbarrier_wait")), _commits),
    )


def _first_of(barrier: Any) -> Any:
    def change(node: Any) -> Any:
        return tirx.BufferLoad(node.source, [0]) if isinstance(node, tvm.ir.TensorLoad) else None

    return map_expr(barrier, change)


def _commits(node: Stmt) -> bool:
    return name_of(node) == "wgmma_commit_group"


def _load_again(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        arms = isinstance(node, tirx.IfThenElse) and isinstance(node.condition, tirx.EQ) and around
        if arms and isinstance(around[-1], tirx.SeqStmt) and contains(node, on("w_full", "mbarrier_arrive_expect_tx")):
            steps = [outer for outer in around if isinstance(outer, tirx.For)]
            if steps and node.condition.a.same_as(steps[0].loop_var):
                return [node.then_case]
        return None

    return rewrite(kernel, visit)


for _make in (_counts, _bytes, _missing, _parities, _slots, _resident):
    _make()
