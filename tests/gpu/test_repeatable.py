"""The same inputs give the same bits, however the CTAs of a launch meet."""

from __future__ import annotations

import pytest
import torch

from tvm_comfuse.bench import suites
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import OurKernel, Records, compile_row, new_output
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.target import parse_target

RUNS = 100


@pytest.mark.parametrize("row", suites.select(suites.load(None), "post_norm", None), ids=lambda row: row.name)
def test_a_hundred_runs_are_equal(row: Row) -> None:
    kernel, op = compile_row(row, parse_target("cuda"), Records(form="fused")), OPS[row.op]
    assert isinstance(kernel, OurKernel), kernel
    inputs = op.make_inputs(row.M, row.N, row.K, row.dtype, 0, "cuda")
    first, out = new_output(row, "cuda"), new_output(row, "cuda")
    kernel.run(inputs, first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS):
        out.fill_(float("nan"))
        kernel.run(inputs, out)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0
