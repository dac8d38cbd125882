"""Plans that a user gives: words in the place of plans, edited entries of explain, and messages that name the matmul."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import tvm_comfuse
from tvm_comfuse.errors import PlanError


class Block(nn.Module):
    """A product with a norm behind it, and one with an activation, which is one kernel in any form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[32, 64] to [32, 64]."""
        return torch.relu(self.second(self.norm(self.first(x))))


@cache
def block() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Block().to(torch.bfloat16).eval(), (torch.randn(32, 64).to(torch.bfloat16),)


@cache
def explained() -> dict[str, Any]:
    model, inputs = block()
    return tvm_comfuse.explain(model, "h200", example_args=inputs, form="fused").to_dict()


def names() -> list[str]:
    return [matmul["name"] for matmul in explained()["matmuls"]]


def edited(**changes: Any) -> dict[str, Any]:
    """What explain wrote, with the first matmul's entry changed."""
    first, *others = explained()["matmuls"]
    return {"matmuls": [{**first, **changes}, *others]}


def refused(plans: dict[str, Any]) -> PlanError:
    model, inputs = block()
    with pytest.raises(PlanError) as caught:
        tvm_comfuse.explain(model, "h200", example_args=inputs, plans=plans)
    return caught.value


@pytest.mark.parametrize("form", ["word", "entry"])
def test_a_matmul_is_left_unfused(form: str) -> None:
    model, inputs = block()
    plans = {names()[0]: "off"} if form == "word" else edited(fused=False, plan=None)
    compiled = tvm_comfuse.compile(model, "llvm", example_args=inputs, plans=plans)
    assert compiled.explanation is not None
    first, second = compiled.explanation.matmuls
    assert (first.fused, second.fused) == (False, True)
    assert first.reason.code == "off"
    exact = model.double()(inputs[0].double())
    model.to(torch.bfloat16)
    found, eager = (result.double() for result in (compiled.run(*inputs), model(*inputs)))
    assert (found - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize(
    ("plans", "text"),
    [
        (lambda: {names()[1]: "split"}, "a cluster without row reductions"),
        (lambda: edited(fused="maybe"), "as true or false; found 'maybe'"),
        (lambda: edited(plan=None), "which is to be fused; found none"),
        (lambda: {"matmuls": explained()["matmuls"][:1] * 2}, "twice"),
        (
            lambda: edited(plan={**explained()["matmuls"][0]["plan"], "pipeline_depth": "8"}),
            "field pipeline_depth of type int",
        ),
        (lambda: edited(plan={**explained()["matmuls"][0]["plan"], "pipline_depth": 8}), "unknown ['pipline_depth']"),
    ],
    ids=["no_split_form", "fused_maybe", "no_plan", "twice", "type", "unknown"],
)
def test_wrong_plans_name_the_matmul(plans: Any, text: str) -> None:
    error = refused(plans())
    assert text in str(error)
    assert any(name in str(error) for name in names())


def test_every_reason_of_an_illegal_plan_is_told() -> None:
    plan = {**explained()["matmuls"][0]["plan"], "tile_k": 32, "mma_groups": 2, "pipeline_depth": 17}
    error = refused({names()[0]: plan})
    assert "tile_k must be 64" in error.needed
    assert "pipeline_depth must be 2 to 16" in error.needed
    assert "change pipeline_depth instead; take a pipeline_depth of 2 to" in error.hint
