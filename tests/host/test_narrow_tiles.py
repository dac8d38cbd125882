"""Tiles that are whole quads, but not whole boxes of 64 columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verified_kernels import assert_right

from tvm_comfuse.bench.ours import compile_executable
from tvm_comfuse.cuda import compile_cubin, sources
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.families import Family

TARGET = parse_target("h200")
AT_ONCE = Plan(
    64,
    160,
    64,
    2,
    "cooperative",
    2,
    1,
    "grid",
    1,
    1,
    2,
    ("global",),
    ("global",),
    w_order="quads",
    dependent_launch=True,
)
DEFERRED = replace(AT_ONCE, defer=True)
#: the result is 5 or 3 quads wide; where it is ragged, the last tile has one quad less
CASES = [
    Family("at_once", "layer_norm", 384, 320, 192, AT_ONCE),
    Family("deferred", "layer_norm", 384, 320, 576, DEFERRED),
    Family("packed_ragged", "rms_norm", 300, 288, 576, replace(DEFERRED, packed_tail=True)),
    Family("three_quads", "softcap_softmax", 300, 288, 576, replace(DEFERRED, tile_n=96, operands=(), ctas=6)),
    Family("pingpong", "layer_norm", 300, 192, 192, replace(AT_ONCE, tile_n=96, layout="pingpong", groups_m=1)),
    # five quads of W are loaded by two CTAs in turns
    Family("multicast", "layer_norm", 640, 320, 576, replace(DEFERRED, cluster_m=2, ctas=4)),
    Family("one_quad", "layer_norm", 300, 96, 192, replace(AT_ONCE, tile_n=32, ctas=3)),
]


@pytest.mark.parametrize("slow", [None, "cta0", "load"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_and_protocol(case: Family, slow: str | None) -> None:
    func = case.cluster(TARGET)
    assert_right(func, case.m, 1, slow)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=lambda case: case.name)
def test_nothing_is_spilled(case: Family) -> None:
    (source,) = sources(compile_executable(case.cluster(TARGET), TARGET))
    report = compile_cubin(source, "sm_90a")
    assert (report.spill_stores, report.spill_loads, report.warnings) == (0, 0, ())
