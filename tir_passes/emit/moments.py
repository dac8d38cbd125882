"""Sum and centred sum of squares of a row's part, in one pass where the numbers allow it.

sum (v - m)^2 = sum v^2 - n m^2 costs a pass less than subtracting the mean m from every element, and its subtraction loses as
many bits as sum v^2 is larger than the result.  Rows of a residual stream lie around zero, so it is one bit at most; a warp
that has a row which would lose more makes the second pass (cf. Chan, Golub, LeVeque, 1983, on the accuracy of both).
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import f32, registers, store, when
from tvm_comfuse.tir_passes.emit.instructions import any_of_warp

Expr = Any
#: sum v^2 over the centred sum of squares, up to which one pass does: one bit is lost then, and a value in half precision is
#: rounded with at most sqrt(2) times the error that it has without the mean
MOST = 2.0


def centre(kernel: Any, totals: Any, squares: Any, columns: Expr, far: Any) -> None:
    """Turns sums of squares into centred ones.

    totals   registers [rows]: totals / N are the part's means
    squares  registers [rows]
    columns  of the part, float32
    far      register [1], raised where a row would lose too much; NaN counts as such
    """
    for row in range(kernel.fragment.rows):
        mean = totals[row] * f32(1.0 / kernel.spec.n)
        raw = registers([1], "float32", "raw")
        store(raw, squares[row], 0)
        store(squares, raw[0] - columns * (mean * mean), row)
        with when(T.Not(squares[row] * f32(MOST) >= raw[0])):
            store(far, T.int32(1), 0)


def raised(far: Any) -> Expr:
    """Whether any lane of the warp has raised `far`; the same in all of them."""
    return any_of_warp(far[0])
