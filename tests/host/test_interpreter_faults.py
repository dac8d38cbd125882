"""The interpreter finds what is wrong with kernels that were broken by hand, and names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from interpreted_kernels import Case, case

from tvm_comfuse.verify.interpreter.calls import pointee, split
from tvm_comfuse.verify.interpreter.tree import Expr, Stmt, show

Test = Callable[[Stmt], bool]
#: orders that a fault is looked for in
ORDERS: list[tuple[int, str | None]] = [(0, None), (1, "wg0.w0"), (2, "wg1"), (3, "cta0")]


def blocks(stmts: list[Stmt]) -> Iterator[list[Stmt]]:
    """Every list of statements, outer ones first."""
    yield stmts
    for stmt in stmts:
        for inner in (stmt.body, stmt.other):
            if inner:
                yield from blocks(inner)


def expressions(stmts: list[Stmt]) -> Iterator[Expr]:
    """Every expression, outer ones first."""

    def go(expr: Expr) -> Iterator[Expr]:
        yield expr
        for arg in expr.args:
            yield from go(arg)

    for block in blocks(stmts):
        for stmt in block:
            for arg in stmt.args:
                yield from go(arg)


def call(name: str, on: str = "", with_: str = "") -> Test:
    """Statements that are a call whose name ends with `name`, its first operand on the array `on`, a modifier `with_`."""

    def matches(stmt: Stmt) -> bool:
        if stmt.kind != "eval" or not str(stmt.args[0].value).endswith(name):
            return False
        operands, modifiers = split(stmt.args[0])
        return (not on or show(pointee(operands[0])).startswith(f"{on}[")) and (not with_ or with_ in modifiers)

    return matches


def remove(given: Case, test: Test, count: int | None = None, skip: int = 0) -> None:
    """Drops statements (the first `count` after `skip`)."""
    dropped = 0
    for block in list(blocks(given.program.kernel.device)):
        for stmt in list(block):
            if test(stmt):
                dropped += 1
                if dropped > skip and (count is None or dropped <= skip + count):
                    block.remove(stmt)
    assert dropped > skip


def change(given: Case, test: Test, operand: int, new: Callable[[Expr], Expr]) -> None:
    """Replaces an operand of calls."""
    changed = 0
    for block in blocks(given.program.kernel.device):
        for stmt in block:
            if test(stmt):
                arguments = stmt.args[0].args
                arguments[operand] = new(arguments[operand])
                changed += 1
    assert changed


def constant(value: int, dtype: str = "uint32") -> Callable[[Expr], Expr]:
    return lambda _: Expr("const", dtype, value=value)


def plus(value: int) -> Callable[[Expr], Expr]:
    return lambda old: Expr("+", old.dtype, [old, Expr("const", old.dtype, value=value)], "Add")


def flipped(old: Expr) -> Expr:
    return Expr("^", "int32", [old, Expr("const", "int32", value=1)], "Bitwise")


def codes(given: Case, wanted: set[str]) -> set[str]:
    """Codes of all findings, order by order until a wanted one is found."""
    found: set[str] = set()
    for seed, slow in ORDERS:
        if found & wanted:
            break
        result = given.program.run(given.arrays, seed=seed, slow=slow)
        found.update(finding.code for finding in result.findings)
        for finding in result.findings:
            assert finding.text
            assert finding.where
    return found


Fault = tuple[str, Callable[[Case], None], set[str]]
#: kind of plan, what is done to the kernel, codes of which at least one must be found
FAULTS: dict[str, Fault] = {
    "full is not waited for": (
        "cooperative_grid",
        lambda g: remove(g, call("mbarrier_wait", "full")),
        {"unordered-read", "uninitialised-read"},
    ),
    "empty is not waited for": (
        "cooperative_grid",
        lambda g: remove(g, call("mbarrier_wait", "empty")),
        {"write-after-read"},
    ),
    "the operand tile is not waited for": (
        "cooperative_grid",
        lambda g: remove(g, call("mbarrier_wait", "tile_full")),
        {"unordered-read"},
    ),
    "the operand's tile is overwritten too early": (
        "cooperative_grid",
        lambda g: remove(g, call("mbarrier_wait", "tile_empty")),
        {"write-after-read"},
    ),
    "wrong parity of full": (
        "cooperative_grid",
        lambda g: change(g, call("mbarrier_wait", "full"), 1, flipped),
        {"phase-aliasing"},
    ),
    "wrong parity of the tile": (
        "pingpong_grid",
        lambda g: change(g, call("mbarrier_wait", "tile_ready"), 1, flipped),
        {"phase-aliasing", "uninitialised-read", "unordered-read"},
    ),
    "no order between the main loops of two consumer groups": (
        "pingpong_grid",
        lambda g: [remove(g, call("barrier_sync_count")), remove(g, call("ptx.barrier_arrive"))][0],
        {"phase-aliasing"},
    ),
    "no proxy fence before the store": (
        "cooperative_grid",
        lambda g: remove(g, call("fence_proxy"), 1, skip=1),
        {"missing-proxy-fence"},
    ),
    "too few bytes expected": (
        "cooperative_grid",
        lambda g: change(g, call("expect_tx", "full"), 1, plus(-128)),
        {"transaction-bytes"},
    ),
    "too many bytes expected": (
        "cooperative_grid",
        lambda g: change(g, call("expect_tx", "full"), 1, plus(128)),
        {"deadlock"},
    ),
    "the product is not awaited": (
        "cooperative_grid",
        lambda g: change(g, call("wgmma_wait_group"), 0, constant(1)),
        {"accumulator-in-flight"},
    ),
    "a slot goes back while it is read": (
        "cooperative_grid",
        lambda g: change(g, call("wgmma_wait_group"), 0, lambda old: constant(2)(old) if old.value == 1 else old),
        {"write-after-read"},
    ),
    "registers without a fence": (
        "cooperative_grid",
        lambda g: remove(g, call("wgmma_fence")),
        {"missing-wgmma-fence"},
    ),
    "one arrival of each warp group instead of both": (
        "cooperative_grid",
        lambda g: change(g, call("ptx.mbarrier_init", "empty"), 1, constant(1)),
        {"write-after-read", "arrival-overflow", "missed-phase"},
    ),
    "a barrier that expects too few arrivals": (
        "cooperative_grid",
        lambda g: change(g, call("ptx.mbarrier_init", "tile_ready"), 1, constant(32)),
        {"arrival-overflow"},
    ),
    "a barrier that expects too many arrivals": (
        "cooperative_grid",
        lambda g: change(g, call("ptx.mbarrier_init", "empty"), 1, constant(3)),
        {"deadlock"},
    ),
    "remote arrivals are not counted": (
        "cooperative_multicast",
        lambda g: change(g, call("ptx.mbarrier_init", "empty"), 1, constant(2)),
        {"arrival-overflow", "write-after-read", "missed-phase"},
    ),
    "the store's read is not awaited": (
        "cooperative_grid",
        lambda g: remove(g, call("bulk_wait_group")),
        {"write-after-read", "store-not-awaited"},
    ),
    "no barrier before the exit": (
        "pingpong_cluster",
        lambda g: [remove(g, call("barrier_cluster_arrive"), 1, skip=1), remove(g, call("cluster_wait"), 1, skip=1)][0],
        {"exited-cta"},
    ),
    "no barrier of the cluster at the start": (
        "pingpong_cluster",
        lambda g: [remove(g, call("barrier_cluster_arrive"), 1), remove(g, call("cluster_wait"), 1)][0],
        {"barrier-init", "unordered-write", "uninitialised-read"},
    ),
    "barriers are not fenced": (
        "cooperative_multicast",
        lambda g: remove(g, call("fence_mbarrier_init")),
        {"missing-init-fence"},
    ),
    "no barrier after the prologue": (
        "cooperative_grid",
        lambda g: remove(g, call("cta_sync"), 1),
        {"barrier-init", "unordered-read"},
    ),
    "a named barrier with two counts": (
        "pingpong_grid",
        lambda g: change(g, call("ptx.barrier_arrive"), 1, constant(128)),
        {"barrier-count"},
    ),
    "nobody arrives at the named barrier": (
        "pingpong_grid",
        lambda g: remove(g, call("ptx.barrier_arrive")),
        {"deadlock"},
    ),
    "one mailbox for every exchange": (
        "cooperative_grid",
        lambda g: merge_parities(g),
        {"deadlock"},
    ),
    "mail goes to itself": (
        "pingpong_cluster",
        lambda g: change(g, call("comfuse_post_cluster"), 1, constant(0)),
        {"deadlock"},
    ),
    "more registers than there are": (
        "cooperative_grid",
        lambda g: change(g, call("setmaxnreg"), 0, lambda old: constant(240)(old) if old.value > 100 else old),
        {"deadlock"},
    ),
    "a load that starts outside of shared memory": (
        "cooperative_grid",
        lambda g: change(g, call("g2s_cluster"), 0, lambda old: moved(old, 1 << 18)),
        {"shared-bounds"},
    ),
    "a load that is not aligned": (
        "cooperative_grid",
        lambda g: change(g, call("g2s_cluster"), 0, lambda old: moved(old, 16)),
        {"shared-bounds"},
    ),
    "a warp instruction for half of a warp": (
        "cooperative_grid",
        lambda g: halve(g, call("cta_sync")),
        {"divergence"},
    ),
    "a result is not stored": (
        "cooperative_grid",
        lambda g: remove(g, call("tensor_s2g")),
        {"output-not-written"},
    ),
    "a bias that is read behind its end": (
        "cooperative_ragged",
        lambda g: unguard(g),
        {"global-bounds"},
    ),
    "a multicast to a CTA that does not exist": (
        "cooperative_multicast",
        lambda g: change(g, call("g2s_cluster", with_="multicast::cluster"), 5, constant(7, "uint16")),
        {"cluster-rank"},
    ),
    "an accumulator nobody cleared": (
        "cooperative_grid",
        lambda g: always_add(g),
        {"uninitialised-read"},
    ),
}


def moved(pointer: Expr, count: int) -> Expr:
    """An address further on."""
    return Expr("call", pointer.dtype, [pointer, Expr("const", "int32", value=count)], "handle_add_byte_offset")


def merge_parities(given: Case) -> None:
    """Both parities of the exchange use the same slots."""
    found = [
        expr
        for expr in expressions(given.program.kernel.device)
        if expr.op == "call" and str(expr.value).endswith("_mail")
    ]
    assert found
    for mail in found:
        for expr in expressions([Stmt("eval", [mail.args[0]])]):
            if expr.op == "%" and show(expr.args[1]) == "2" and show(expr.args[0]) == "use":
                expr.op, expr.args, expr.value = "const", [], 0


def halve(given: Case, test: Test) -> None:
    """An instruction of all lanes becomes one of the lower half of each warp."""
    lane = next(variable for scope, variable, _ in given.program.kernel.scopes if scope == "lane")
    for block in list(blocks(given.program.kernel.device)):
        for position, stmt in enumerate(block):
            if test(stmt):
                condition = Expr(
                    "<", "bool", [Expr("var", "int32", value=lane), Expr("const", "int32", value=16)], "LT"
                )
                block[position] = Stmt("if", [condition], None, [stmt])


def unguard(given: Case) -> None:
    """Vectors are read without looking whether there is an element."""
    guards = [
        expr
        for expr in expressions(given.program.kernel.device)
        if expr.op == "call"
        and expr.value == "if_then_else"
        and any(e.op == "load" and e.value.scope == "global" for e in expressions([Stmt("eval", [expr.args[1]])]))
    ]
    assert guards
    for guard in guards:
        guard.args[0] = Expr("const", "bool", value=True)


def always_add(given: Case) -> None:
    """The first product of a tile adds to what the registers held before."""
    products = [e for e in expressions(given.program.kernel.device) if e.op == "call" and "mma_async" in split(e)[1]]
    assert products
    for product in products:
        for place, arg in enumerate(product.args):
            if arg.op == "not":
                product.args[place] = Expr("const", "bool", value=True)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    kind, break_it, expected = FAULTS[name]
    given = case("layer_norm", kind)
    break_it(given)
    found = codes(given, expected)
    assert found & expected, f"expected one of {sorted(expected)}, found {sorted(found)}"


def test_a_wrong_descriptor_shows_in_the_numbers() -> None:
    given = case("bias_gelu", "pingpong_grid", m=100)
    descriptors = [e for e in expressions(given.program.kernel.device) if e.op == "+" and e.dtype == "uint64"]
    steps = [e for e in descriptors if e.args[1].op == "const"]
    assert steps
    for step in steps:
        step.args[1].value = 2
    result = given.program.run(given.arrays)
    assert not result.findings
    (output,) = result.outputs.values()
    exact = given.references[0]
    assert np.linalg.norm(output.astype("float64") - exact) > 0.1 * np.linalg.norm(exact)


def test_a_grid_that_does_not_fit_waits_for_itself() -> None:
    """Row values are exchanged by CTAs that must all run: two waves of them never finish."""
    given = case("layer_norm", "cooperative_grid")
    result = given.program.run(given.arrays, resident=3)
    (finding,) = result.findings
    assert finding.code == "deadlock"
    assert "waits for the mailboxes" in finding.text
    assert "1 clusters find no free SM" in finding.text
    # without an exchange any number of waves will do
    alone = case("bias_gelu", "cooperative_multicast")
    result = alone.program.run(alone.arrays, resident=1)
    assert not result.findings


def test_a_deadlock_says_who_waits_for_what() -> None:
    given = case("layer_norm", "cooperative_grid")
    remove(given, call("mbarrier_arrive", "tile_ready"))
    result = given.program.run(given.arrays)
    (finding,) = result.findings
    assert finding.code == "deadlock"
    assert "waits for parity 0 of cta 0 tile_ready[0]" in finding.text
    assert "phase 0 lacks 128 of 128 arrivals" in finding.text
    assert finding.where in finding.numbers["stuck"]


def test_a_fault_is_found_in_every_order() -> None:
    """Happens-before does not need the unlucky order: a missing wait shows even when everything happens to be in time."""
    given = case("layer_norm", "pingpong_grid")
    remove(given, call("mbarrier_wait", "empty"))
    for seed in range(6):
        found: set[Any] = {finding.code for finding in given.program.run(given.arrays, seed=seed).findings}
        # if the MMA warp groups are late, the producer arms a slot again before its bytes have landed
        assert found & {"write-after-read", "unordered-write", "arrival-overflow"}
