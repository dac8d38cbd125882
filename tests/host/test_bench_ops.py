"""The suites' operators: eager PyTorch, the reference and the Relax module compute the same."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax

from tvm_comfuse.bench.ops import OPS, SHAPES, torch_dtype
from tvm_comfuse.bench.suites import load
from tvm_comfuse.bench.timing import MIN_CALLS, make_sets, median, number_of_sets
from tvm_comfuse.verify.numeric import check, relative_error

M, N, K = 13, 40, 24
#: rounding of a value to the dtype
UNIT = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}


def run_on_cpu(module: tvm.IRModule, inputs: list[torch.Tensor]) -> torch.Tensor:
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    result = machine["main"](*inputs)
    return result if isinstance(result, torch.Tensor) else torch.from_dlpack(result)


def test_suites_use_known_ops() -> None:
    assert {row.op for rows in load().values() for row in rows} <= set(OPS)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_eager_rounds_the_reference(name: str, dtype: str) -> None:
    op = OPS[name]
    inputs = op.make_inputs(M, N, K, dtype, seed=1)
    out = op.eager(*inputs)
    assert out.shape == (M, N)
    assert out.dtype == torch_dtype(dtype)
    assert 0 < relative_error(out, op.exact(inputs)) < 8 * UNIT[dtype]


@pytest.mark.parametrize("name", OPS)
def test_relax_module_computes_the_reference(name: str) -> None:
    op = OPS[name]
    inputs = op.make_inputs(M, N, K, "float32", seed=2)
    out = run_on_cpu(op.relax_module(None, N, K, "float32"), inputs)
    report = check(out, op.exact(inputs), op.eager(*inputs), 4.0)
    assert report.passed, report


def test_relax_module_variants() -> None:
    op = OPS["layer_norm"]
    inputs = op.make_inputs(M, N, K, "float16", seed=3)
    turned = [inputs[0], inputs[1].T.contiguous(), *inputs[2:]]
    out = run_on_cpu(op.relax_module(M, N, K, "float16", out_dtype="float32", w_layout="KN"), turned)
    assert out.dtype == torch.float32
    assert relative_error(out, op.exact(inputs)) < 8 * UNIT["float16"]
    assert "permute_dims" not in op.relax_module(M, N, K, w_layout="KN").script()
    assert "permute_dims" in op.relax_module(M, N, K).script()


def test_inputs_have_their_scale_and_seed() -> None:
    op = OPS["layer_norm"]
    inputs = op.make_inputs(256, 128, 512, "bfloat16", seed=4)
    for (_, kind), value in zip(op.inputs, inputs, strict=True):
        assert list(value.shape) == [{"M": 256, "N": 128, "K": 512}[axis] for axis in SHAPES[kind]]
        scale = 512**-0.5 if kind == "weight" else 1.0
        assert value.float().std().item() == pytest.approx(scale, rel=0.25)
    same, other = (op.make_inputs(256, 128, 512, "bfloat16", seed=seed) for seed in (4, 5))
    assert all(torch.equal(a, b) for a, b in zip(inputs, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(inputs, other, strict=True))


def test_input_sets_exceed_the_cache_and_share_the_weight() -> None:
    op = OPS["layer_norm"]
    one = 2 * (64 * 32 + 64 * 48)
    assert op.bytes_per_call(64, 48, 32) == one
    sets = make_sets(op, 64, 48, 32, "bfloat16", l2_bytes=4 * one, device="cpu")
    assert len(sets) == 13
    assert len(sets) * one > 3 * 4 * one
    assert all(inputs[1] is sets[0][1] for inputs in sets)
    assert len({inputs[0].data_ptr() for inputs in sets}) == len({inputs[2].data_ptr() for inputs in sets}) == 13
    assert not torch.equal(sets[0][0], sets[1][0])
    assert sets[1][0].float().std().item() == pytest.approx(1.0, rel=0.1)


def test_number_of_sets_and_median() -> None:
    # 16384 x (768 + 768) bf16 on the 60 MB of an H200: as in the protocol's first measurements
    assert number_of_sets(2 * 16384 * 1536, 60_000_000) == 4
    assert number_of_sets(10**9, 60_000_000) == 1
    assert MIN_CALLS == 8
    assert median([3.0, 1.0, 2.0, 9.0]) == 3.0
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="bf17"):
        torch_dtype("bf17")
