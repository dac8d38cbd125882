"""What a plan computes less exactly is allowed for, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import is_cluster
from tvm_comfuse.verify.api import verify_kernel
from tvm_comfuse.verify.dynamic import error, random_inputs
from tvm_comfuse.verify.inexact import TANH_ERROR, of_plan
from tvm_comfuse.verify.interpreter import values
from tvm_comfuse.verify.reference import reference

M, N, K = 64, 64, 64


def model() -> tvm.IRModule:
    """tanh(h + 3), which is positive, and its sum over each row, in float32."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((rows, K), "bfloat16")) for name, rows in (("x", M), ("w", N)))
    op, emit = relax.op, builder.emit
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = emit(op.matmul(x, emit(op.permute_dims(w)), out_dtype="float32"))
            shifted = emit(op.tanh(emit(op.add(product, relax.const(3.0, "float32")))))
            total = builder.emit_output(op.sum(shifted, -1, keepdims=True))
        builder.emit_func_output(total)
    return builder.get()


@pytest.fixture(scope="module")
def func() -> Any:
    """The model's cluster with a plan that has approximate functions."""
    module, target = from_relax(model()), parse_target("h200")
    (matmul,) = fuse(module, target, form="fused")[1].matmuls
    assert matmul.plan is not None
    fused, _ = fuse(module, target, {matmul.name: replace(matmul.plan, fast_math=True)})
    (found,) = (found for _, found in fused.functions_items() if is_cluster(found))
    return found


def test_the_model_of_a_coarse_tanh_spares_no_sum(func: Any) -> None:
    spec = analyze(func)
    (matmul,) = fuse(from_relax(model()), parse_target("h200"), form="fused")[1].matmuls
    inputs = random_inputs(func, M, 1, seed=0)
    plan = replace(matmul.plan, fast_math=True)
    (exact,), (coarse,) = reference(func, inputs), reference(func, inputs, of_plan(plan, spec))
    assert error(coarse, exact) == pytest.approx(TANH_ERROR / 2, rel=0.1)
    (unchanged,) = reference(func, inputs, of_plan(replace(plan, fast_math=False), spec))
    np.testing.assert_array_equal(unchanged, exact)


@pytest.mark.parametrize(("times", "passes"), [(1.0, True), (-1.0, True), (8.0, False)])
def test_an_error_of_one_sign_adds_up(monkeypatch: pytest.MonkeyPatch, func: Any, times: float, passes: bool) -> None:
    """Sums keep the bound that the instruction keeps; an instruction that is eight times as coarse is found."""

    def coarse(x: Any) -> Any:
        return (np.tanh(x) * (1.0 + times * TANH_ERROR)).astype(np.float32)

    monkeypatch.setitem(values.WRAPPED, "func.comfuse_tanh", coarse)
    result = verify_kernel("tanh_sum", func, H200, seeds=(0,))
    assert [finding.code for finding in result.findings] == ([] if passes else ["numbers"])
    assert result.interleavings > 0


def test_two_functions_of_one_element_do_not_err_the_same_way(func: Any) -> None:
    """Or the quotient of both would be taken for exact, and a kernel's blamed."""
    (matmul,) = fuse(from_relax(model()), parse_target("h200"), form="fused")[1].matmuls
    tanh = of_plan(replace(matmul.plan, fast_math=True), analyze(func)).calls["tanh"]
    h = np.random.default_rng(0).normal(size=(M, N))
    quotient, exact = tanh(h) / tanh(h + 1.0), np.tanh(h) / np.tanh(h + 1.0)
    assert np.median(np.abs(quotient / exact - 1.0)) < 1e-12
    assert np.mean(np.abs(quotient / exact - 1.0) > TANH_ERROR) == pytest.approx(2 * 0.25 * 0.75, abs=0.05)
