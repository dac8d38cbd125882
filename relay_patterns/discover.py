"""Discovery: the clusters of a function, and a report for every matmul in it."""

from __future__ import annotations

from itertools import count
from typing import Any

import tvm
from tvm import ir, relax

from tvm_comfuse.errors import ModelError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.anchor import find_anchor, matmul_shape
from tvm_comfuse.relay_patterns.block import Dataflow, op_name, var_key
from tvm_comfuse.relay_patterns.cluster import Discovery, MatmulReport
from tvm_comfuse.relay_patterns.grow import grow


def discover(mod: tvm.IRModule, function: str = "main") -> Discovery:
    """Every matmul of a Relax function with its cluster or the reasons why it has none.

    Raises ModelError when the module has no Relax function of that name.
    """
    names = [gv.name_hint for gv, func in mod.functions_items() if isinstance(func, relax.Function)]
    if function not in names:
        raise ModelError(f"a Relax function {function!r}", f"{names}", "name one of these")
    return searches(in_dataflow(mod))[function].discovery


def searches(flat: tvm.IRModule) -> dict[str, Search]:
    """The search of every Relax function of a module in dataflow form; no two matmuls of the module have one name."""
    functions = [(gv.name_hint, func) for gv, func in flat.functions_items() if isinstance(func, relax.Function)]
    # by name: the order of a module's functions may depend on how it was made
    found = {name: Search(func) for name, func in sorted(functions, key=lambda pair: pair[0])}
    _make_unique([report for search in found.values() for report in search.discovery.matmuls])
    return found


def _make_unique(reports: list[MatmulReport]) -> None:
    """Variables of one name get ``#2``, ``#3``, ... in program order; a model may have many ``lv1``."""
    taken = {report.name for report in reports}
    seen: set[str] = set()
    for report in reports:
        if report.name in seen:
            number = next(number for number in count(2) if f"{report.name}#{number}" not in taken)
            report.name = f"{report.name}#{number}"
            taken.add(report.name)
        seen.add(report.name)


def in_dataflow(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` with pure bindings gathered in dataflow blocks."""
    return relax.transform.ConvertToDataflow(min_size=1)(mod)


class Search:
    """The discovery of one function, and the blocks it was made in."""

    def __init__(self, function: relax.Function) -> None:
        self.function = function
        self.flows: list[Dataflow] = []
        #: for each matmul of `discovery`, its block
        self.flow_of: list[Dataflow | None] = []
        self.discovery = Discovery()
        for block in function.body.blocks if isinstance(function.body, relax.SeqExpr) else []:
            if isinstance(block, relax.DataflowBlock):
                self._search(Dataflow(block))
            else:
                self._refuse_all(block)

    def _search(self, flow: Dataflow) -> None:
        self.flows.append(flow)
        indices = [i for i, binding in enumerate(flow.bindings) if op_name(binding.value) == "relax.matmul"]
        first = len(self.discovery.matmuls)
        reports: list[MatmulReport] = []
        # the last matmul takes what two could take, so that the other's result is there when it starts
        for position in reversed(range(len(indices))):
            reports.append(self._report(flow, indices[position], first + position))
        self.discovery.matmuls += reversed(reports)
        self.flow_of += [flow] * len(reports)

    def _report(self, flow: Dataflow, index: int, number: int) -> MatmulReport:
        binding = flow.bindings[index]
        report = _unfused(binding.var, binding.value)
        anchor = find_anchor(flow, index)
        if isinstance(anchor, Refusal):
            report.refusals.append(anchor)
            return report
        report.cluster, report.refusals = grow(flow, anchor, number)
        if report.cluster is not None:
            report.fused, report.ops = True, list(report.cluster.ops)
        return report

    def _refuse_all(self, block: relax.BindingBlock) -> None:
        """Reports the matmuls outside dataflow blocks, branches included."""
        for binding in block.bindings:
            for var, call in _matmuls(binding):
                report = _unfused(var, call)
                report.refusals.append(
                    Refusal(
                        "not-dataflow",
                        "the matmul is inside a branch or next to side effects",
                        {},
                        "move it into straight-line code",
                    )
                )
                self.discovery.matmuls.append(report)
                self.flow_of.append(None)


def _unfused(var: Any, call: Any) -> MatmulReport:
    return MatmulReport(str(var.name), matmul_shape(call), False, ["relax.matmul"])


def _matmuls(binding: Any) -> list[tuple[Any, Any]]:
    """Matmul calls in the value of a binding, with the variable that gets each."""
    found: dict[int, tuple[Any, Any]] = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.SeqExpr):
            for inner in (inner for block in expr.blocks for inner in block.bindings):
                if op_name(inner.value) == "relax.matmul":
                    found[var_key(inner.var)] = (inner.var, inner.value)

    if isinstance(binding.value, ir.Call) and op_name(binding.value) == "relax.matmul":
        return [(binding.var, binding.value)]
    relax.analysis.post_order_visit(binding.value, visit)
    return list(found.values())
