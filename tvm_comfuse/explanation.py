"""What would be fused, with which plan, and why the rest would not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm_comfuse.refusal import Refusal

if TYPE_CHECKING:
    from tvm.target import Target

    from tvm_comfuse.schedules.plan import Plan


@dataclass(frozen=True)
class MatmulExplanation:
    """One matmul of the model.

    name    of its Relax variable
    shape   [M, N, K], symbolic extents as text
    fused   whether it and the operators behind it become one kernel
    ops     Relax operators of the kernel in program order, the matmul first
    plan    of the kernel, None without one
    reason  why it is not fused; for a fused one code "fused" and where and why the cluster ends
    stops   for a fused one, why each operator that uses one of its values is not in it
    """

    name: str
    shape: tuple[int | str, ...]
    fused: bool
    ops: tuple[str, ...]
    plan: Plan | None
    reason: Refusal
    stops: tuple[Refusal, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values with exactly the keys of the command line's interface."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "fused": self.fused,
            "ops": list(self.ops),
            "plan": self.plan.to_dict() if self.plan else None,
            "reason": {"code": self.reason.code, "text": str(self.reason)},
        }


@dataclass(frozen=True)
class Explanation:
    """Every matmul of a model, in program order."""

    target: str
    matmuls: tuple[MatmulExplanation, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """``{"matmuls": [...]}``, plain JSON values."""
        return {"matmuls": [matmul.to_dict() for matmul in self.matmuls]}

    def __str__(self) -> str:
        if not self.matmuls:
            return "no matmul in the model"
        return "\n".join(
            f"{m.name} {list(m.shape)}: {'fused ' + ' '.join(m.ops) if m.fused else 'not fused'}; {m.reason}"
            for m in self.matmuls
        )


def explain(
    model: Any,
    target: str | dict[str, Any] | Target = "h200",
    *,
    example_args: tuple[Any, ...] | None = None,
) -> Explanation:
    """Say for each matmul of a model whether it is fused, how, and why not.  Compiles nothing.

    The arguments are those of ``tvm_comfuse.compile``, and so are the errors.
    """
    from tvm_comfuse.build import to_module
    from tvm_comfuse.fusion import fuse
    from tvm_comfuse.target import parse_target

    parsed = parse_target(target)
    return fuse(to_module(model, example_args), parsed)[1]
