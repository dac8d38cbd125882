"""schedules.plan goes to JSON and back and refuses what is not a plan."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from tvm_comfuse.errors import PlanError
from tvm_comfuse.schedules.plan import Plan

PLAN = Plan(64, 256, 64, 4, "pingpong", 1, 1, "grid", 2, 1, 128, ("tma", "global"), ("tma",))


def test_json_round_trip() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert json.loads(PLAN.to_json())["operands"] == ["tma", "global"]
    assert "\n" not in PLAN.to_json()


def test_optional_fields_have_defaults() -> None:
    values = PLAN.to_dict()
    for name in ("operands", "store", "fast_math", "defer", "w_order", "w_resident", "mma_groups", "dependent_launch"):
        del values[name]
    assert Plan.from_dict(values) == replace(PLAN, operands=(), store=())


def test_short_says_where_w_is() -> None:
    assert "resident" not in PLAN.short()
    assert replace(PLAN, w_resident=True).short() == PLAN.short().replace("pingpong", "pingpong, W resident")
    assert Plan.from_json(replace(PLAN, w_resident=True).to_json()).w_resident


def test_two_mma_warp_groups_unless_the_plan_says_more() -> None:
    three = replace(PLAN, mma_groups=3)
    assert (PLAN.mma_groups, PLAN.threads, three.threads) == (2, 384, 512)
    assert Plan.from_json(three.to_json()) == three
    assert three.short() == PLAN.short().replace("pingpong", "pingpong of 3 groups")
    assert three.cta_rows == 3 * three.tile_m


def test_a_plan_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PLAN.tile_m = 128  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_m": "64"}, "tile_m"),
        ({"tile_m": True}, "tile_m"),
        ({"fast_math": 1}, "fast_math"),
        ({"w_resident": 1}, "w_resident"),
        ({"mma_groups": "3"}, "mma_groups"),
        ({"layout": 3}, "layout"),
        ({"operands": "tma"}, "operands"),
        ({"waves": 2}, "unknown"),
    ],
)
def test_wrong_values(change: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({**PLAN.to_dict(), **change})


@pytest.mark.parametrize("text", ["{", "[1]", "3", "{}"])
def test_wrong_json(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("layout", "groups", "rows", "columns"),
    [("pingpong", (1, 1), 128, 256), ("cooperative", (2, 1), 128, 256), ("cooperative", (1, 2), 64, 512)],
)
def test_cta_tile(layout: str, groups: tuple[int, int], rows: int, columns: int) -> None:
    plan = replace(PLAN, layout=layout, groups_m=groups[0], groups_n=groups[1])
    assert (plan.cta_rows, plan.cta_columns) == (rows, columns)
