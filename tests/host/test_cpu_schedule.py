"""The CPU schedule: right numbers for every layout and size, and the structure that makes it quick."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from canonical_examples import Maker, layer_norm
from tvm import te

from tvm_comfuse.cpu_schedule import cpu_schedule
from tvm_comfuse.errors import LoweringError
from tvm_comfuse.target import parse_target

#: largest error of a result rounded to the dtype: half a unit of the last place, and float32 sums in front
TOLERANCE = {"bfloat16": 4e-3, "float16": 5e-4}
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _layer_norm(m: int | None, n: int, k: int, dtype: str, layout: str) -> Any:
    return layer_norm(Maker(m, n, k, dtype, layout))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize(("symbolic", "m", "n", "k"), [(False, 5, 96, 64), (True, 7, 40, 24), (True, 1, 33, 17)])
def test_numbers(dtype: str, layout: str, symbolic: bool, m: int, n: int, k: int) -> None:
    func = cpu_schedule(_layer_norm(None if symbolic else m, n, k, dtype, layout))
    kernel = tvm.compile(func, target=parse_target("llvm"))["main"]
    random = np.random.default_rng(m + n + k)
    shapes = [(m, k), (n, k) if layout == "NK" else (k, n), (n,), (m, n), (n,), (n,)]
    values = [random.standard_normal(shape).astype(NUMPY[dtype]) for shape in shapes]
    out = tvm.runtime.tensor(np.full((m, n), np.nan).astype(NUMPY[dtype]))
    kernel(*[tvm.runtime.tensor(value) for value in values], out)
    x, w, b, r, g, e = (value.astype(np.float64) for value in values)
    v = x @ (w.T if layout == "NK" else w) + b + r
    d = v - v.mean(-1, keepdims=True)
    expected = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * g + e
    error = np.linalg.norm(out.numpy().astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE[dtype]


def test_structure() -> None:
    script = cpu_schedule(_layer_norm(None, 96, 128, "bfloat16", "NK")).script()
    assert script.count("T.parallel") == 5
    assert "T.vectorized(64)" in script
    for block in ("gemm", "stage_0", "reduce_0", "reduce_1", "stage_2_out0"):
        assert f'T.sblock("{block}")' in script


def test_argument_and_attributes_stay() -> None:
    func = _layer_norm(16, 96, 64, "bfloat16", "NK")
    before = func.script()
    scheduled = cpu_schedule(func)
    assert func.script() == before
    assert scheduled.script() != before
    assert str(scheduled.attrs["comfuse.kind"]) == "gemm_reduce"
    assert str(scheduled.attrs["global_symbol"]) == "main"
    assert "global_symbol" not in cpu_schedule(func.without_attr("global_symbol")).attrs


def test_refuses_a_function_without_gemm() -> None:
    a = te.placeholder((4,), "float32", "a")
    func = te.create_prim_func([a, te.compute((4,), lambda i: a[i] + 1, name="plus")])
    with pytest.raises(LoweringError, match="plus"):
        cpu_schedule(func)
