"""FuseClusters on whole modules: the structure afterwards and the numbers on the LLVM virtual machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.relax import op

from tests.host.relax_models import (
    PATTERNS,
    RUN_M,
    STATIC_M,
    Body,
    K,
    Model,
    N,
    assert_close,
    build,
    inputs,
    run_module,
    symbolic,
)
from tests.host.relax_reference import evaluate
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns import COMPOSITE, ELEMENTWISE, FuseClusters, composite, elementwise, fuse_clusters
from tvm_comfuse.relay_patterns.cluster import Discovery


def calls(mod: tvm.IRModule) -> list[str]:
    """Operators of main in order; a call_tir as the name of its function without the number."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, ir.Call):
                name = binding.value.op.name.removeprefix("relax.")
                names.append(binding.value.args[0].name_hint.rstrip("0123456789") if name == "call_tir" else name)
    return names


def check(mod: tvm.IRModule, given: list[Any], expected: list[str], dtypes: list[str]) -> None:
    """Fuses, compares the calls left, and the outputs with the unfused module in float64."""
    before = mod.script()
    fused = FuseClusters()(mod)
    assert mod.script() == before
    relax.analysis.well_formed(fused)
    assert calls(fused) == expected
    wanted = evaluate(mod["main"], *given)
    for got, want, dtype in zip(run_module(fused, given), wanted, dtypes, strict=True):
        assert got.shape == want.shape
        assert_close(got, want, dtype)


@pytest.mark.parametrize("rows", [STATIC_M, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", ["bias_residual_layer_norm", "gate_residual_norm", "scale_tanh_softmax"])
def test_patterns(name: str, rows: int | None) -> None:
    mod = build(PATTERNS[name], "bfloat16", symbolic() if rows is None else rows)
    check(mod, inputs(mod), ["comfuse_gemm_reduce"], ["bfloat16"] * 2 if "gate" in name else ["bfloat16"])


def test_row_outputs_get_their_shapes_back() -> None:
    mod = build(PATTERNS["row_scaled_statistics"], "float16", symbolic())
    check(mod, inputs(mod), ["comfuse_gemm_reduce", "reshape"], ["float32"] * 3)


def test_leading_dimensions_are_flattened() -> None:
    """x [b, s, K] with both symbolic, a view to two dimensions in between, and [b, s, 1] and [1, 1, N] operands."""
    b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
    builder = relax.BlockBuilder()

    def param(name: str, *shape: Any) -> Any:
        return relax.Var(name, relax.TensorType(shape, "float16"))

    params = [param("x", b, s, K), param("w", K, N), param("bias", 1, 1, N), param("scale", b, s, 1)]
    params += [param("r", b * 1, s, N), param("g", N)]
    x, w, bias, scale, residual, gamma = params
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit(op.add(builder.emit(op.matmul(x, w)), bias))
            y = builder.emit(op.multiply(y, scale))
            flat = builder.emit(op.tanh(builder.emit(op.reshape(y, (b * s, N)))))
            y = builder.emit(op.add(builder.emit(op.reshape(flat, (b, s, N))), residual))
            out = builder.emit_output(op.nn.rms_norm(y, gamma, axes=[-1]))
            total = builder.emit_output(op.sum(flat, -1))
        builder.emit_func_output([out, total])
    mod = builder.finalize()
    draw = np.random.default_rng(1)
    shapes = [(3, 5, K), (K, N), (1, 1, N), (3, 5, 1), (3, 5, N), (N,)]
    given = [draw.standard_normal(shape).astype("float16") for shape in shapes]
    given[1] /= np.float16(K**0.5)
    expected = ["reshape"] * 4 + ["comfuse_gemm_reduce", "reshape", "reshape"]
    check(mod, given, expected, ["float16"] * 2)


def gated(m: Model) -> Any:
    gate = m.matmul()
    up = m.matmul(w=m.param("w2", (N, K)))
    hidden = m.emit(op.multiply(m.emit(op.nn.silu(gate)), up))
    return m.emit(op.nn.layer_norm(m.emit(op.add(hidden, m.tile("r"))), m.col("g"), m.col("be"), axes=[-1]))


def around_an_opaque_operator(m: Model) -> Any:
    y = m.chain(m.matmul(out_dtype="float32"), op.tanh)
    return m.emit(op.add(y, m.emit(op.cumsum(y, -1))))


def two_in_a_circle(m: Model) -> Any:
    a = m.matmul(out_dtype="float32")
    b = m.matmul(w=m.param("w2", (N, K)), out_dtype="float32")
    s = m.emit(op.add(b, m.emit(op.cumsum(a, -1))))
    t = m.emit(op.multiply(a, m.emit(op.cumsum(b, -1))))
    return [s, t]


def two_layers(m: Model) -> Any:
    """The second product reads the first cluster's result; both add the same residual stream."""
    y = m.emit(op.add(m.matmul(out_dtype="float32"), m.tile("r", "float32")))
    n = m.emit(op.astype(m.emit(op.nn.rms_norm(y, m.col("g", "float32"), axes=[-1])), m.dtype))
    z = m.matmul(x=n, w=m.param("w2", (N, N)), out_dtype="float32")
    return m.emit(op.add(y, z))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (gated, ["comfuse_gemm_elementwise", "comfuse_gemm_reduce"]),
        (two_in_a_circle, ["comfuse_gemm_elementwise", "cumsum", "comfuse_gemm_elementwise", "cumsum", "multiply"]),
        (two_layers, ["comfuse_gemm_reduce", "comfuse_gemm_elementwise"]),
        (around_an_opaque_operator, ["comfuse_gemm_elementwise", "cumsum", "add"]),
    ],
    ids=["gated", "circle", "two-layers", "around"],
)
@pytest.mark.parametrize("rows", [STATIC_M, None], ids=["static", "symbolic"])
def test_several_products(body: Body, expected: list[str], rows: int | None) -> None:
    mod = build(body, "float16", symbolic() if rows is None else rows)
    given = inputs(mod)
    fused = FuseClusters()(mod)
    assert sorted(calls(fused)) == sorted(expected)
    for got, want in zip(run_module(fused, given), evaluate(mod["main"], *given), strict=True):
        # a half value between the clusters is rounded in the model too; the float64 reference does not round it
        np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3)


