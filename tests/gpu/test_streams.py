"""Launches that overlap on several streams: a file of its own, so that a deadlock costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tvm_comfuse.bench.chain import kernel_calls
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import compile_function, new_output
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.numeric import poison

#: all but the first exchange row values across the grid.  Of the launches of half of the SMs two run at once while others find
#: some SMs free, of the small ones all run at once.
ROWS = [
    Row("streams", "narrow", "layer_norm", 2048, 256, 256),
    Row("streams", "wide", "layer_norm", 2048, 1024, 256),
    Row("streams", "all_sms", "layer_norm", 16384, 1024, 256),
    Row("streams", "half_of_the_sms", "layer_norm", 64, 8192, 128),
    # with the package's records: deferred tails, a memory warp group
    Row("streams", "tuned", "layer_norm", 16384, 1024, 1024),
    Row("streams", "handed_over", "rms_norm", 8192, 2304, 2048),
    Row("streams", "small", "layer_norm", 64, 2048, 128),
]
STREAMS, ROUNDS, LAUNCHES = 3, 10, 5

Launch = Callable[[], None]


def compile_row(row: Row, dependent: bool) -> Callable[[list[torch.Tensor], torch.Tensor], None]:
    """The one kernel of a row, with the plan that is known for it but for its launch."""
    module, target = from_relax(OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype)), parse_target("cuda")
    (matmul,) = fuse(module, target, form="fused")[1].matmuls
    assert matmul.plan is not None
    fused, _ = fuse(module, target, {matmul.name: replace(matmul.plan, dependent_launch=dependent)})
    (call,) = kernel_calls(fused) or ()
    kernel = compile_function(fused[call.name], target)
    return lambda inputs, out: kernel(*[inputs[index] for index in call.values], out)


class Launches:
    """A kernel with inputs, outputs and right results for each stream.

    dependent  whether a launch begins before the one in front of it in its stream has ended
    """

    def __init__(self, row: Row, dependent: bool):
        op = OPS[row.op]
        self.run = compile_row(row, dependent)
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.inputs = [op.make_inputs(row.M, row.N, row.K, row.dtype, seed, "cuda") for seed in range(STREAMS)]
        self.outs = [[new_output(row, "cuda") for _ in range(LAUNCHES)] for _ in range(STREAMS)]
        self.expected = [new_output(row, "cuda") for _ in range(STREAMS)]
        for inputs, out in zip(self.inputs, self.expected, strict=True):
            self.run(inputs, out)
        torch.cuda.synchronize()

    def poison(self) -> None:
        """Makes every result wrong."""
        for outs in self.outs:
            for out in outs:
                poison(out)
        torch.cuda.synchronize()

    def launch(self, stream: int, number: int) -> None:
        """On the current stream."""
        self.run(self.inputs[stream], self.outs[stream][number])

    def check(self) -> None:
        """Every result, bit by bit."""
        torch.cuda.synchronize()
        for outs, right in zip(self.outs, self.expected, strict=True):
            assert all(torch.equal(out, right) for out in outs)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_several_streams_at_once(row: Row, dependent: bool) -> None:
    """Launches that overlap must not share row values."""
    launches = Launches(row, dependent)
    for _ in range(ROUNDS):
        launches.poison()
        for number in range(LAUNCHES):
            for index, stream in enumerate(launches.streams):
                with torch.cuda.stream(stream):
                    launches.launch(index, number)
        launches.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_several_graphs_at_once(row: Row, dependent: bool) -> None:
    """The same from CUDA graphs, whose launches the host does not slow down; cooperative launches can be captured."""
    launches = Launches(row, dependent)
    graphs = []
    for index, stream in enumerate(launches.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(LAUNCHES):
                launches.launch(index, number)
        graphs.append(graph)
    for _ in range(ROUNDS):
        launches.poison()
        for graph, stream in zip(graphs, launches.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        launches.check()
