"""The Relax pipelines "comfuse" and "comfuse_clusters".

"comfuse": clusters become calls of scheduled functions, TVM's passes lower the rest.  "comfuse_clusters" stops where
clusters are calls of functions without schedules, which is what MetaSchedule tunes and applies databases to.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.target import Target

from tvm_comfuse.errors import TargetError

NAME = "comfuse"
CLUSTERS = "comfuse_clusters"


def comfuse_pipeline() -> tvm.transform.Pass:
    """Module pass: a Relax module with operators to one that TVM's virtual machine runs, for the target in scope.

    ``tvm.compile(mod, target, relax_pipeline="comfuse", tir_pipeline="comfuse")`` uses it by name.  Plans are the
    best known ones; ``tvm_comfuse.compile`` takes others and gives a report.  Clusters that are found already keep their
    schedules; those without one get one.
    """

    @tvm.transform.module_pass(opt_level=0, name="comfuse.Relax")
    def run(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        from tvm_comfuse.frontend import legalize, normalize, simplify_views
        from tvm_comfuse.fusion import fuse, schedule_clusters

        target = _target()
        fused, _ = fuse(normalize()(schedule_clusters(mod, target)), target)
        return lower(target)(legalize()(simplify_views()(fused)))

    return run


def clusters_pipeline() -> tvm.transform.Pass:
    """Module pass: a Relax module with its clusters replaced by calls of canonical functions, for the target in scope.

        with target:
            mod = relax.get_pipeline("comfuse_clusters")(mod)
            mod = relax.transform.MetaScheduleApplyDatabase(folder)(mod)
            executable = tvm.compile(mod, target, relax_pipeline="comfuse", tir_pipeline="comfuse")

    Only clusters that have a plan on the target are taken.
    """

    @tvm.transform.module_pass(opt_level=0, name="comfuse.Clusters")
    def run(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        from tvm_comfuse.frontend import normalize
        from tvm_comfuse.fusion import has_plan_for
        from tvm_comfuse.relay_patterns import FuseClusters

        target = _target()
        return FuseClusters(lambda func: has_plan_for(func, target))(normalize()(mod))

    return run


def _target() -> Target:
    """The target in scope.  Raises TargetError without one."""
    target = Target.current(allow_none=True)
    if target is None:
        raise TargetError("a target in scope", "none", "with target: tvm.compile(...)")
    return target


def lower(target: Target) -> tvm.transform.Pass:
    """Module pass: from a module without Relax operators, clusters replaced, to the virtual machine's.

    TVM's default pipeline for the target, except that reshapes that stand alone become views before they are scheduled:
    afterwards TVM does not know them any more, and each would be a kernel that copies its input.
    """
    backend = relax.backend.cuda.pipeline if target.kind.name == "cuda" else relax.backend.cpu_generic.pipeline
    passes = [
        *backend.library_dispatch_passes(target),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.RewriteDataflowReshape(),
        relax.transform.DeadCodeElimination(),
        *_schedules(target),
        *backend.dataflow_lower_passes(target),
        *backend.finalize_passes(target),
    ]
    return tvm.transform.Sequential(passes, name="comfuse.LowerRelax")


def _schedules(target: Target) -> list[tvm.transform.Pass]:
    """TVM's rules for what is not ours."""
    if target.kind.name != "cuda":
        return []
    from tvm.s_tir import dlight

    gpu = dlight.gpu
    return [
        dlight.ApplyDefaultSchedule(gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    ]


def register() -> None:
    """Make the pipelines known to TVM by their names; nothing happens the second time."""
    for name, pipeline in ((NAME, comfuse_pipeline), (CLUSTERS, clusters_pipeline)):
        if name not in relax.pipeline.PIPELINE_MAP:
            relax.register_pipeline(name)(pipeline)