def test_an_outside_operator_between_the_members_is_moved_behind_the_cluster() -> None:
    """cumsum(y) stands between members in the program but reads the cluster's output."""

    def body(m: Model) -> Any:
        y = m.chain(m.matmul(out_dtype="float32"), op.tanh)
        around = m.emit(op.cumsum(y, -1))
        return [m.emit(op.nn.relu(y)), around]

    mod = build(body, "float16", symbolic())
    check(mod, inputs(mod), ["comfuse_gemm_elementwise", "cumsum"], ["float32", "float32"])


def test_one_value_under_two_variables_is_written_once() -> None:
    def body(m: Model) -> Any:
        y = m.chain(m.matmul(), op.nn.relu)
        return [y, m.emit(op.reshape(y, (1, STATIC_M, N)))]

    mod = build(body, "float16", STATIC_M)
    check(mod, inputs(mod), ["comfuse_gemm_elementwise", "reshape"], ["float16"] * 2)


def test_constants_are_operands_or_inlined() -> None:
    weight = np.random.default_rng(5).standard_normal((N, K)).astype("float16") / np.float16(6)
    shift = np.linspace(-1, 1, N).astype("float32")

    def body(m: Model) -> Any:
        y = m.emit(op.astype(m.matmul(w=relax.const(weight)), "float32"))
        y = m.emit(op.add(y, relax.const(shift)))
        y = m.emit(op.multiply(y, relax.const(np.full((1, 1), 3.0, "float32"))))
        return m.emit(op.add(y, m.emit(op.full((N,), relax.const(0.25, "float32")))))

    mod = build(body, "float16", symbolic())
    check(mod, inputs(mod), ["comfuse_gemm_elementwise"], ["float32"])
    func = next(f for f in FuseClusters()(mod).functions.values() if isinstance(f, tirx.PrimFunc))
    assert [param.name for param in func.params] == ["x", "w", "col_0", "stage_0_out0"]


