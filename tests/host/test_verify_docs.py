"""docs/verify.md says what the checker does: its diagram is drawn from a kernel, and it has every rule."""

from __future__ import annotations

import re

import pytest
from verified_kernels import ROOT, case, codes_in, load_script

from tvm_comfuse.verify.diagram import protocol_diagram

PAGE = ROOT / "docs" / "verify.md"


def test_the_diagram_is_up_to_date() -> None:
    module = load_script("docs/diagram.py")
    assert module.with_diagram(PAGE.read_text()) == PAGE.read_text(), "run: python docs/diagram.py"


def test_every_static_rule_is_explained() -> None:
    codes = codes_in("static", r'(?:Finding|report)\(\s*"([a-z0-9-]+)"')
    assert len(codes) > 40
    named = set(re.findall(r"`([a-z0-9-]+)`", PAGE.read_text()))
    assert sorted(codes - named) == []


def edges(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if "-->" in line}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("pingpong_grid", ["named barriers 1, 2", "global memory", "gives the turn", "stores stage_2_out0"]),
        ("cooperative_multicast", ["one in each CTA that shares W", "a phase is 4 arrivals"]),
        ("cooperative_cluster", ["shared memory of the cluster", "spins for the tag"]),
    ],
)
def test_a_diagram_shows_the_kernel(name: str, parts: list[str]) -> None:
    text = protocol_diagram(case(name).kernel)
    for part in parts:
        assert part in text
    assert text.startswith("flowchart LR\n")
    # every barrier that somebody waits for is also arrived at
    waited = {edge.split()[0] for edge in edges(text) if " wait " in edge}
    reached = {edge.split()[-1] for edge in edges(text)}
    assert {"full", "empty"} <= waited <= reached


def test_what_a_kernel_does_not_have_is_not_drawn() -> None:
    text = protocol_diagram(case("elementwise").kernel)
    assert "mailboxes" not in text
    assert "named barriers" not in text
