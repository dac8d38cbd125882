"""When a deferred tail runs, and where a step is cut in two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from canonical_examples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.plan import EXCHANGE_SCOPES, Plan
from tvm_comfuse.schedules.spec import rounds
from tvm_comfuse.schedules.split import head_blocks, last_round, parking_offset, tail_blocks, tail_stages
from tvm_comfuse.schedules.timetable import (
    EARLY_SLOTS,
    EXCHANGE_SLOTS,
    HALF_BOX,
    LEAST_EXCHANGE_SLOTS,
    Part,
    deferred_slots,
    early_slots,
    least_slots,
    timetable,
)

PLAN = Plan(64, 128, 64, 3, "cooperative", 2, 1, "grid", 1, 1, 128, ("global",), ("global",), defer=True)


@given(
    tile_n=st.sampled_from([64, 128, 192, 256]),
    exchange=st.sampled_from([scope for scope in EXCHANGE_SCOPES if scope != "none"]),
    more=st.integers(0, 40),
    missing=st.integers(0, 63),
)
def test_every_half_box_once_and_nothing_before_its_time(tile_n: int, exchange: str, more: int, missing: int) -> None:
    plan = replace(PLAN, tile_n=tile_n, exchange=exchange)
    slots = least_slots(plan) + more
    k = slots * plan.tile_k - missing
    parts, early = timetable(plan, k), early_slots(plan, k)
    assert [half for part in parts for half in part.tail] == list(range(tile_n // HALF_BOX))
    # row values first, when the partials of the others had time to arrive: all of it once there are slots for it
    (taking,) = (slot for slot, part in enumerate(parts) if part.takes)
    most = 0 if exchange == "warp" else EXCHANGE_SLOTS
    assert taking == most or (more < 2 and LEAST_EXCHANGE_SLOTS <= taking < most)
    assert early >= EARLY_SLOTS or more < 2
    assert all(part.busy == (slot >= taking) for slot, part in enumerate(parts))
    assert not parts[taking].tail
    # the operands of the next head are asked for in the last slots, which have no part of the tail
    assert len(parts) <= slots - early
    # as few half boxes a slot as there are slots for, two at most
    sizes = [len(part.tail) for part in parts[taking + 1 :]]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 2
    assert (max(sizes) == 1) == (slots - early - taking - 1 >= tile_n // HALF_BOX)


def test_the_least_slots_by_hand() -> None:
    """128 columns: partials travel for 2 slots, 1 takes them, 2 do two half boxes each, 1 brings operands."""
    assert least_slots(PLAN) == deferred_slots(128, "grid") == 6
    tail = [Part(True), Part(tail=(0, 1)), Part(tail=(2, 3))]
    assert timetable(PLAN, 6 * 64) == [Part(), Part(), *tail]
    assert timetable(PLAN, 8 * 64) == [Part(), Part(), Part(), *tail]
    assert least_slots(replace(PLAN, exchange="warp", tile_n=64)) == 3


def spec_of(name: str) -> Any:
    return analyze(EXAMPLES[name].build(256, 256, 512, "bfloat16"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_head_and_tail_are_all_blocks_and_the_tail_has_no_reduction(name: str) -> None:
    spec = spec_of(name)
    head, tail = head_blocks(spec), tail_blocks(spec)
    assert not head & tail
    assert head | tail == {block for blocks in spec.passes for block in blocks}
    assert {reduction.block for reduction in spec.reductions} <= head
    late, behind = tail_stages(spec)
    assert {output.block for output in late} | {o.block for stage in behind for o in stage.outputs} <= tail
    # what comes behind the cut belongs to no round any more
    cut = last_round(spec)
    own = {
        reduction.block for members in rounds(spec) for reduction in members if reduction in spec.stages[cut].reductions
    }
    assert own == ({r.block for r in spec.stages[cut].reductions} if cut >= 0 else set())


def test_the_cut_by_hand() -> None:
    norm = spec_of("layer_norm")
    assert last_round(norm) == 0
    assert head_blocks(norm) == {"stage_0", "reduce_0", "reduce_1"}
    assert tail_blocks(norm) == {"stage_2_out0"}
    two = spec_of("gate_two_outputs")
    # the first output is of the carried value, which is made in the pass of the round
    assert head_blocks(two) == {"stage_0", "reduce_0"}
    assert tail_blocks(two) == {"stage_0_out0", "stage_1_out0", "stage_1_out1"}
    assert last_round(spec_of("bias_gelu")) == -1
    assert (head_blocks(spec_of("bias_gelu")), tail_blocks(spec_of("bias_gelu"))) == (frozenset(), {"stage_0_out0"})


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layer_norm", "reduce_0"),
        ("softmax_cap", "reduce_0"),
        ("rms_residual", None),
        # the moments are of the softmax, which is computed from the carried value and may be far from it
        ("norm_of_softmax", None),
    ],
)
def test_a_parked_value_lies_near_what_reduces_it_itself(name: str, block: str | None) -> None:
    found = parking_offset(spec_of(name))
    assert (found.block if found else None) == block
