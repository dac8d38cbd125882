"""Launches that overlap on two streams: a file of its own, so that a deadlock costs nothing else."""

from __future__ import annotations

import pytest
import torch

from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import OurKernel, compile_row, new_output
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.numeric import poison

ROWS = [
    Row("streams", "narrow", "layer_norm", 2048, 256, 256),
    Row("streams", "wide", "layer_norm", 2048, 1024, 256),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_two_streams_at_once(row: Row) -> None:
    """Two launches that overlap must not share row values."""
    kernel, op = compile_row(row, parse_target("cuda")), OPS[row.op]
    assert isinstance(kernel, OurKernel), kernel
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sets = [op.make_inputs(row.M, row.N, row.K, row.dtype, seed, "cuda") for seed in (0, 1)]
    expected = [new_output(row, "cuda") for _ in sets]
    for inputs, out in zip(sets, expected, strict=True):
        kernel.run(inputs, out)
    torch.cuda.synchronize()
    for _ in range(10):
        outs = [poison(new_output(row, "cuda")) for _ in sets]
        torch.cuda.synchronize()
        for stream, inputs, out in zip(streams, sets, outs, strict=True):
            with torch.cuda.stream(stream):
                kernel.run(inputs, out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))
