"""Faults between CTAs: cluster barriers, multicast, mailboxes, the grid."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.schedules.device import H200
from tvm_comfuse.verify.faults.changes import argument, number, remove, replace
from tvm_comfuse.verify.faults.memory import LOAD
from tvm_comfuse.verify.faults.ordering import named
from tvm_comfuse.verify.faults.phases import on
from tvm_comfuse.verify.faults.registry import add, fault
from tvm_comfuse.verify.rewrite import Stmt, call_of, load_barrier, map_expr, map_exprs, name_of, with_args, with_extent
from tvm_comfuse.verify.static.index import CTA_IN_CLUSTER, TAKE, index_of
from tvm_comfuse.verify.static.residency import ENTER, LAUNCH_PARAMS

POST = "comfuse_post_"
_CLUSTER_BARRIER = ("barrier_cluster_arrive", "barrier_cluster_wait")


def _barriers() -> None:
    add(
        "cluster-release-missing",
        "static",
        "arriving at the cluster barrier publishes nothing",
        _word("release", "relaxed"),
    )
    add("cluster-start-missing", "static", "a CTA writes to another before that is set up", _cluster_barrier(0))
    add("cluster-end-missing", "static", "a CTA leaves while others still write to it", _cluster_barrier(1))
    add(
        "cluster-wait-missing",
        "static",
        "CTAs arrive at the cluster barrier and do not wait",
        remove(named("barrier_cluster_wait"), 0),
    )


def _word(old: str, new: str) -> Any:
    """Another modifier of the cluster barrier."""

    def match(node: Stmt) -> bool:
        return name_of(node) in _CLUSTER_BARRIER and _says(node, old)

    def change(node: Stmt) -> list[Stmt]:
        args = [tvm.ir.StringImm(new) if _is_word(a, old) else a for a in call_of(node).args]
        return [tirx.Evaluate(with_args(call_of(node), args))]

    return replace(match, change)


def _is_word(argument_: Any, word: str) -> bool:
    return str(getattr(argument_, "value", "")) == word


def _cluster_barrier(which: int) -> Any:
    """Without the first or the second arrive and wait."""

    def apply(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
        copy: tirx.PrimFunc | None = kernel
        for name in _CLUSTER_BARRIER:
            copy = remove(named(name), which)(copy) if copy is not None else None
        return copy

    return apply


def _weak_post(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The wrapper of a post stores without an order: another thread may see half of it."""

    def change(node: Stmt) -> list[Stmt]:
        args = list(call_of(node).args)
        source = str(args[-1].value).replace("st.relaxed.gpu.global", "st.global").replace("st.relaxed.cluster", "st")
        return [tirx.Evaluate(with_args(call_of(node), [*args[:-1], tvm.ir.StringImm(source)]))]

    return replace(lambda node: name_of(node).startswith(POST), change)(kernel)


def _multicasts(node: Stmt) -> bool:
    call = call_of(node)
    return name_of(node) == LOAD and any(str(getattr(a, "value", "")) == "multicast::cluster" for a in call.args)


def _mask(node: Stmt) -> int:
    return load_barrier(node) + 1


def _multicast() -> None:
    add(
        "mask-own",
        "static",
        "a box goes to the CTA of rank 0 only",
        argument(_multicasts, _mask, lambda old: tirx.Cast("uint16", tirx.IntImm("uint32", 1))),
    )
    add(
        "mask-beyond",
        "static",
        "a multicast mask names a CTA that the cluster has not",
        argument(_multicasts, _mask, lambda old: tirx.Cast("uint16", tirx.IntImm("uint32", 0x7))),
    )
    add(
        "release-own-only",
        "interpreter",
        "a slot is given back to this CTA as often as to all that wrote to it",
        argument(named("comfuse_arrive_at"), 2, lambda old: _own_rank(old)),
    )
    add(
        "release-beyond",
        "static",
        "a slot is given back to a CTA that the cluster has not",
        argument(named("comfuse_arrive_at"), 2, lambda old: old + tirx.IntImm("uint32", 2)),
    )


def _own_rank(rank: Any) -> Any:
    """rank // m * m + thread -> rank."""
    found: list[Any] = []

    def visit(node: Any) -> Any:
        if isinstance(node, tirx.Var) and str(node.name) == "rank":
            found.append(node)
        return None

    map_expr(rank, visit)
    return tirx.Cast("uint32", found[0]) if found else rank


def _mailboxes() -> None:
    text = "the text of a one-line CUDA wrapper is taken at its word: the sanitizers of a GPU run see it"
    fault("post-weak", "interpreter", text)(_weak_post)
    add("mailbox-not-cleared", "interpreter", "mailboxes hold what the kernel before left", _not_cleared)
    add("tag-posted", "interpreter", "partials are posted with the next exchange's tag", _tags(POST, 1))
    add("tag-taken", "interpreter", "partials are taken by the previous exchange's tag", _tags(TAKE, -1))
    add("mailbox-parity", "interpreter", "all exchanges use the mailboxes of parity 0", _parity)
    add(
        "post-rank",
        "interpreter",
        "partials go to the CTA's own mailboxes only",
        argument(named("comfuse_post_cluster"), 2, lambda old: tirx.IntImm("uint32", 0)),
    )
    add(
        "post-missing",
        "interpreter",
        "one row's partial is not posted",
        remove(lambda node: name_of(node).startswith(POST), 0),
    )


