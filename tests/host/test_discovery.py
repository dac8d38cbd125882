"""What discovery takes into a cluster, where it stops and the reason it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tests.host.relax_models import PATTERNS, STATIC_M, K, Model, N, build, symbolic
from tvm_comfuse.errors import ModelError
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns import discover
from tvm_comfuse.relay_patterns.cluster import MatmulReport


def reports(mod: tvm.IRModule) -> list[MatmulReport]:
    return discover(mod).matmuls


def only(mod: tvm.IRModule) -> MatmulReport:
    (report,) = reports(mod)
    return report


def short(report: MatmulReport) -> list[str]:
    return [name.removeprefix("relax.").removeprefix("nn.") for name in report.ops]


@pytest.mark.parametrize("rows", [STATIC_M, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_pattern_is_one_cluster(name: str, rows: int | None) -> None:
    mod = build(PATTERNS[name], "bfloat16", symbolic() if rows is None else rows)
    report = only(mod)
    outside = {"relax.permute_dims"}
    absorbed = {"rms_norm_then_residual": 2, "layer_norm_decomposed": 2}.get(name, 0)
    values = [binding.value for binding in mod["main"].body.blocks[0].bindings]
    names = [value.op.name for value in values if hasattr(value, "op")]
    assert report.fused
    assert report.refusals == []
    assert len(report.ops) == len([each for each in names if each not in outside]) - absorbed
    assert report.shape == [rows or "m", N, K]
    has_rows = any(word in name for word in ("norm", "softmax", "statistics"))
    assert report.cluster is not None
    assert report.cluster.kind == ("gemm_reduce" if has_rows else "gemm_elementwise")
    assert json.loads(json.dumps(report.to_json()))["fused"] is True


@pytest.mark.parametrize(
    ("n", "k", "rows", "code", "numbers"),
    [
        (64, 100, 24, "k-alignment", {"K": 100, "multiple": 8}),
        (60, 32, 24, "n-alignment", {"N": 60, "multiple": 8}),
        (64, 32, 0, "zero-m", {"M": 0, "N": 64, "K": 32}),
    ],
)
@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_sizes_that_are_refused(n: int, k: int, rows: int, code: str, numbers: dict[str, int], layout: str) -> None:
    report = only(build(PATTERNS["bias"], "float16", rows, layout, n=n, k=k))
    assert not report.fused
    assert report.cluster is None
    (refusal,) = report.refusals
    assert (refusal.code, refusal.numbers) == (code, numbers)
    assert refusal.remedy


def product_of(x: tuple[Any, ...], w: tuple[Any, ...], x_type: str = "float16", w_type: str = "") -> tvm.IRModule:
    builder = relax.BlockBuilder()
    params = [
        relax.Var("x", relax.TensorType(x, x_type)),
        relax.Var("w", relax.TensorType(w, w_type or x_type)),
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(op.matmul(*params, out_dtype="float32"))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.parametrize(
    ("mod", "code"),
    [
        (product_of((4, 24, 32), (4, 32, 64)), "batched-weight"),
        (product_of((24, 32), (32,)), "batched-weight"),
        (product_of((24, 32), (32, 64), "float32"), "dtype"),
        (product_of((24, tirx.Var("k", "int64")), (32, 64)), None),
        (product_of((24, 32), (32, tirx.Var("n", "int64"))), "symbolic-n"),
    ],
    ids=["batched", "vector", "float32", "k-known-from-w", "symbolic-n"],
)
def test_products_that_are_refused(mod: tvm.IRModule, code: str | None) -> None:
    report = only(mod)
    assert [refusal.code for refusal in report.refusals] == ([code] if code else [])
    assert report.fused == (code is None)


@pytest.mark.parametrize("shape", [(2, 12, 32), (1, 1, 32), (32,), (2, 3, 4, 32)])
def test_any_rank_of_x(shape: tuple[int, ...]) -> None:
    report = only(product_of(shape, (32, 64)))
    rows = 1
    for size in shape[:-1]:
        rows *= size
    assert report.fused
    assert report.shape == [rows, 64, 32]


def test_symbolic_sizes_print_plainly() -> None:
    batch = tirx.Var("batch", "int64")
    assert only(product_of((batch, 16, 32), (32, 64))).shape == ["batch * 16", 64, 32]


def test_widened_halves_are_a_half_product() -> None:
    def body(m: Model) -> Any:
        x, w = m.emit(op.astype(m.x, "float32")), m.emit(op.astype(m.w, "float32"))
        return m.emit(op.matmul(x, m.emit(op.permute_dims(w))))

    report = only(build(body, "bfloat16", STATIC_M))
    assert report.cluster is not None
    anchor = report.cluster.anchor
    assert (anchor.x.name, anchor.w.name, anchor.layout, anchor.dtype) == ("x", "w", "NK", "bfloat16")


def heads(m: Model) -> Any:
    return op.reshape(m.matmul(), (STATIC_M, 4, N // 4))


def partial_rows(m: Model) -> Any:
    y = m.emit(op.reshape(m.matmul(), (2, STATIC_M // 2, N)))
    return op.add(y, m.param("position", (STATIC_M // 2, N)))


def column_sum(m: Model) -> Any:
    return op.sum(m.matmul(), 0)


def transpose(m: Model) -> Any:
    return op.permute_dims(m.matmul())


def integers(m: Model) -> Any:
    return op.astype(m.matmul(), "int32")


def comparison(m: Model) -> Any:
    return op.greater(m.matmul(), m.const(0.0))


def doubles(m: Model) -> Any:
    return op.astype(m.matmul(), "float64")


def running_sum(m: Model) -> Any:
    return op.cumsum(m.matmul(), -1)


def bool_operand(m: Model) -> Any:
    return op.where(m.tile("mask", "bool"), m.matmul(), m.const(0.0))


def grown_rows(m: Model) -> Any:
    return op.add(m.matmul(), m.param("stack", (5, STATIC_M, N)))


def row_vector_in_column_place(m: Model) -> Any:
    """[M] against [M, N] aligns with the columns: with M = N the shapes agree and the meaning does not."""
    h = m.matmul()
    return op.add(h, m.emit(op.max(h, -1, keepdims=False)))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (heads, "row-order-changed"),
        (partial_rows, "operand-broadcast"),
        (column_sum, "not-last-axis"),
        (transpose, "row-order-changed"),
        (integers, "integer-output"),
        (comparison, "integer-output"),
        (doubles, "dtype"),
        (running_sum, "opaque-operator"),
        (bool_operand, "operand-dtype"),
        (grown_rows, "operand-broadcast"),
    ],
)
def test_where_growth_stops(body: Callable[[Model], Any], code: str) -> None:
    report = only(build(lambda m: m.emit(body(m)), "float16", STATIC_M))
    assert report.fused
    assert report.ops[0] == "relax.matmul"
    (refusal,) = report.refusals
    assert refusal.code == code, refusal
    assert refusal.numbers["operator"]
    assert refusal.clause


def test_a_row_value_that_broadcasts_along_columns_is_not_taken() -> None:
    report = only(build(lambda m: m.emit(row_vector_in_column_place(m)), "float16", N))
    assert short(report) == ["matmul", "max"]
    assert [refusal.code for refusal in report.refusals] == ["operand-broadcast"]


def test_a_comparison_stays_when_it_would_have_to_leave() -> None:
    def body(m: Model) -> Any:
        y = m.matmul()
        keep = m.emit(op.greater(y, m.const(0.0)))
        return [keep, m.emit(op.where(keep, y, m.const(1.0)))]

    report = only(build(body, "float16", STATIC_M))
    assert short(report) == ["matmul"]
    assert [refusal.code for refusal in report.refusals] == ["integer-output", "operand-dtype"]


def test_views_and_casts_join() -> None:
    def body(m: Model) -> Any:
        y = m.chain(
            m.matmul(),
            lambda v: op.reshape(v, (2, STATIC_M // 2, N)),
            lambda v: op.astype(v, "float32"),
            lambda v: op.expand_dims(v, 1),
            lambda v: op.squeeze(v, [1]),
            lambda v: op.reshape(v, (STATIC_M, N)),
        )
        total = m.chain(y, lambda v: op.sum(v, -1), lambda v: op.expand_dims(v, -1))
        return m.emit(op.multiply(y, m.emit(op.broadcast_to(total, (STATIC_M, N)))))

    report = only(build(body, "float16", STATIC_M))
    assert report.refusals == []
    assert len(report.ops) == 10


def test_the_last_of_two_products_takes_their_sum() -> None:
    def body(m: Model) -> Any:
        first = m.matmul()
        second = m.matmul(w=m.param("w2", (N, K)))
        gate = m.emit(op.nn.silu(first))
        return m.emit(op.nn.rms_norm(m.emit(op.multiply(gate, second)), m.col("g"), axes=[-1]))

    first, second = reports(build(body, "float16", symbolic()))
    assert short(first) == ["matmul", "silu"]
    assert short(second) == ["matmul", "multiply", "rms_norm"]
    assert [refusal.code for refusal in first.refusals] == ["foreign-matmul"]
    assert second.refusals == []


def test_a_value_through_an_opaque_operator_does_not_come_back() -> None:
    def body(m: Model) -> Any:
        y = m.chain(m.matmul(), op.tanh)
        around = m.emit(op.cumsum(y, -1))
        return m.emit(op.add(y, around))

    report = only(build(body, "float16", STATIC_M))
    assert short(report) == ["matmul", "tanh"]
    assert [refusal.code for refusal in report.refusals] == ["opaque-operator", "not-convex"]


def test_two_clusters_never_wait_for_each_other() -> None:
    """Each of two products has an operand that depends on the other: legal one by one, a circle together."""

    def body(m: Model) -> Any:
        a = m.matmul()
        b = m.matmul(w=m.param("w2", (N, K)))
        s = m.emit(op.add(b, m.emit(op.cumsum(a, -1))))
        t = m.emit(op.multiply(a, m.emit(op.cumsum(b, -1))))
        return [s, t]

    first, second = reports(build(body, "float16", STATIC_M))
    assert short(second) == ["matmul", "add"]
    assert short(first) == ["matmul"]
    assert [refusal.code for refusal in first.refusals] == ["opaque-operator", "not-convex"]


def test_a_value_that_a_later_cluster_reads_in_half_is_written_once() -> None:
    """The cast in front of the second product's sum is a part of that cluster, not an output of the first."""

    def body(m: Model) -> Any:
        first = m.matmul()
        wide = m.emit(op.astype(first, "float32"))
        second = m.matmul(x=m.param("x2", (m.rows, K)), out_dtype="float32")
        return m.emit(op.add(second, wide))

    first, second = reports(build(body, "float16", STATIC_M))
    assert first.cluster is not None
    assert second.cluster is not None
    assert [output.dtype for output in first.cluster.outputs] == ["float16"]
    assert [operand.dtype for operand in second.cluster.operands] == ["float16"]


