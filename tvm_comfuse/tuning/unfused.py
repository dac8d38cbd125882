"""The split form of a task: what its tuned kernel is compared with, so that a model gets whichever takes less time."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.target import Target

from tvm_comfuse.forms import Split
from tvm_comfuse.relay_patterns.canonical import Canonical, canonicalize
from tvm_comfuse.relay_patterns.cluster import Cluster
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.rows import RowsPlan
from tvm_comfuse.target import is_cuda
from tvm_comfuse.tuning.chain import Chain

GEMM, ROWS = "gemm", "rows"


@dataclass(frozen=True)
class Unfused:
    """The split form of a task's cluster.

    module     its functions as a builder takes them: scheduled for a GPU, canonical for a CPU
    gemm, rows their plans
    """

    module: tvm.IRModule
    chain: Chain
    gemm: Plan
    rows: RowsPlan


def unfused(cluster: Cluster, split: Split, target: Target) -> Unfused:
    """What is built and called of a cluster's split form."""
    form = split.form if is_cuda(target) else split.plain
    whole = canonicalize(cluster)
    operands, outputs = _positions(whole)
    behind = 2 + len(whole.operands) + len(whole.outputs)
    between = form.gemm.outputs[form.between]
    passed_on = outputs.get(id(between), behind)
    gemm = [0, 1, *(operands[id(o)] for o in form.gemm.operands)]
    gemm += [outputs.get(id(output), behind) for output in form.gemm.outputs]
    rows = [passed_on, *(operands[id(o)] for o in form.rows.operands), *(outputs[id(o)] for o in form.rows.outputs)]
    kernels = ((GEMM, tuple(gemm)), (ROWS, tuple(rows)))
    functions = {GEMM: form.gemm.func, ROWS: form.rows.func}
    module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    # the value between is the product, or what the first stage carries
    block = "gemm" if between.node == cluster.graph.gemm else "stage_0"
    rounded = block if between.dtype == cluster.anchor.dtype else ""
    chain = Chain(kernels, cluster.anchor.columns, between.dtype, rounded)
    return Unfused(module, chain, split.gemm, split.rows)


def _positions(whole: Canonical) -> tuple[dict[int, int], dict[int, int]]:
    """Positions of the parameters of a cluster's function, by the identity of the operands and outputs that they are."""
    first = 2 + len(whole.operands)
    operands = {id(operand): 2 + number for number, operand in enumerate(whole.operands)}
    return operands, {id(output): first + number for number, output in enumerate(whole.outputs)}
