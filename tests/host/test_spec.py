"""schedules.spec reads canonical functions and refuses everything else by clause."""

from __future__ import annotations

import numpy as np
import pytest
from canonical_examples import EXAMPLES, Maker, const, inputs, references, run_on_cpu
from tvm import te

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.row_reducers import REDUCERS
from tvm_comfuse.schedules.analysis import analyze, blocks
from tvm_comfuse.schedules.spec import Operand, Reduction, rounds

F32 = "float32"


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(("layout", "dtype"), [("NK", "float16"), ("KN", "bfloat16")])
def test_examples_compute_what_they_say(name: str, layout: str, dtype: str) -> None:
    example = EXAMPLES[name]
    func = example.build(48, 40, 40, dtype, layout)
    count = len(analyze(func).outputs)
    arrays = inputs(func, count, 48)
    tolerance = {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for got, want in zip(run_on_cpu(func, arrays, count), references(example, arrays, layout), strict=True):
        np.testing.assert_allclose(got.astype("float64"), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("m", [100, 1, None])
def test_shape_and_layout(name: str, layout: str, m: int | None) -> None:
    # N equals K, so that only the indices can tell the layout; M equals N once, so that shapes cannot tell kinds
    spec = analyze(EXAMPLES[name].build(m, 96, 96, "bfloat16", layout))
    assert (spec.m, spec.n, spec.k, spec.w_layout) == (m, 96, 96, layout)
    assert (spec.x_dtype, spec.w_dtype) == ("bfloat16", "bfloat16")
    assert len(spec.stages) == len({stage.index for stage in spec.stages})


def test_layer_norm() -> None:
    spec = analyze(EXAMPLES["layer_norm"].build())
    assert spec.kind == "gemm_reduce"
    assert spec.operands == (
        Operand("b", 2, "col", "float16", ("stage_0",)),
        Operand("r", 3, "tile", "float16", ("stage_0",)),
        Operand("g", 4, "col", "float16", ("stage_2_out0",)),
        Operand("e", 5, "col", "float16", ("stage_2_out0",)),
    )
    assert [stage.carried for stage in spec.stages] == ["stage_0", None, None]
    assert spec.reductions == (
        Reduction("reduce_0", "sum"),
        Reduction("reduce_1", "sum", "moments", "reduce_0"),
    )
    assert [(o.block, o.index, o.kind) for o in spec.outputs] == [("stage_2_out0", 6, "tile")]
    # two additions and the sum; subtraction, square and sum; subtraction, two products and an addition
    assert [stage.operations for stage in spec.stages] == [3, 3, 4]


def test_operand_kinds_when_every_extent_is_equal() -> None:
    spec = analyze(EXAMPLES["gate_two_outputs"].build(64, 64, 64))
    assert [(o.name, o.kind) for o in spec.operands] == [("gate", "tile"), ("row", "row"), ("scale", "scalar")]
    assert [(o.index, o.block, o.dtype, o.kind) for o in spec.outputs] == [
        (5, "stage_1_out0", "float16", "tile"),
        (6, "stage_0_out0", "float32", "tile"),
        (7, "stage_1_out1", "float32", "row"),
    ]
    assert [o.index for o in spec.stages[0].outputs] == [6]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layer_norm", [["reduce_0", "reduce_1"]]),
        ("softmax_cap", [["reduce_0", "reduce_1"]]),
        ("rms_residual", [["reduce_0"]]),
        ("bias_gelu", []),
        ("norm_of_softmax", [["reduce_0"], ["reduce_1"], ["reduce_2", "reduce_3"]]),
        ("min_max_scale", [["reduce_0", "reduce_0_1"]]),
    ],
)
def test_rounds(name: str, expected: list[list[str]]) -> None:
    assert [[r.block for r in group] for group in rounds(analyze(EXAMPLES[name].build()))] == expected


def test_blocks_are_in_program_order_without_the_root() -> None:
    assert list(blocks(EXAMPLES["layer_norm"].build())) == ["gemm", "stage_0", "reduce_0", "reduce_1", "stage_2_out0"]


def test_attribute_kind_must_agree_with_the_reductions() -> None:
    func = EXAMPLES["bias_gelu"].build().with_attr("comfuse.kind", "gemm_reduce")
    with pytest.raises(LoweringError, match="exactly with a row reduction"):
        analyze(func)


# --- functions that break one clause each -----------------------------------------------------------------------------


def _finish(mk: Maker, out: object) -> object:
    return te.create_prim_func([*mk.params, out])


def unknown_block(mk: Maker) -> object:
    v = te.compute((mk.m, mk.n), lambda i, j: mk.gemm[i, j] * const(2.0), name="epilogue")
    return _finish(mk, mk.out(0, lambda i, j: v[i, j]))