def test_expressions_and_operands_are_bounded() -> None:
    def doubling(m: Model) -> Any:
        return m.chain(m.matmul(), *[lambda v: op.multiply(v, v)] * 12)

    def many(m: Model) -> Any:
        return m.chain(m.matmul(), *[lambda v, i=i: op.add(v, m.col(f"b{i}")) for i in range(20)])

    grown = only(build(doubling, "float16", STATIC_M))
    assert [refusal.code for refusal in grown.refusals] == ["expression-size"]
    full = only(build(many, "float16", STATIC_M))
    assert [refusal.code for refusal in full.refusals] == ["operand-count"]
    assert len(full.ops) == 17


def test_matmuls_in_branches_are_reported() -> None:
    source = product_of((24, 32), (32, 64))["main"]
    x, w = source.params
    condition = relax.Var("condition", relax.TensorType((), "bool"))
    builder = relax.BlockBuilder()
    with builder.function("main", [condition, x, w]):
        branches = []
        for scale in (1.0, 2.0):
            product = relax.Var("product", relax.TensorType((24, 64), "float32"))
            scaled = relax.Var("scaled", relax.TensorType((24, 64), "float32"))
            bindings = [
                relax.VarBinding(product, op.matmul(x, w, out_dtype="float32")),
                relax.VarBinding(scaled, op.multiply(product, relax.const(scale, "float32"))),
            ]
            branches.append(relax.SeqExpr([relax.BindingBlock(bindings)], scaled))
        out = builder.emit(relax.If(condition, *branches))
        builder.emit_func_output(out)
    found = reports(builder.get())
    assert [refusal.code for report in found for refusal in report.refusals] == ["not-dataflow"] * 2


def test_no_matmul_and_no_function() -> None:
    mod = build(lambda m: m.emit(op.nn.relu(m.x)), "float16", STATIC_M)
    assert reports(mod) == []
    with pytest.raises(ModelError, match="decode"):
        discover(mod, "decode")


def test_a_refusal_prints_its_reason() -> None:
    report = only(build(PATTERNS["bias"], "float16", STATIC_M, k=100))
    refusal: Refusal = report.refusals[0]
    assert str(refusal) == (
        "K must be a positive multiple of 8 (rows aligned to 16 bytes) (K=100, multiple=8); pad K to 104"
    )


def test_a_function_without_dataflow_blocks_is_searched_too() -> None:
    params = list(product_of((24, 32), (32, 64))["main"].params)
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(op.matmul(*params)))
    assert short(only(builder.get())) == ["matmul"]
