"""Forms of a kernel that a plan asks for: rows of W in another order, functions of the special function unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from interpreted_kernels import BASE, built
from tvm import tirx

from tvm_comfuse.schedules.plan import QUAD_COLUMNS, Plan
from tvm_comfuse.verify.interpreter.memory import SWIZZLE_NONE, Tensor, tensor_map
from tvm_comfuse.verify.interpreter.report import HaltError, Report
from tvm_comfuse.verify.static.index import KernelIndex, index_of

FAR = replace(BASE, operands=("global",), store=("global",))


def quad_values(rows: int, columns: int, box_rows: int) -> list[object]:
    """What emit/tensormaps.quad_map gives cuTensorMapEncodeTiled, without a swizzle."""
    strides = [2 * columns * rows_apart for rows_apart in (1, 8, 2, QUAD_COLUMNS)]
    sizes, box = [columns, 2, 4, 4, rows // QUAD_COLUMNS], [64, 2, 4, 4, box_rows // QUAD_COLUMNS]
    return ["bfloat16", 5, *sizes, *strides, *box, *[1] * 5, 0, SWIZZLE_NONE, 2, 0]


def test_a_load_puts_rows_in_the_order_of_the_registers() -> None:
    """Row 8 q + 2 c + e of every 32 at place 8 c + 2 q + e."""
    rows, columns = 160, 128
    numbers = np.repeat(np.arange(rows, dtype=np.uint16)[:, None], columns, axis=1).view("bfloat16")
    report = Report()
    found = tensor_map("w_map", Tensor("w", numbers, False, report), quad_values(rows, columns, 64), report)
    assert found.corner([64, 0, 0, 0, 2]) == (64, 64)
    box = found.load(64, 64, 0).reshape(64, -1).view(np.uint16)
    assert (box == box[:, :1]).all()
    for block in range(2):
        for q in range(4):
            for c in range(4):
                for e in range(2):
                    assert box[32 * block + 8 * c + 2 * q + e, 0] == 64 + 32 * block + 8 * q + 2 * c + e


def test_rows_behind_the_matrix_are_zeros() -> None:
    report = Report()
    ones = np.ones((96, 64), "bfloat16")
    found = tensor_map("w_map", Tensor("w", ones, False, report), quad_values(96, 64, 64), report)
    box = found.load(0, 64, 0).reshape(64, -1).view("bfloat16").astype(float)
    assert (box[:32] == 1).all()
    assert (box[32:] == 0).all()


@pytest.mark.parametrize(
    ("position", "value"),
    [(8, 2 * 64 * 4), (12, 1), (13, 2)],
    ids=["a stride", "a box with half a pair", "a box with half of the lanes"],
)
def test_a_wrong_map_ends_the_run(position: int, value: int) -> None:
    report = Report()
    values = quad_values(96, 64, 64)
    values[position] = value
    with pytest.raises(HaltError, match="tensor-map"):
        tensor_map("w_map", Tensor("w", np.ones((96, 64), "bfloat16"), False, report), values, report)


def functions_of(example: str, plan: Plan) -> tuple[KernelIndex, str]:
    kernel: tirx.PrimFunc = built(example, plan, 512, 300, 136, "bfloat16", "NK", False, 1).kernel
    return index_of(kernel), kernel.script()


@pytest.mark.parametrize(("example", "used"), [("softmax_cap", True), ("layer_norm", False)])
def test_fast_math_changes_tanh_and_exp_and_nothing_else(example: str, used: bool) -> None:
    plan = replace(FAR, operands=FAR.operands if example == "layer_norm" else ())
    (exact, text), (fast, fast_text) = (functions_of(example, replace(plan, fast_math=on)) for on in (False, True))
    for name, of_stage in (("comfuse_tanh", "T.tanh("), ("comfuse_exp", "T.exp(")):
        assert name not in text
        assert (name in fast_text) == used
        assert (of_stage in text) == used
    # tanh is only in stages; partials of several parts of a row are merged by an exact exp
    assert "T.tanh(" not in fast_text
    assert fast_text.count("T.exp(") < text.count("T.exp(") or not used
    if not used:
        assert fast_text == text
    names = [
        [i.name for i in index.instructions if i.name not in ("comfuse_tanh", "comfuse_exp")] for index in (exact, fast)
    ]
    assert names[0] == names[1]