def _not_cleared(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def match(node: Stmt) -> bool:
        return (
            isinstance(node, tirx.BufferStore)
            and str(node.buffer.dtype) == "uint64"
            and (str(node.buffer.scope()).startswith("shared"))
        )

    return remove(match)(kernel)


def _tags(prefix: str, distance: int) -> Any:
    """Another tag in every post (the last operand) or take (the first)."""

    def match(node: Stmt) -> bool:
        return name_of(node).startswith(prefix)

    # the name stands before the operands, the source text behind them
    return argument(match, -2 if prefix == POST else 1, lambda old: old + tirx.IntImm("uint32", distance % 2**32))


def _parity(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The parity is the number of the exchange modulo 2."""

    def change(node: Any) -> Any:
        modulo = isinstance(node, tirx.FloorMod) and isinstance(node.b, tirx.IntImm) and int(node.b) == 2
        return tirx.IntImm("int32", 0) if modulo and _has_loop(node.a) else None

    return map_exprs(kernel, change, lambda node: name_of(node).startswith((POST, TAKE)))


def _has_loop(expr: Any) -> bool:
    found: list[Any] = []

    def visit(node: Any) -> Any:
        if isinstance(node, tirx.Var) and str(node.name) == "use":
            found.append(node)
        return None

    map_expr(expr, visit)
    return bool(found)


def _grid() -> None:
    add("leave-missing", "static", "no CTA moves the tags on", remove(named("comfuse_leave")))
    add(
        "leave-tags",
        "static",
        "the next launch's tags begin among this one's",
        argument(named("comfuse_leave"), 3, lambda old: tirx.IntImm("uint32", 1)),
    )
    add(
        "leave-ctas",
        "static",
        "the tags move on before the last CTA has left",
        argument(named("comfuse_leave"), 2, number(lambda ctas: ctas - 1)),
    )
    add(
        "cooperative-missing",
        "static",
        "CTAs that wait for each other are launched as any others",
        lambda kernel: kernel.without_attr(LAUNCH_PARAMS) if LAUNCH_PARAMS in kernel.attrs else None,
    )
    add("enter-missing", "static", "nobody waits for the mailboxes of a kernel that runs on two streams", _not_entered)
    add("enter-first", "static", "a launch takes the mailboxes before its CTAs have SMs", enter_by_first)
    add(
        "mail-wait-missing",
        "static",
        "warp groups use mailboxes that their launch may not own yet",
        remove(on("mail_ready", "mbarrier_wait")),
    )
    add(
        "mail-wait-parity",
        "interpreter",
        "the wait for the mailboxes lets through at once",
        argument(on("mail_ready", "mbarrier_wait"), 1, lambda old: tirx.IntImm("int32", 1)),
    )
    add(
        "dependency-missing",
        "static",
        "a kernel that may start early does not wait for the one in front",
        remove(lambda node: named("griddepcontrol")(node) and _says(node, "wait")),
    )
    add("two-waves", "static", "more clusters are launched than run at once", _two_waves)


def _says(node: Stmt, word: str) -> bool:
    return any(_is_word(argument_, word) for argument_ in call_of(node).args)


def _enters(node: Stmt) -> bool:
    return isinstance(node, tirx.BufferStore) and _calls_enter(node.value)


def _calls_enter(value: Any) -> bool:
    call = value if isinstance(value, tvm.ir.Call) else None
    return call is not None and bool(call.args) and _is_word(call.args[0], ENTER)


def _not_entered(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    def change(node: Stmt) -> list[Stmt]:
        return [tirx.BufferStore(node.buffer, tirx.IntImm("uint32", 0), list(node.indices))]

    return replace(_enters, change)(kernel)


def enter_by_first(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The first CTA (of the first cluster) takes the mailboxes."""
    index = index_of(kernel)

    def change(node: Stmt) -> list[Stmt]:
        args = list(node.value.args)
        first = index.cta_variable == 0
        if CTA_IN_CLUSTER in index.scopes:
            first = tirx.And(first, index.scopes[CTA_IN_CLUSTER][0] == 0)
        # the name stands before the operands
        args[2] = tirx.Cast("uint32", first)
        return [tirx.BufferStore(node.buffer, with_args(node.value, args), list(node.indices))]

    return replace(_enters, change)(kernel)


def _two_waves(kernel: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The grid gets as many clusters more as GPUs of the family have SMs."""
    index = index_of(kernel)
    return with_extent(kernel, str(index.cta_variable.name), index.ctas // index.cluster_size + H200.sms)


for _make in (_barriers, _multicast, _mailboxes, _grid):
    _make()
