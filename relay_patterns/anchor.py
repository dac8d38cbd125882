"""The matmul a cluster grows from: is it one that a cluster can be built around?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_comfuse.refusal import Refusal
from tvm_comfuse.relay_patterns.block import Dataflow, op_name
from tvm_comfuse.relay_patterns.shapes import HALVES, Dim, dims_of, dtype_of, plain, product

#: rows of x and w start at multiples of this many half-precision elements (16 bytes, the unit of bulk copies)
ALIGNMENT = 8


@dataclass(frozen=True)
class Anchor:
    """A matmul [M, K] x [K, N].

    index   its binding
    x       Relax value [..., K]
    w       Relax value [N, K] (layout ``NK``) or [K, N] (``KN``)
    layout  of `w`
    rows    M: product of the leading dimensions of x, may be symbolic
    dtype   of x and w
    product  dtype of the result in the model
    """

    index: int
    x: Any
    w: Any
    layout: str
    rows: Dim
    columns: int
    depth: int
    dtype: str
    product: str


def matmul_shape(call: Any) -> list[int | str]:
    """[M, N, K] for reports, with names for symbolic dimensions; "?" where nothing is known."""
    x, w = dims_of(call.args[0]), dims_of(call.args[1])
    if not x or not w:
        return ["?", "?", "?"]
    columns: Dim = w[-1] if len(w) > 1 else 1
    return plain([product(x[:-1]), columns, x[-1]])


def find_anchor(flow: Dataflow, index: int) -> Anchor | Refusal:
    """The anchor for the matmul bound at `index`, or why a cluster cannot be built around it."""
    call = flow.bindings[index].value
    x, w, layout = _operands(flow, call)
    x_dims, w_dims = dims_of(x), dims_of(w)
    if x_dims is None or w_dims is None:
        return Refusal("unknown-shape", "the shapes of both inputs must be known", {}, "give the shapes in the model")
    if len(w_dims) != 2 or not x_dims:
        return Refusal(
            "batched-weight",
            "the right input must be one matrix shared by all rows",
            {"x": plain(x_dims), "w": plain(w_dims)},
            "only products with a 2-D weight are fused",
        )
    types = (dtype_of(x), dtype_of(w))
    if types[0] not in HALVES or types[0] != types[1]:
        return Refusal(
            "dtype",
            "x and w must both be float16 or both be bfloat16",
            {"x": types[0], "w": types[1]},
            "convert the model to half precision: model.to(torch.bfloat16)",
        )
    columns, depth = (w_dims[0], w_dims[1]) if layout == "NK" else (w_dims[1], w_dims[0])
    rows = product(x_dims[:-1])
    result = dtype_of(flow.bindings[index].var)
    return _check_sizes(rows, columns, depth) or Anchor(index, x, w, layout, rows, columns, depth, types[0], result)


def _check_sizes(rows: Dim, columns: Dim, depth: Dim) -> Refusal | None:
    sizes = dict(zip("MNK", plain([rows, columns, depth]), strict=True))
    if not isinstance(columns, int) or not isinstance(depth, int):
        return Refusal("symbolic-n", "N and K must be static", sizes, "export the model with a fixed hidden size")
    if rows == 0:
        return Refusal("zero-m", "the product must have rows", sizes, "nothing to compute")
    odd = {name: size for name, size in (("K", depth), ("N", columns)) if size == 0 or size % ALIGNMENT}
    if not odd:
        return None
    return Refusal(
        f"{next(iter(odd)).lower()}-alignment",
        f"{' and '.join(odd)} must be {'' if len(odd) > 1 else 'a '}positive multiple{'s' if len(odd) > 1 else ''} of "
        f"{ALIGNMENT} (rows aligned to 16 bytes)",
        {**odd, "multiple": ALIGNMENT},
        " and ".join(f"pad {name} to {(size // ALIGNMENT + 1) * ALIGNMENT}" for name, size in odd.items()),
    )


def _operands(flow: Dataflow, call: Any) -> tuple[Any, Any, str]:
    """x, w and the layout of w, with the transposition of w and, where exact, casts of both looked through."""
    x, w = call.args[0], call.args[1]
    layout = "KN"
    bare_x, _ = _look_through(flow, x, transpose=False)
    bare_w, flipped = _look_through(flow, w, transpose=True)
    if dtype_of(x) == "float32" and dtype_of(bare_x) in HALVES and dtype_of(bare_x) == dtype_of(bare_w):
        # the product of two halves is exact in float32, so the casts change nothing
        return bare_x, bare_w, "NK" if flipped else "KN"
    while op_name(value := flow.producer(w)) == "relax.permute_dims" and _swaps_two(value):
        w, layout = value.args[0], "KN" if layout == "NK" else "NK"
    return x, w, layout


def _look_through(flow: Dataflow, expr: Any, transpose: bool) -> tuple[Any, bool]:
    """The value behind widening casts (and transpositions), and whether it is transposed."""
    flipped = False
    while True:
        value = flow.producer(expr)
        name = op_name(value)
        if name == "relax.astype" and dtype_of(value.args[0]) in HALVES and dtype_of(expr) == "float32":
            expr = value.args[0]
        elif transpose and name == "relax.permute_dims" and _swaps_two(value):
            expr, flipped = value.args[0], not flipped
        else:
            return expr, flipped


def _swaps_two(call: Any) -> bool:
    dims = dims_of(call.args[0])
    axes = call.attrs.axes
    return dims is not None and len(dims) == 2 and (axes is None or [int(axis) % 2 for axis in axes] == [1, 0])
