"""Faults of order: fences, commits and waits of asynchronous work, named barriers, divergence, registers."""

from __future__ import annotations

from tvm import tirx

from tvm_comfuse.verify.faults.changes import Match, argument, number, remove
from tvm_comfuse.verify.faults.registry import add
from tvm_comfuse.verify.rewrite import Stmt, map_exprs, name_of, rewrite, with_body

_ORDER = ("barrier_sync_count", "barrier_arrive")


def named(*names: str) -> Match:
    """Matches instructions by name."""
    return lambda node: name_of(node) in names


def _is_turn(*names: str) -> Match:
    """Matches the named barriers of turns, whose number depends on the warp group; that of the vectors is a constant."""
    return lambda node: name_of(node) in names and not isinstance(node.value.args[0], tirx.IntImm)


def _asynchronous() -> None:
    add("wgmma-commit-missing", "static", "products are not committed", remove(named("wgmma_commit_group")))
    add(
        "wgmma-fence-missing",
        "static",
        "no wgmma.fence orders register writes before products",
        remove(named("wgmma_fence")),
    )
    add(
        "wgmma-wait-missing",
        "static",
        "accumulators are read without waiting for the products",
        remove(named("wgmma_wait_group"), 1),
    )
    add(
        "wgmma-wait-one",
        "static",
        "accumulators are read while the last group of products is under way",
        argument(named("wgmma_wait_group"), 0, number(lambda count: 1), 1),
    )
    add(
        "wgmma-wait-loose",
        "interpreter",
        "a slot is given back while its group of products may still read it",
        argument(named("wgmma_wait_group"), 0, number(lambda count: 2), 0),
    )
    add(
        "pin-missing",
        "static",
        "the compiler may read accumulators before the wait for their products",
        remove(lambda node: name_of(node) == "comfuse_pin" and _indexed(node)),
    )
    add(
        "bulk-commit-missing",
        "static",
        "stores of a result are not committed",
        remove(named("cp_async_bulk_commit_group")),
    )
    add(
        "bulk-wait-missing",
        "static",
        "a tile is given back while TMA reads it",
        remove(named("cp_async_bulk_wait_group")),
    )
    add(
        "proxy-fence-missing",
        "static",
        "no proxy fence between a result's stores and TMA",
        remove(named("fence_proxy"), 1),
    )
    add(
        "init-fence-missing",
        "static",
        "no fence behind the initialisation of barriers",
        remove(named("fence_mbarrier_init")),
    )
    add("prologue-sync-missing", "static", "no CTA barrier behind the prologue", remove(named("cta_sync"), 0))
    add(
        "vectors-sync-missing",
        "static",
        "a warp group reads vectors that another one may not have written yet",
        remove(lambda node: named("barrier_sync_count")(node) and not _is_turn("barrier_sync_count")(node)),
    )


def _indexed(node: Stmt) -> bool:
    """Whether it is the pin of an array's element in a loop, as that of the accumulators."""
    return not isinstance(node.value.args[1].indices[0], tirx.IntImm)


