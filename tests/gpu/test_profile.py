"""The instrumented build on a GPU: stamps of every step, and the results that the kernel has without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_comfuse.profile import Profile
from tvm_comfuse.profile.measure import measure
from tvm_comfuse.profile.subject import find_subject
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.emit.stamps import MMA


@pytest.mark.parametrize("row", ["bert_large_attn", "olmo2_1b_o", "small_m"])
def test_a_row(row: str, tmp_path: Path) -> None:
    target = parse_target("cuda")
    # it raises if the stamps change a result
    made = measure(find_subject(row, target), target)
    assert made.left_out == 0
    role = made.summary.roles[MMA]
    assert all(step["main loop"] > 0 and step["drain"] > 0 for step in role.steps)
    assert role.busy + role.waiting + role.outside == pytest.approx(1.0)
    for timeline in made.timelines:
        assert all(0 <= span.begin <= span.end <= timeline.cycles for span in timeline.spans)
        # an SM's clock is between 0.2 and 3 GHz
        assert 0.3 < timeline.cycle_ns < 5
    made.write(tmp_path / "a.json")
    assert Profile.read(tmp_path / "a.json").timelines == made.timelines
