"""Canonical functions: their blocks, parameters and stages, and their numbers on LLVM against float64."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.relax import op

from tests.host.relax_models import (
    PATTERNS,
    RUN_M,
    STATIC_M,
    K,
    Model,
    N,
    assert_close,
    build,
    inputs,
    symbolic,
)
from tests.host.relax_reference import evaluate
from tvm_comfuse.relay_patterns import Canonical, Cluster, canonicalize, discover

DTYPES = ("float16", "bfloat16")


def one_cluster(mod: tvm.IRModule) -> Cluster:
    (report,) = discover(mod).matmuls
    assert report.cluster is not None, report.refusals
    return report.cluster


def stages_of(func: tirx.PrimFunc) -> list[dict[str, Any]]:
    return json.loads(str(func.attrs["comfuse.stages"]))


def blocks_of(func: tirx.PrimFunc) -> dict[str, Any]:
    """Blocks in program order by name."""
    sch = s_tir.Schedule(func)
    return {str(sch.get(block).name_hint): sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))}


def run_canonical(made: Canonical, cluster: Cluster, mod: tvm.IRModule, given: list[Any]) -> dict[str, Any]:
    """Runs the function on LLVM; outputs by Relax variable name, in float64, M x N or M x 1."""
    values = {param.name: value for param, value in zip(mod["main"].params, given, strict=True)}
    rows = values["x"].reshape(-1, values["x"].shape[-1]).shape[0]
    arrays = [values["x"].reshape(rows, -1), values["w"]]
    for operand in made.operands:
        shape = {"tile": (rows, -1), "col": (-1,), "row": (rows, 1), "scalar": (1,)}[operand.shape]
        arrays.append(values[operand.expr.name].reshape(shape))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    outs = []
    for output in made.outputs:
        columns = cluster.anchor.columns if output.node.shape == "tile" else 1
        outs.append(tvm.runtime.tensor(np.zeros((rows, columns), output.dtype)))
    tvm.compile(tvm.IRModule({"main": made.func}), target="llvm")(*tensors, *outs)
    named = zip(made.outputs, outs, strict=True)
    return {var.name: out.numpy().astype("float64") for output, out in named for var in output.vars}


@pytest.mark.parametrize("rows", [STATIC_M, None, 1], ids=["static", "symbolic", "one-row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(PATTERNS))
def test_numbers(name: str, dtype: str, rows: int | None) -> None:
    mod = build(PATTERNS[name], dtype, symbolic() if rows is None else rows, "KN" if rows is None else "NK")
    cluster = one_cluster(mod)
    made = canonicalize(cluster)
    given = inputs(mod, seed=len(name), rows=RUN_M)
    got = run_canonical(made, cluster, mod, given)
    results = mod["main"].body.body
    names = [field.name for field in results.fields] if hasattr(results, "fields") else [results.name]
    assert sorted(got) == sorted(names)
    dtypes = {var.name: output.dtype for output in made.outputs for var in output.vars}
    for result, want in zip(names, evaluate(mod["main"], *given), strict=True):
        assert_close(got[result].reshape(want.shape), want, dtypes[result])


STAGES: dict[str, list[tuple[str | None, list[str], list[str]]]] = {
    "bias_residual_layer_norm": [
        ("stage_0", ["reduce_0"], []),
        (None, ["reduce_1"], []),
        (None, [], ["stage_2_out0"]),
    ],
    "rms_norm_then_residual": [(None, ["reduce_0"], []), (None, [], ["stage_1_out0"])],
    "scale_tanh_softmax": [("stage_0", ["reduce_0"], []), (None, ["reduce_1"], []), (None, [], ["stage_2_out0"])],
    "gate_residual_norm": [("stage_0", ["reduce_0"], ["stage_0_out0"]), (None, [], ["stage_1_out0"])],
    "bias_gelu": [(None, [], ["stage_0_out0"])],
    "softmax_then_layer_norm": [
        (None, ["reduce_0"], []),
        (None, ["reduce_1"], []),
        ("stage_2", ["reduce_2"], []),
        (None, ["reduce_3"], []),
        (None, [], ["stage_4_out0"]),
    ],
    "row_scaled_statistics": [
        ("stage_0", ["reduce_0", "reduce_0_1"], []),
        (None, ["reduce_1"], ["stage_1_out0"]),
        (None, [], ["stage_2_out0", "stage_2_out1"]),
    ],
}


@pytest.mark.parametrize("name", list(STAGES))
def test_stages(name: str) -> None:
    func = canonicalize(one_cluster(build(PATTERNS[name], "float16", STATIC_M))).func
    found = [(entry["carried"], entry["reductions"], entry["outputs"]) for entry in stages_of(func)]
    assert found == STAGES[name]
    order = ["gemm"]
    for carried, reductions, outputs in found:
        order += [*([carried] if carried else []), *outputs, *reductions]
    assert list(blocks_of(func)) == order


MERGES = {
    "bias_residual_layer_norm": {"reduce_1": ("moments", "reduce_0")},
    "layer_norm_decomposed": {"reduce_1": ("moments", "reduce_0")},
    "scale_tanh_softmax": {"reduce_1": ("softmax", "reduce_0")},
    "softmax_decomposed": {"reduce_1": ("softmax", "reduce_0")},
    "log_softmax": {"reduce_1": ("softmax", "reduce_0")},
    "softmax_then_layer_norm": {"reduce_1": ("softmax", "reduce_0"), "reduce_3": ("moments", "reduce_2")},
    "row_scaled_statistics": {"reduce_1": ("moments", "reduce_0_1")},
    "rms_norm_composite": {},
}


@pytest.mark.parametrize("name", list(MERGES))
def test_merge_pairs(name: str) -> None:
    func = canonicalize(one_cluster(build(PATTERNS[name], "bfloat16", symbolic()))).func
    found = {
        block: (str(body.annotations["comfuse.merge"]), str(body.annotations["comfuse.merge_with"]))
        for block, body in blocks_of(func).items()
        if "comfuse.merge" in body.annotations
    }
    assert found == MERGES[name]


def test_attributes_and_parameters() -> None:
    func = canonicalize(one_cluster(build(PATTERNS["bias_residual_layer_norm"], "bfloat16", symbolic()))).func
    assert str(func.attrs["comfuse.kind"]) == "gemm_reduce"
    assert int(func.attrs["op_pattern"]) == 8
    assert bool(func.attrs["tirx.is_scheduled"])
    assert bool(func.attrs["tirx.noalias"])
    buffers = list(func.params)
    names = [buffer.name for buffer in buffers]
    assert names == ["x", "w", "tile_0", "col_1", "col_2", "col_3", "stage_2_out0"]
    rows = buffers[0].shape[0]
    assert isinstance(rows, tirx.Var)
    assert str(rows.ty.dtype) == "int64"
    shapes = [[rows, K], [N, K], [rows, N], [N], [N], [N], [rows, N]]
    for buffer, shape in zip(buffers, shapes, strict=True):
        assert [str(dim) for dim in buffer.shape] == [str(dim) for dim in shape]
        assert str(buffer.dtype) == "bfloat16"


def test_every_intermediate_is_float32() -> None:
    func = canonicalize(one_cluster(build(PATTERNS["rms_norm_then_residual"], "float16", STATIC_M))).func
    allocated = func.body.block.alloc_buffers
    assert {str(buffer.dtype) for buffer in allocated} == {"float32"}
    assert [buffer.name for buffer in allocated] == ["gemm", "reduce_0"]


def test_casts_of_operands_and_small_arithmetic_are_absorbed() -> None:
    made = canonicalize(one_cluster(build(PATTERNS["rms_norm_then_residual"], "float16", STATIC_M)))
    assert [(operand.expr.name, operand.shape, operand.dtype) for operand in made.operands] == [
        ("r", "tile", "float16"),
        ("g", "col", "float16"),
    ]


def test_offsets_past_32_bits_get_64_bit_indices() -> None:
    def index_type(rows: int) -> str:
        func = canonicalize(one_cluster(build(PATTERNS["bias"], "float16", rows))).func
        return str(blocks_of(func)["gemm"].iter_vars[0].dom.extent.ty.dtype)

    assert index_type(2**31 // N - 8) == "int32"
    assert index_type(2**31 // N) == "int64"


def test_a_value_needed_later_is_recomputed_when_no_single_value_can_be_carried() -> None:
    def body(m: Model) -> Any:
        h = m.matmul()
        y = m.emit(op.add(h, m.tile("r")))
        normed = m.emit(op.nn.rms_norm(y, m.col("g"), axes=[-1]))
        return m.emit(op.multiply(normed, h))

    mod = build(body, "float16", STATIC_M)
    cluster = one_cluster(mod)
    made = canonicalize(cluster)
    assert [entry["carried"] for entry in stages_of(made.func)] == [None, None]
    given = inputs(mod)
    (want,) = evaluate(mod["main"], *given)
    (got,) = run_canonical(made, cluster, mod, given).values()
    assert_close(got, want, "float16")


def test_a_value_is_carried_even_when_no_row_value_is_in_it() -> None:
    """tanh(h) is all that is needed after the first reduction, which needs h itself."""

    def body(m: Model) -> Any:
        h = m.matmul(out_dtype="float32")
        top = m.emit(op.max(h, -1, keepdims=True))
        t = m.emit(op.tanh(h))
        total = m.emit(op.sum(m.emit(op.multiply(t, top)), -1, keepdims=True))
        return m.emit(op.divide(t, m.emit(op.add(m.emit(op.abs(total)), m.const(1.0, "float32")))))

    mod = build(body, "float16", symbolic())
    cluster = one_cluster(mod)
    made = canonicalize(cluster)
    assert [entry["carried"] for entry in stages_of(made.func)] == [None, "stage_1", None]
    given = inputs(mod)
    (want,) = evaluate(mod["main"], *given)
    (got,) = run_canonical(made, cluster, mod, given).values()
    assert_close(got, want, "float32")


@pytest.mark.parametrize(
    "call",
    [op.nn.relu, lambda v: op.nn.leakyrelu(v, 0.1), lambda v: op.clip(v, -1, 1), lambda v: op.maximum(v, v)],
    ids=["relu", "leakyrelu", "clip", "maximum"],
)
def test_nan_survives(call: Any) -> None:
    mod = build(lambda m: m.emit(call(m.matmul())), "float16", STATIC_M)
    given = inputs(mod)
    given[0][3, 5] = np.nan
    cluster = one_cluster(mod)
    (got,) = run_canonical(canonicalize(cluster), cluster, mod, given).values()
    assert np.isnan(got[3]).all()
    assert not np.isnan(np.delete(got, 3, axis=0)).any()


ELEMENTWISE = {
    "exp": op.exp,
    "log": lambda v: op.log(op.exp(v)),
    "sqrt": lambda v: op.sqrt(op.abs(v)),
    "rsqrt": lambda v: op.rsqrt(op.exp(v)),
    "erf": op.erf,
    "tanh": op.tanh,
    "sigmoid": op.sigmoid,
    "silu": op.nn.silu,
    "gelu": op.nn.gelu,
    "gelu_tanh": op.nn.gelu_tanh,
    "selu": op.nn.selu,
    "softplus": lambda v: op.nn.softplus(v, 2.0, 1.5),
    "leakyrelu": lambda v: op.nn.leakyrelu(v, 0.1),
    "relu": op.nn.relu,
    "sin": op.sin,
    "cos": op.cos,
    "floor": op.floor,
    "ceil": op.ceil,
    "trunc": op.trunc,
    "round": op.round,
    "negative": op.negative,
    "square": op.square,
    "power": lambda v: op.power(op.exp(v), op.abs(v)),
    "power_half": lambda v: op.power(op.abs(v), relax_const(0.5)),
    "reciprocal": lambda v: op.power(op.exp(v), relax_const(-1.0)),
    "maximum": lambda v: op.maximum(v, op.negative(v)),
    "minimum": lambda v: op.minimum(v, op.square(v)),
    "clip": lambda v: op.clip(v, -0.5, 1),
    "fma": lambda v: op.ewise_fma(v, v, v),
    "where": lambda v: op.where(
        op.logical_and(op.less(v, relax_const(1.0)), op.greater(v, relax_const(-1.0))), v, op.abs(v)
    ),
    "not_or": lambda v: op.where(
        op.logical_not(op.logical_or(op.less(v, relax_const(-1.0)), op.isnan(v))), v, op.exp(v)
    ),
    "compare": lambda v: op.astype(op.greater_equal(v, op.square(v)), "float32"),
    "equal": lambda v: op.where(op.equal(v, op.abs(v)), v, op.where(op.not_equal(v, v), v, op.negative(v))),
}


def relax_const(value: float) -> Any:

    return relax.const(value, "float32")


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_operators(name: str) -> None:
    mod = build(lambda m: m.emit(ELEMENTWISE[name](m.matmul(out_dtype="float32"))), "float16", symbolic())
    cluster = one_cluster(mod)
    assert len(cluster.ops) > 1
    given = inputs(mod, seed=3)
    (want,) = evaluate(mod["main"], *given)
    (got,) = run_canonical(canonicalize(cluster), cluster, mod, given).values()
    assert_close(got, want, "float32")


def test_prelu_has_one_slope_per_column() -> None:
    mod = build(lambda m: m.emit(op.nn.prelu(m.matmul(), m.col("slope"), 1)), "float16", STATIC_M)
    cluster = one_cluster(mod)
    given = inputs(mod)
    (want,) = evaluate(mod["main"], *given)
    (got,) = run_canonical(canonicalize(cluster), cluster, mod, given).values()
    assert cluster.ops == ("relax.matmul", "relax.nn.prelu")
    assert_close(got, want, "float16")