def test_a_refused_cluster_is_tried_without_its_reductions() -> None:
    offered: list[str] = []

    def accept(func: tirx.PrimFunc) -> tirx.PrimFunc | Refusal:
        offered.append(str(func.attrs["comfuse.kind"]))
        return Refusal("too-wide", "no", {}, "") if offered[-1] == "gemm_reduce" else func

    mod = build(PATTERNS["bias_residual_layer_norm"], "float16", symbolic())
    fused, reports = fuse_clusters(mod, accept)
    (report,) = reports["main"].matmuls
    assert offered == ["gemm_reduce", "gemm_elementwise"]
    assert report.fused
    assert report.ops == ["relax.matmul", "relax.add", "relax.add"]
    assert [refusal.code for refusal in report.refusals] == ["too-wide", "reduction-refused"]
    assert calls(fused) == ["comfuse_gemm_elementwise", "nn.layer_norm"]
    given = inputs(mod)
    (got,), (want,) = run_module(fused, given), evaluate(mod["main"], *given)
    np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3)


def test_a_refused_module_is_left_alone() -> None:
    seen: list[tuple[str, Discovery]] = []
    mod = build(PATTERNS["bias_gelu"], "float16", STATIC_M)
    refuse = FuseClusters(lambda _: Refusal("slower", "no", {}, ""), lambda *entry: seen.append(entry))
    assert refuse(mod).script() == mod.script()
    ((name, discovery),) = seen
    assert name == "main"
    assert discovery.clusters == []
    assert [refusal.code for refusal in discovery.matmuls[0].refusals] == ["slower"]


def test_other_functions_stay_and_equal_clusters_share_one_function() -> None:
    def body(m: Model) -> Any:
        y = m.chain(m.matmul(), op.nn.relu)
        z = m.chain(m.matmul(x=m.param("x2", (m.rows, K)), w=m.param("w2", (N, K))), op.nn.relu)
        return [y, z]

    mod = build(body, "float16", STATIC_M)
    mod["other"] = build(PATTERNS["bare"], "float16", RUN_M)["main"].with_attr("global_symbol", "other")
    fused = FuseClusters()(mod)
    assert sorted(var.name_hint for var, func in fused.functions_items() if isinstance(func, relax.Function)) == [
        "main",
        "other",
    ]
    assert len([func for func in fused.functions.values() if isinstance(func, tirx.PrimFunc)]) == 2


def test_a_new_operator_needs_one_function() -> None:
    """atan is not known at first; one decorated function later it is, and so is a composite of the user's."""
    mod = build(
        lambda m: m.chain(m.matmul(out_dtype="float32"), op.atan, lambda v: op.topk(v, 1, ret_type="values")),
        "float16",
        STATIC_M,
    )
    assert calls(FuseClusters()(mod)) == ["comfuse_gemm_elementwise", "atan", "topk"]
    try:

        @elementwise("relax.atan")
        def atan(x: Any) -> Any:
            return tirx.atan(x)

        @composite("relax.topk")
        def topk(use: Any) -> Any:
            return use.refuse_axes(use.attrs.axis) or use.graph.reduction("max", use.args[0])

        fused = FuseClusters()(mod)
        assert calls(fused) == ["comfuse_gemm_reduce"]
        given = inputs(mod)
        (got,) = run_module(fused, given)
        product = given[0].astype("float64") @ given[1].astype("float64").T
        assert_close(got, np.arctan(product).max(-1, keepdims=True), "float32")
    finally:
        ELEMENTWISE.pop("relax.atan", None)
        COMPOSITE.pop("relax.topk", None)