def _turns() -> None:
    add(
        "order-missing",
        "static",
        "warp groups take turns on a ring, and nothing orders the turns",
        remove(_is_turn(*_ORDER)),
    )
    add("order-arrive-missing", "static", "a warp group never gives the turn", remove(_is_turn("barrier_arrive")))
    add(
        "order-sync-missing",
        "static",
        "a warp group does not wait for its turn",
        remove(_is_turn("barrier_sync_count")),
    )
    add(
        "order-count-half",
        "static",
        "the turn's barrier counts one warp group",
        argument(_is_turn(*_ORDER), 1, number(lambda count: count // 2)),
    )
    add(
        "order-count-odd",
        "static",
        "the turn's barrier counts threads that are no whole warps",
        argument(_is_turn(*_ORDER), 1, number(lambda count: count - 1)),
    )
    add(
        "order-id-swapped",
        "static",
        "a warp group waits on the barrier it gives turns with",
        argument(_is_turn("barrier_sync_count"), 0, lambda old: 3 - old),
    )
    add(
        "order-reversed",
        "static",
        "of three warp groups or more each gives the turn to the one in front of it",
        lambda kernel: map_exprs(kernel, _one_back, _is_turn("barrier_arrive")),
    )
    add(
        "order-id-zero",
        "static",
        "the turn's barrier is that of the CTA",
        argument(_is_turn(*_ORDER), 0, lambda old: old - 1),
    )
    add(
        "order-id-high",
        "static",
        "a barrier number that does not exist",
        argument(_is_turn(*_ORDER), 0, lambda old: old + 15),
    )


def _one_back(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """(g + 1) % G with g - 1 in the place of g + 1, which is another number from G = 3 on."""
    if isinstance(node, tirx.FloorMod) and int(node.b) > 2:
        return tirx.FloorMod(node.a + node.b - 2, node.b)
    return None


def _convergence() -> None:
    add("sync-in-branch", "static", "one lane alone comes to a warp barrier", _sync_in_branch)
    add("setmaxnreg-in-branch", "static", "one warp alone changes its registers", _one_warp_setmaxnreg)
    add("matrix-in-branch", "static", "lanes that are behind M do not take part in an .aligned store", _one_lane_store)


def _sync_in_branch(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if not isinstance(node, tirx.SeqStmt):
            return None
        children = list(node.seq)
        at = next((n for n, child in enumerate(children) if name_of(child) == "warp_sync"), None)
        if at is None or not isinstance(children[at - 1], tirx.IfThenElse):
            return None
        branch = children[at - 1]
        inside = tirx.IfThenElse(branch.condition, tirx.SeqStmt([branch.then_case, children[at]]), branch.else_case)
        return [tirx.SeqStmt([*children[: at - 1], inside, *children[at + 1 :]])]

    return rewrite(kernel, visit)


def _one_warp_setmaxnreg(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    return _under(kernel, "warp", named("setmaxnreg"))


def _one_lane_store(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    return _under(kernel, "lane", lambda node: name_of(node).startswith("stmatrix"))


def _under(kernel: tirx.PrimFunc, scope: str, match: Match) -> tirx.PrimFunc | None:
    """With the matching statements only where the variable of a scope is 0."""
    variables: list[object] = []

    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if type(node).__name__ == "ScopeIdDefStmt":
            variables.extend(v for v in getattr(node, "def").def_ids if v.name == scope)
        if match(node):
            return [tirx.IfThenElse(tirx.EQ(variables[0], tirx.IntImm("int32", 0)), node, None)]
        return None

    return rewrite(kernel, visit)


def _registers() -> None:
    add(
        "registers-too-many",
        "static",
        "the roles together take more registers than an SM has",
        argument(lambda node: name_of(node) == "setmaxnreg" and _value(node) > 100, 0, number(lambda value: 240)),
    )
    add(
        "registers-odd",
        "static",
        "a number of registers that is no multiple of 8",
        argument(named("setmaxnreg"), 0, number(lambda value: value + 1), 0),
    )
    add(
        "registers-accumulators",
        "static",
        "the role has too few registers for its accumulators",
        argument(lambda node: name_of(node) == "setmaxnreg" and _value(node) > 100, 0, number(lambda value: 40)),
    )
    add("loop-not-unrolled", "static", "accumulators are indexed by a loop that is not unrolled", _serial)


def _value(node: Stmt) -> int:
    return int(node.value.args[0])


def _serial(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def visit(node: Stmt, around: tuple[Stmt, ...]) -> list[Stmt] | None:
        if isinstance(node, tirx.For) and int(node.kind) == int(tirx.ForKind.UNROLLED):
            return [with_body(node, node.body, tirx.ForKind.SERIAL)]
        return None

    return rewrite(kernel, visit)


for _make in (_asynchronous, _turns, _convergence, _registers):
    _make()
