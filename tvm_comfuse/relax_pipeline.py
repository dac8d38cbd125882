"""The Relax pipeline "comfuse": clusters become calls of scheduled functions, TVM's passes lower the rest."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.target import Target

from tvm_comfuse.errors import TargetError

NAME = "comfuse"


def comfuse_pipeline() -> tvm.transform.Pass:
    """Module pass: a Relax module with operators to one that TVM's virtual machine runs, for the target in scope.

    ``tvm.compile(mod, target, relax_pipeline="comfuse", tir_pipeline="comfuse")`` uses it by name.  Plans are the
    default ones; ``tvm_comfuse.compile`` takes others and gives a report.
    """

    @tvm.transform.module_pass(opt_level=0, name="comfuse.Relax")
    def run(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        from tvm_comfuse.frontend import legalize, normalize, simplify_views
        from tvm_comfuse.fusion import fuse

        target = Target.current(allow_none=True)
        if target is None:
            raise TargetError("a target in scope", "none", "with target: tvm.compile(...)")
        fused, _ = fuse(normalize()(mod), target)
        return lower(target)(legalize()(simplify_views()(fused)))

    return run


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
    """Make ``relax_pipeline="comfuse"`` known to TVM; nothing happens the second time."""
    if NAME not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline(NAME)(comfuse_pipeline)
