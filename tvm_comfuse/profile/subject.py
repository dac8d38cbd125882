"""The kernel that is profiled: a row of the suites by its name, or one kernel of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tvm import tirx

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.suites import Row, load
from tvm_comfuse.bench.timing import number_of_sets
from tvm_comfuse.build import to_module
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.profile.report import ProfileError
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.tir_passes.lower import is_cluster

if TYPE_CHECKING:
    import tvm
    from tvm.target import Target

    from tvm_comfuse.fusion import Records

#: a field that every plan has and that is no matmul's name
_PLAN_FIELD = "tile_m"


@dataclass(frozen=True)
class Subject:
    """A scheduled cluster and the M of its launches."""

    name: str
    func: tirx.PrimFunc
    rows: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N, K."""
        spec = analyze(self.func)
        return self.rows, spec.n, spec.k

    def inputs(self, l2_bytes: int, device: str = "cuda") -> list[list[torch.Tensor]]:
        """Input sets that together exceed the L2 cache several times, as those of the bench: tensors with M rows change from
        set to set, W and the [N] vectors are the same; N(0, 1), W scaled by K**-0.5."""
        spec, generator = analyze(self.func), torch.Generator(device).manual_seed(0)
        params = list(self.func.params)[: len(self.func.params) - len(spec.outputs)]

        def made(position: int, param: Any) -> torch.Tensor:
            values = torch.randn(self._shape(param), generator=generator, device=device)
            return (values * spec.k**-0.5 if position == 1 else values).to(getattr(torch, str(param.dtype)))

        first = [made(position, param) for position, param in enumerate(params)]
        moving = [0, *(operand.index for operand in spec.operands if operand.kind in ("tile", "row"))]
        count = number_of_sets(sum(first[position].nbytes for position in moving), l2_bytes)
        others = [
            [made(at, param) if at in moving else first[at] for at, param in enumerate(params)]
            for _ in range(count - 1)
        ]
        return [first, *others]

    def outputs(self, device: str = "cuda") -> list[torch.Tensor]:
        """Uninitialised outputs."""
        made = [self.func.params[output.index] for output in analyze(self.func).outputs]
        return [torch.empty(self._shape(p), dtype=getattr(torch, str(p.dtype)), device=device) for p in made]

    def _shape(self, param: Any) -> list[int]:
        return [int(extent) if isinstance(extent, tirx.IntImm) else self.rows for extent in param.shape]


def find_subject(
    what: str,
    target: Target,
    plans: dict[str, Any] | None = None,
    *,
    kernel: str | None = None,
    rows: int | None = None,
    tuning_records: Records | None = None,
    use_pretuned: bool = True,
) -> Subject:
    """The kernel of a row of the suites, or of a model as the command line names it.

    plans   by matmul name; of a model with one matmul also a plan by itself
    kernel  name of the one that is meant, where a model has several
    rows    M, where the model leaves it open
    Raises ProfileError if there is none or more than one, and what `fuse` raises.
    """
    row = _row(what)
    module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype)) if row else to_module(what)
    given = _by_name(plans, module, target)
    fused, explanation = fuse(
        module, target, given, tuning_records=tuning_records, use_pretuned=use_pretuned, form="fused"
    )
    clusters = {gvar.name_hint: func for gvar, func in fused.functions_items() if is_cluster(func)}
    if not clusters:
        reasons = "; ".join(f"{matmul.name}: {matmul.reason}" for matmul in explanation.matmuls)
        raise ProfileError(f"a kernel of {what}", f"nothing fused: {reasons or 'it has no matmul'}", "comfuse explain")
    name = kernel or next(iter(clusters))
    if name not in clusters or (kernel is None and len(clusters) > 1):
        raise ProfileError(f"one kernel of {what}", ", ".join(clusters), "name one of these with --kernel")
    func = clusters[name]
    extent = analyze(func).m or rows
    if extent is None:
        raise ProfileError(f"how many rows {name} is to work on", "a symbolic M", "give it with --rows")
    return Subject(row.name if row else name, func, extent)


def _row(what: str) -> Row | None:
    every = [row for rows in load().values() for row in rows]
    return next((row for row in every if what in (row.name, row.label)), None)


def _by_name(plans: dict[str, Any] | None, module: tvm.IRModule, target: Target) -> dict[str, Any] | None:
    if plans is None or _PLAN_FIELD not in plans:
        return plans
    names = [matmul.name for matmul in fuse(module, target)[1].matmuls]
    if len(names) != 1:
        raise ProfileError("plans by the names of matmuls", f"one plan for {', '.join(names)}", "{name: plan}")
    return {names[0]: plans}