def two_tiles_alive(mk: Maker) -> object:
    s0 = mk.stage(0, lambda i, j: te.exp(mk.gemm[i, j]))
    total = mk.reduce("reduce_0", te.sum, lambda i, j: s0[i, j])
    return _finish(mk, mk.out(1, lambda i, j: s0[i, j] / total[i] + mk.gemm[i, j]))


def shifted_column(mk: Maker) -> object:
    return _finish(mk, mk.out(0, lambda i, j: mk.gemm[i, mk.n - 1 - j]))


def row_value_of_the_same_stage(mk: Maker) -> object:
    total = mk.reduce("reduce_0", te.sum, lambda i, j: mk.gemm[i, j])
    other = mk.reduce("reduce_0_1", te.sum, lambda i, j: mk.gemm[i, j] * total[i])
    return _finish(mk, mk.out(1, lambda i, j: mk.gemm[i, j] * other[i]))


def half_between(mk: Maker) -> object:
    s0 = te.compute((mk.m, mk.n), lambda i, j: mk.gemm[i, j].astype("float16"), name="stage_0")
    total = mk.reduce("reduce_0", te.sum, lambda i, j: s0[i, j].astype(F32))
    return _finish(mk, mk.out(1, lambda i, j: s0[i, j].astype(F32) / total[i]))


def hole_in_the_levels(mk: Maker) -> object:
    total = mk.reduce("reduce_0", te.sum, lambda i, j: mk.gemm[i, j])
    return _finish(mk, mk.out(2, lambda i, j: mk.gemm[i, j] * total[i]))


def x_read_again(mk: Maker) -> object:
    x = mk.params[0]
    return _finish(mk, mk.out(0, lambda i, j: mk.gemm[i, j] + x[i, j].astype(F32)))


def product_reduction(mk: Maker) -> object:
    def multiply(value, axis):
        return te.comm_reducer(lambda a, b: a * b, lambda t: const(1.0), "prod")(value, axis=axis)

    total = mk.reduce("reduce_0", multiply, lambda i, j: mk.gemm[i, j])
    return _finish(mk, mk.out(1, lambda i, j: mk.gemm[i, j] * total[i]))


def not_centred(mk: Maker) -> object:
    total = mk.reduce("reduce_0", te.sum, lambda i, j: mk.gemm[i, j])
    squares = mk.reduce(
        "reduce_1", te.sum, lambda i, j: mk.gemm[i, j] * mk.gemm[i, j] - total[i], "moments", "reduce_0"
    )
    return _finish(mk, mk.out(2, lambda i, j: mk.gemm[i, j] * squares[i]))


def wrong_mean(mk: Maker) -> object:
    total = mk.reduce("reduce_0", te.sum, lambda i, j: mk.gemm[i, j])

    def d(i, j):
        return mk.gemm[i, j] - total[i] * const(2.0 / mk.n)

    squares = mk.reduce("reduce_1", te.sum, lambda i, j: d(i, j) * d(i, j), "moments", "reduce_0")
    return _finish(mk, mk.out(2, lambda i, j: mk.gemm[i, j] * squares[i]))


def pair_of_another_value(mk: Maker) -> object:
    top = mk.reduce("reduce_0", REDUCERS["max"], lambda i, j: mk.gemm[i, j] * const(2.0))
    total = mk.reduce("reduce_1", te.sum, lambda i, j: te.exp(mk.gemm[i, j] - top[i]), "softmax", "reduce_0")
    return _finish(mk, mk.out(2, lambda i, j: te.exp(mk.gemm[i, j] - top[i]) / total[i]))


def swapped_product(mk: Maker) -> object:
    x, w = mk.params
    k = te.reduce_axis((0, mk.k), "k")
    gemm = te.compute((mk.m, mk.n), lambda i, j: te.sum(w[j, k].astype(F32) * x[i, k].astype(F32), axis=k), name="gemm")
    return _finish(mk, te.compute((mk.m, mk.n), lambda i, j: gemm[i, j], name="stage_0_out0"))


BROKEN = [
    (unknown_block, "blocks named gemm"),
    (two_tiles_alive, "read the carried tile"),
    (shifted_column, r"at \[i, j\]"),
    (row_value_of_the_same_stage, "row values of earlier stages"),
    (half_between, "float32 between the blocks"),
    (hole_in_the_levels, "without holes"),
    (x_read_again, "parameters behind x and w"),
    (product_reduction, "sum, max or min"),
    (not_centred, "written as"),
    (wrong_mean, "the same value"),
    (pair_of_another_value, "the same value"),
    (swapped_product, "multiply x"),
]


@pytest.mark.parametrize(("make", "clause"), BROKEN, ids=[make.__name__ for make, _ in BROKEN])
def test_every_other_form_is_refused_by_its_clause(make, clause: str) -> None:
    func = make(Maker(32, 64, 64, "float16", "NK"))
    with pytest.raises(LoweringError, match=clause):
        analyze(func)
