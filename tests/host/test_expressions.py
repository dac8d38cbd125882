"""emit.expressions.rebind: what is the same for a whole row is computed once, and the rest is one fused operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from tvm_comfuse.schedules.normal_form import loads
from tvm_comfuse.tir_passes.emit.expressions import Binding, rebind

M, N = 5, 64
#: (expression of x [M, N] and row values m, r [M], expressions of row values only that are hoisted)
FORMS: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "x": (lambda x, m, r: x, 0),
    "x + m": (lambda x, m, r: x + m, 1),
    "m + x": (lambda x, m, r: m + x, 1),
    "x - m": (lambda x, m, r: x - m, 1),
    "m - x": (lambda x, m, r: m - x, 0),
    "x * r": (lambda x, m, r: x * r, 1),
    "x / r": (lambda x, m, r: x / r, 1),
    "r / x": (lambda x, m, r: r / x, 0),
    "(x - m) * r": (lambda x, m, r: (x - m) * r, 2),
    "r * (m + x)": (lambda x, m, r: r * (m + x), 2),
    "x * r - m": (lambda x, m, r: x * r - m, 2),
    "x / r + m": (lambda x, m, r: x / r + m, 2),
    "((x - m) * r + m) / r - r": (lambda x, m, r: ((x - m) * r + m) / r - r, 2),
    "(x - m) - r": (lambda x, m, r: (x - m) - r, 1),
    "(x - m) * (x - m)": (lambda x, m, r: (x - m) * (x - m), 2),
    "exp((x - m) * r) * m": (lambda x, m, r: te.exp((x - m) * r) * m, 3),
    "x * (m + r)": (lambda x, m, r: x * (m + r), 1),
    "m * r": (lambda x, m, r: m * r, 1),
}


def expression(form: str) -> Any:
    """What the form's block stores."""
    x, m, r = te.placeholder((M, N), "float32", "x"), *(te.placeholder((M,), "float32", name) for name in "mr")
    out = te.compute((M, N), lambda i, j: FORMS[form][0](x[i, j], m[i], r[i]), name="out")
    found: list[Any] = []
    body = te.create_prim_func([x, m, r, out]).body
    tvm_ffi.structural_walk(body, [(tirx.BufferStore, lambda node: found.append(node.value))])
    (value,) = found
    return value


def numbers(form: str, offset: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """(value of the rebound expression in float64, exact value, how many expressions were hoisted)"""
    value = expression(form)
    draw = np.random.default_rng(1)
    values = {"x": draw.standard_normal((M, N)), "m": draw.standard_normal(M), "r": draw.standard_normal(M) + 3.0}
    lacks = draw.standard_normal(M)
    names = {"i": tirx.Var("row", "int32"), "j": tirx.Var("column", "int32")}
    cells = {name: tirx.Var(f"cell_{name}", "float32") for name in (*values, "lacks")}
    hoisted: list[Any] = []

    def hoist(value: Any) -> Any:
        hoisted.append(value)
        return value

    def load(node: Any) -> Any:
        return cells[str(node.source.name)]

    binding = Binding(
        names,
        load,
        of_row=lambda node: len(node.indices) == 1,
        hoist=hoist,
        offset=lambda node: cells["lacks"] if offset and str(node.source.name) == "x" else None,
    )
    bound = rebind(value, binding)
    assert not any(hasattr(value, "source") for value in hoisted)
    held = values["x"] - lacks[:, None] if offset else values["x"]
    at = {
        cells["x"]: held,
        cells["m"]: values["m"][:, None],
        cells["r"]: values["r"][:, None],
        cells["lacks"]: lacks[:, None],
    }
    exact = _evaluate(
        value, lambda node: values["x"] if len(node.indices) == 2 else values[str(node.source.name)][:, None]
    )
    return np.broadcast_to(_evaluate(bound, None, at), (M, N)), np.broadcast_to(exact, (M, N)), len(hoisted)


_OPS = {tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.Div: np.divide}


def _evaluate(node: Any, load: Any, at: Any = None) -> Any:
    if isinstance(node, tvm.ir.TensorLoad):
        return load(node)
    if isinstance(node, tirx.Var):
        return at[node]
    if isinstance(node, tirx.FloatImm):
        return float(node.value)
    if isinstance(node, tvm.ir.Call):
        assert str(node.op.name) == "tirx.exp"
        return np.exp(_evaluate(node.args[0], load, at))
    return _OPS[type(node)](_evaluate(node.a, load, at), _evaluate(node.b, load, at))


@pytest.mark.parametrize("offset", [False, True], ids=["whole", "less_an_offset"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_hoisted_values(form: str, offset: bool) -> None:
    found, exact, hoisted = numbers(form, offset)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    if not offset:
        assert hoisted == FORMS[form][1]


def test_an_affine_value_is_one_multiplication_and_one_addition() -> None:
    value = expression("((x - m) * r + m) / r - r")
    kept = tirx.Var("kept", "float32")
    x = tirx.Var("x", "float32")
    binding = Binding({}, lambda node: x, of_row=lambda node: len(node.indices) == 1, hoist=lambda value: kept)
    bound = rebind(value, binding)
    assert isinstance(bound, tirx.Add)
    assert bound.a.a.same_as(x)
    assert isinstance(bound.a, tirx.Mul)
    assert bound.a.b.same_as(kept)
    assert bound.b.same_as(kept)
    assert loads(bound) == []
