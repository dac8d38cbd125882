"""The pass that replaces each cluster of a module by one call of its function, or two calls of its split form."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.block import Dataflow
from tvm_comfuse.relay_patterns.calls import calls
from tvm_comfuse.relay_patterns.canonical import Canonical, canonicalize
from tvm_comfuse.relay_patterns.cluster import Cluster, Discovery, MatmulReport
from tvm_comfuse.relay_patterns.discover import Search, in_dataflow, searches
from tvm_comfuse.relay_patterns.grow import grow
from tvm_comfuse.relay_patterns.split_form import SplitForm

#: what stands for a cluster: one function, perhaps scheduled, or two
Form: TypeAlias = "tirx.PrimFunc | SplitForm"
#: given a canonical function: what to use instead, or why the cluster is not to be replaced
Accept = Callable[[tirx.PrimFunc], "Form | Refusal"]


def _keep(func: tirx.PrimFunc) -> Form | Refusal:
    return func


def FuseClusters(  # noqa: N802  passes are named like this in TVM
    accept: Accept = _keep, on_report: Callable[[str, Discovery], None] | None = None
) -> tvm.ir.transform.Pass:
    """Module pass: fuses every cluster that `accept` takes.

    on_report  called with the name of each Relax function and its discovery, refusals of `accept` included
    """

    @tvm.transform.module_pass(opt_level=0, name="comfuse.FuseClusters")
    def fuse(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        fused, reports = fuse_clusters(mod, accept)
        if on_report is not None:
            for name, report in reports.items():
                on_report(name, report)
        return fused

    return fuse


def fuse_clusters(
    mod: tvm.IRModule, accept: Accept = _keep, on_offer: Callable[[MatmulReport], None] | None = None
) -> tuple[tvm.IRModule, dict[str, Discovery]]:
    """`mod` with its clusters fused, and the discovery of each Relax function.  `mod` itself is not changed.

    on_offer  called in front of each call of `accept` with the report of the matmul whose cluster is offered
    """
    flat = in_dataflow(mod)
    builder = relax.BlockBuilder(flat)
    reports: dict[str, Discovery] = {}
    for name, search in searches(flat).items():
        reports[name] = search.discovery
        accepted = [_offer(search, number, accept, on_offer) for number in range(len(search.flow_of))]
        if any(accepted):
            builder.update_func(flat.get_global_var(name), _rewrite(builder, search, accepted))
    if not any(report.fused for discovery in reports.values() for report in discovery.matmuls):
        return mod, reports
    return relax.transform.DeadCodeElimination()(builder.get()), reports


def _offer(
    search: Search, number: int, accept: Accept, on_offer: Callable[[MatmulReport], None] | None
) -> tuple[Canonical, Form] | None:
    """Offers cluster `number`; when it is refused, the part of it before the first row reduction."""
    report, flow = search.discovery.matmuls[number], search.flow_of[number]
    while flow is not None and report.cluster is not None:
        cluster = report.cluster
        made = canonicalize(cluster)
        if on_offer is not None:
            on_offer(report)
        answer = accept(made.func)
        if not isinstance(answer, Refusal):
            return made, answer
        flow.release(number)
        _shrink(report, flow, cluster, number)
        report.refusals.insert(0, answer)
    return None


def _shrink(report: MatmulReport, flow: Dataflow, cluster: Cluster, number: int) -> None:
    """Puts the cluster without row reductions into the report, or none if it had no reductions."""
    smaller = None
    if cluster.kind == "gemm_reduce":
        smaller, stops = grow(flow, cluster.anchor, number, reductions=False)
        # the larger cluster's own stops are behind the place where this one stops
        report.refusals = stops + [refusal for refusal in report.refusals if refusal not in stops]
    report.cluster, report.fused = smaller, smaller is not None
    report.ops = list(smaller.ops) if smaller else ["relax.matmul"]


def _rewrite(builder: Any, search: Search, accepted: list[Any]) -> relax.Function:
    """The function with each accepted cluster replaced."""
    func = search.function
    flows = {id(flow.block): flow for flow in search.flows}
    blocks = []
    for block in func.body.blocks:
        flow = next((each for each in flows.values() if each.block.same_as(block)), None)
        blocks.append(block if flow is None else _rewrite_block(builder, flow, search, accepted))
    body = relax.SeqExpr(blocks, func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _rewrite_block(builder: Any, flow: Dataflow, search: Search, accepted: list[Any]) -> relax.DataflowBlock:
    bindings: list[Any] = []
    for piece in _order(flow):
        number = flow.owner.get(piece)
        if number is None:
            bindings.append(flow.bindings[piece])
        else:
            cluster = search.discovery.matmuls[number].cluster
            assert cluster is not None  # what owns a binding has been accepted
            bindings += calls(builder, cluster, *accepted[number])
    return relax.DataflowBlock(bindings)


def _order(flow: Dataflow) -> list[int]:
    """First members of clusters, and the other bindings, such that each comes after what it reads.

    Among those that are ready the one that came first in the program goes first; a cluster counts as its last member.
    """
    head = {number: min(members) for number, members in flow.cluster_members.items()}
    last = {number: max(members) for number, members in flow.cluster_members.items()}

    def piece(index: int) -> int:
        number = flow.owner.get(index)
        return index if number is None else head[number]

    needs: dict[int, set[int]] = {}
    for index in range(len(flow)):
        number = flow.owner.get(index)
        inputs = flow.inputs[index] if number is None else flow.cluster_inputs[number]
        needs.setdefault(piece(index), set()).update({piece(i) for i in inputs} - {piece(index)})
    users: dict[int, list[int]] = {index: [] for index in needs}
    for index, inputs_ in needs.items():
        for source in inputs_:
            users[source].append(index)

    def rank(index: int) -> tuple[int, int]:
        number = flow.owner.get(index)
        return (index if number is None else last[number], index)

    ready = [rank(index) for index, inputs_ in needs.items() if not inputs_]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)[1]
        order.append(index)
        for user in users[index]:
            needs[user].discard(index)
            if not needs[user]:
                heapq.heappush(ready, rank(user))
    assert len(order) == len(needs), "clusters depend on each other in a circle"
    return order
