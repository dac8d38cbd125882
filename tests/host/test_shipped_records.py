"""The records that come with the package answer for the rows they were measured on."""

from __future__ import annotations

import pytest

from tvm_comfuse.bench import suites
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.target import parse_target

ROWS = [row for rows in suites.load().values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_measured_plan(row: Row) -> None:
    """What a record is found by must not change with what is derived from a cluster for other reasons."""
    module = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype))
    (matmul,) = fuse(module, parse_target("h200"), form="fused")[1].matmuls
    assert matmul.plan is not None
    assert matmul.plan_source.startswith("tuned on NVIDIA H200")
