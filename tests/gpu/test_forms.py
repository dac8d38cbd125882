"""Forms of models and inputs that suites do not have: symbolic M, W as [K, N], output types, NaN, repeated runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tvm_comfuse
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import OurKernel, Records, compile_row, new_output
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.numeric import check, poison, same_nonfinite

REDUCING = ("layer_norm", "rms_norm", "ln_relu", "rms", "softcap_softmax")
#: one row for each way row values are exchanged: within a CTA, between few CTAs, between many
EXCHANGES = [
    Row("forms", "narrow", "layer_norm", 1024, 256, 256),
    Row("forms", "middle", "layer_norm", 2048, 1024, 256),
    Row("forms", "wide", "rms_norm", 1024, 4096, 256),
]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def assert_right(name: str, out: torch.Tensor, inputs: list[torch.Tensor], dtype: torch.dtype | None = None) -> None:
    op = OPS[name]
    eager = op.eager(*inputs)
    report = check(out, op.exact(inputs), eager if dtype is None else eager.to(dtype))
    assert report.passed, report


def kernel_of(row: Row) -> OurKernel:
    kernel = compile_row(row, parse_target("cuda"), Records(form="fused"))
    assert isinstance(kernel, OurKernel), kernel
    return kernel


@pytest.mark.parametrize("name", REDUCING)
def test_symbolic_rows(name: str, fused: Callable[..., Any]) -> None:
    op = OPS[name]
    compiled = fused(op.relax_module(None, 768, 256))
    for rows in (1, 77, 128, 1000, 16384):
        inputs = op.make_inputs(rows, 768, 256, seed=rows, device="cuda")
        assert_right(name, compiled.run(*inputs), inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [None, 1000])
def test_weight_as_k_by_n(rows: int | None, dtype: str, fused: Callable[..., Any]) -> None:
    op = OPS["layer_norm"]
    compiled = fused(op.relax_module(rows, 1000, 264, dtype, w_layout="KN"))
    inputs = op.make_inputs(1000, 1000, 264, dtype, device="cuda")
    out = compiled.run(inputs[0], inputs[1].T.contiguous(), *inputs[2:])
    assert_right("layer_norm", out, inputs)


@pytest.mark.parametrize("name", ["layer_norm", "softcap_softmax", "bias_gelu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_output(name: str, dtype: str, fused: Callable[..., Any]) -> None:
    op = OPS[name]
    compiled = fused(op.relax_module(520, 512, 256, dtype, out_dtype="float32"))
    inputs = op.make_inputs(520, 512, 256, dtype, device="cuda")
    out = compiled.run(*inputs)
    assert out.dtype == torch.float32
    assert_right(name, out, inputs, torch.float32)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_rows_are_as_in_pytorch_and_the_others_right(
    name: str, bad: float, fused: Callable[..., Any]
) -> None:
    op = OPS[name]
    compiled = fused(op.relax_module(300, 512, 256))
    inputs = op.make_inputs(300, 512, 256, device="cuda")
    hit = [0, 77, 299]
    for row in hit:
        inputs[0][row, row % 256] = bad
    out, eager = compiled.run(*inputs), op.eager(*inputs)
    assert same_nonfinite(out, eager)
    others = torch.ones(300, dtype=torch.bool, device="cuda")
    others[hit] = False
    report = check(out[others], op.exact(inputs)[others], eager[others])
    assert report.passed, report


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_operands(bad: float, fused: Callable[..., Any]) -> None:
    op = OPS["layer_norm"]
    compiled = fused(op.relax_module(300, 512, 256))
    inputs = op.make_inputs(300, 512, 256, device="cuda")
    inputs[2][5, 500] = bad  # the residual: its whole row
    inputs[4][3] = bad  # the gain: one column
    assert same_nonfinite(compiled.run(*inputs), op.eager(*inputs))


def test_export_and_reload(tmp_path: Path, fused: Callable[..., Any]) -> None:
    op = OPS["rms_norm"]
    compiled = fused(op.relax_module(None, 1024, 512))
    path = tmp_path / "model.so"
    compiled.export_library(path)
    loaded = tvm_comfuse.load(path)
    for rows in (64, 1000):
        inputs = op.make_inputs(rows, 1024, 512, device="cuda")
        out = loaded.run(*inputs)
        assert torch.equal(out, compiled.run(*inputs))
        assert_right("rms_norm", out, inputs)


@pytest.mark.parametrize("row", EXCHANGES, ids=lambda row: row.name)
def test_repeated_runs_are_bitwise_equal(row: Row) -> None:
    """Row values must be added in a fixed order, and no run may take those of the run before."""
    kernel, op = kernel_of(row), OPS[row.op]
    sets = [op.make_inputs(row.M, row.N, row.K, row.dtype, seed, "cuda") for seed in (0, 1)]
    first: list[torch.Tensor] = []
    for inputs in sets:
        first.append(poison(new_output(row, "cuda")))
        kernel.run(inputs, first[-1])
        assert_right(row.op, first[-1], inputs)
    out = new_output(row, "cuda")
    for repeat in range(20):
        for inputs, expected in zip(sets, first, strict=True):
            kernel.run(inputs, poison(out))
            assert torch.equal(out, expected), f"repeat {repeat}"


@pytest.mark.parametrize("row", EXCHANGES, ids=lambda row: row.name)
def test_cuda_graph_replays(row: Row) -> None:
    kernel, op = kernel_of(row), OPS[row.op]
    sets = [op.make_inputs(row.M, row.N, row.K, row.dtype, seed, "cuda") for seed in range(3)]
    expected = [new_output(row, "cuda") for _ in sets]
    outs = [new_output(row, "cuda") for _ in sets]
    for inputs, out in zip(sets, expected, strict=True):
        kernel.run(inputs, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs, out in zip(sets, outs, strict=True):
            kernel.run(inputs, out)
    for _ in range(20):
        for out in outs:
            poison(out)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))
