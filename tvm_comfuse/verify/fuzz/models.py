"""A drawn model: steps behind a matmul, and the Relax module they give.

Steps keep their values near one and well-conditioned in float32, so that a wrong number is a fault and not rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import op

F32 = "float32"
#: epsilon of norms: large, as the rows of a softmax have next to no variance
EPSILON = 0.1
#: rows that one element of a symbolic leading dimension stands for, if there are two
INNER_ROWS = 8


@dataclass(frozen=True)
class Step:
    """One step behind the product; what it makes is the newest value.

    name     key of STEPS
    value    which tile (or row) value it takes, 0 is the newest
    other    a second one, or which of a few spellings
    operand  ``col`` [N], ``row`` [..., 1], ``tile`` [..., N], ``scalar`` [1], ``number`` [] or ``const``
    wide     whether the operand is float32 rather than of the model's half type
    again    an operand that an earlier step has read, if there is one of the kind
    """

    name: str
    value: int = 0
    other: int = 0
    operand: str = "col"
    wide: bool = False
    again: bool = False


@dataclass(frozen=True)
class Result:
    """A result of the model.

    value       which value, 0 is the newest
    row         of the row values, if there is any
    dtype       ``""``: as it is; otherwise what it is cast to
    transposed  leaves through an operator that cannot join the cluster
    """

    value: int = 0
    row: bool = False
    dtype: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class Model:
    """dtype: of x and w; layout: of w, ``NK`` or ``KN``; wide: whether the matmul gives float32; leading: dimensions of x
    before K, 1 or 2; symbolic: whether the first of them is; casts: w and x are cast before the matmul."""

    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    dtype: str = "bfloat16"
    layout: str = "NK"
    wide: bool = True
    leading: int = 1
    symbolic: bool = False
    casts: bool = False

    def row_multiple(self) -> int:
        """What the number of rows must be a multiple of."""
        return INNER_ROWS if self.leading > 1 else 1


def build(model: Model, rows: int, columns: int, depth: int) -> tvm.IRModule:
    """The module for M, N and K; rows: also if the model's M is symbolic."""
    return _Writer(model, rows, columns, depth).module()


class _Writer:
    """Emits the steps of one model."""

    def __init__(self, model: Model, rows: int, columns: int, depth: int):
        self.model, self.columns = model, columns
        outer: Any = rows // model.row_multiple()
        if model.symbolic:
            outer = tirx.Var("m", "int64")
        self.lead = (outer, INNER_ROWS) if model.leading > 1 else (outer,)
        self.builder = relax.BlockBuilder()
        self.params: list[Any] = []
        self.x = self.param("x", (*self.lead, depth))
        self.w = self.param("w", (columns, depth) if model.layout == "NK" else (depth, columns))
        self.tiles: list[Any] = []
        self.rows: list[Any] = []
        #: parameters that steps have read, by kind
        self.given: dict[tuple[str, bool], list[Any]] = {}

    def module(self) -> tvm.IRModule:
        with self.builder.function("main"):
            with self.builder.dataflow():
                self.tiles.append(self.product())
                for step in self.model.steps:
                    STEPS[step.name](self, step)
                outputs = [self.builder.emit_output(self.result(each)) for each in self.model.results]
            self.builder.emit_func_output(outputs if len(outputs) > 1 else outputs[0], params=self.params)
        return self.builder.finalize()

    def product(self) -> Any:
        x, w = self.x, self.w
        if self.model.casts:
            x, w = (self.emit(op.astype(each, F32)) for each in (x, w))
        if self.model.layout == "NK":
            w = self.emit(op.permute_dims(w))
        return self.emit(op.matmul(x, w, out_dtype=F32 if self.model.wide and not self.model.casts else None))

    def result(self, choice: Result) -> Any:
        values = self.rows if choice.row and self.rows else self.tiles
        value = values[-1 - choice.value % len(values)]
        if choice.dtype:
            value = self.emit(op.astype(value, choice.dtype))
        if choice.transposed:
            axes = [*range(len(self.lead) - 1), len(self.lead), len(self.lead) - 1]
            value = self.emit(op.permute_dims(value, axes))
        # an output of its own for every result, also of a value that is one already
        return self.emit(op.multiply(value, self.constant(1.0, value)))

    def param(self, name: str, shape: tuple[Any, ...], dtype: str | None = None) -> Any:
        var = relax.Var(name, relax.TensorType(shape, dtype or self.model.dtype))
        self.params.append(var)
        return var

    def emit(self, expr: Any) -> Any:
        return self.builder.emit(expr)

    def constant(self, value: float, like: Any) -> Any:
        return relax.const(value, dtype_of(like))

    def cast(self, value: Any, like: Any) -> Any:
        return value if dtype_of(value) == dtype_of(like) else self.emit(op.astype(value, dtype_of(like)))

    def promoted(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Both in float32, unless they are of one type."""
        if dtype_of(left) == dtype_of(right):
            return left, right
        return (value if dtype_of(value) == F32 else self.emit(op.astype(value, F32)) for value in (left, right))  # type: ignore[return-value]

    def operand(self, step: Step, like: Any) -> Any:
        if step.operand == "const":
            return self.constant(0.75, like)
        shapes: dict[str, tuple[Any, ...]] = {
            "col": (self.columns,),
            "row": (*self.lead, 1),
            "tile": (*self.lead, self.columns),
            "scalar": (1,),
            "number": (),
        }
        given = self.given.setdefault((step.operand, step.wide), [])
        if not (step.again and given):
            name = f"{step.operand}{len(self.params)}"
            given.append(self.param(name, shapes[step.operand], F32 if step.wide else self.model.dtype))
        return given[-1]

    def tile(self, position: int) -> Any:
        return self.tiles[-1 - position % len(self.tiles)]

    def row(self, position: int) -> Any:
        """An earlier row value; the mean of the newest tile value if there is none yet."""
        if not self.rows:
            self.rows.append(self.emit(op.mean(self.tile(0), -1, keepdims=True)))
        return self.rows[-1 - position % len(self.rows)]

    def chain(self, value: Any, *steps: Callable[[Any], Any]) -> Any:
        for step in steps:
            value = self.emit(step(value))
        return value


def dtype_of(var: Any) -> str:
    """Element type of a Relax variable."""
    return str(getattr(var.ty.dtype, "dtype", var.ty.dtype))


Emit = Callable[[_Writer, Step], None]


def _unary(*chain: Callable[[_Writer, Any], Any]) -> Emit:
    def emit(writer: _Writer, step: Step) -> None:
        value = writer.tile(step.value)
        for each in chain:
            value = writer.emit(each(writer, value))
        writer.tiles.append(value)

    return emit


def _apply(function: Callable[[Any], Any]) -> Callable[[_Writer, Any], Any]:
    return lambda writer, value: function(value)


def _plus_one(writer: _Writer, value: Any) -> Any:
    return op.add(value, writer.constant(1.0, value))


def _reduce(function: Callable[..., Any], *before: Callable[[Any], Any]) -> Emit:
    """A row value; two times out of three a tile that needs it, too."""

    def emit(writer: _Writer, step: Step) -> None:
        value = writer.chain(writer.tile(step.value), *before)
        row = writer.emit(function(value, -1, keepdims=True))
        writer.rows.append(row)
        if step.other % 3:
            writer.tiles.append(writer.emit(_BINARY[step.other % len(_BINARY)](writer, writer.tile(step.value), row)))

    return emit


#: bounded or gently growing in their second argument
_BINARY: tuple[Callable[[_Writer, Any, Any], Any], ...] = (
    lambda writer, a, b: op.add(a, b),
    lambda writer, a, b: op.multiply(a, writer.emit(op.tanh(b))),
    lambda writer, a, b: op.subtract(a, b),
    lambda writer, a, b: op.maximum(a, b),
    lambda writer, a, b: op.minimum(a, b),
    lambda writer, a, b: op.divide(a, writer.chain(b, op.abs, lambda v: op.add(v, writer.constant(1.0, v)))),
    lambda writer, a, b: op.subtract(writer.emit(op.tanh(b)), a),
)

#: with a parameter, which nothing need bound
_DIRECT: tuple[Callable[[_Writer, Any, Any], Any], ...] = (
    lambda writer, a, b: op.add(a, b),
    lambda writer, a, b: op.multiply(a, b),
    lambda writer, a, b: op.subtract(b, a),
    *_BINARY[3:5],
)


def _binary(kind: str) -> Emit:
    """Of two tiles, of a tile and an operand or row value, of two row values, or of a row value and a column or tile."""

    def emit(writer: _Writer, step: Step) -> None:
        if kind == "on_row":
            first = writer.row(step.value)
            second = writer.operand(step, first) if step.operand in ("scalar", "const") else writer.row(step.other)
        else:
            first = writer.row(step.value) if kind == "row_operand" else writer.tile(step.value)
            if kind == "row_operand" and step.operand not in ("col", "tile"):
                step = replace(step, operand="tile")
            others = {"row_operand": lambda: writer.operand(step, first)}
            others |= {"operand": lambda: writer.operand(step, first), "with_row": lambda: writer.row(step.other)}
            second = others[kind]() if kind in others else writer.tile(step.other)
        first, second = writer.promoted(first, second)
        table = _DIRECT if kind.endswith("operand") and step.other % 4 else _BINARY
        result = writer.emit(table[step.other % len(table)](writer, first, second))
        (writer.rows if kind == "on_row" else writer.tiles).append(result)

    return emit


def _masked(writer: _Writer, step: Step) -> None:
    value = writer.tile(step.value)
    above = writer.emit(op.greater(value, writer.constant(0.0, value)))
    below = writer.emit(op.multiply(value, writer.constant(0.125, value)))
    writer.tiles.append(writer.emit(op.where(above, value, below)))


def _cast(writer: _Writer, step: Step) -> None:
    value = writer.tile(step.value)
    writer.tiles.append(writer.emit(op.astype(value, F32 if dtype_of(value) != F32 else writer.model.dtype)))


def _weight(writer: _Writer, step: Step, like: Any) -> Any:
    kind = F32 if step.wide else writer.model.dtype
    return writer.cast(writer.param(f"col{len(writer.params)}", (writer.columns,), kind), like)


def _layer_norm(writer: _Writer, step: Step) -> None:
    value = writer.tile(step.value)
    gamma, beta = _weight(writer, step, value), _weight(writer, step, value)
    writer.tiles.append(writer.emit(op.nn.layer_norm(value, gamma, beta, axes=[-1], epsilon=EPSILON)))


def _rms_norm(writer: _Writer, step: Step) -> None:
    value = writer.tile(step.value)
    gamma = _weight(writer, step, value)
    writer.tiles.append(writer.emit(op.nn.rms_norm(value, gamma, axes=[-1], epsilon=EPSILON)))


def _norm_by_hand(writer: _Writer, step: Step) -> None:
    """LayerNorm as exporters spell it."""
    value = writer.tile(step.value)
    mean = writer.emit(op.mean(value, -1, keepdims=True))
    centred = writer.emit(op.subtract(value, mean))
    squares = writer.emit(op.multiply(centred, centred) if step.other % 2 else op.square(centred))
    variance = writer.emit(op.mean(squares, -1, keepdims=True))
    safe = writer.emit(op.add(variance, writer.constant(EPSILON, variance)))
    writer.rows.append(variance)
    if step.other % 3:
        writer.tiles.append(writer.emit(op.multiply(centred, writer.emit(op.rsqrt(safe)))))
    else:
        writer.tiles.append(writer.emit(op.divide(centred, writer.emit(op.sqrt(safe)))))


def _softmax_by_hand(writer: _Writer, step: Step) -> None:
    value = writer.tile(step.value)
    largest = writer.emit(op.max(value, -1, keepdims=True))
    weights = writer.chain(value, lambda v: op.subtract(v, largest), op.exp)
    total = writer.emit(op.sum(weights, -1, keepdims=True))
    writer.rows += [largest, writer.emit(op.log(total))]
    writer.tiles.append(writer.emit(op.divide(weights, total)))


STEPS: dict[str, Emit] = {
    "relu": _unary(_apply(op.nn.relu)),
    "operand": _binary("operand"),
    "earlier": _binary("earlier"),
    "mean": _reduce(op.mean),
    "sum": _reduce(op.sum, op.tanh),
    "max": _reduce(op.max),
    "min": _reduce(op.min),
    "variance": _reduce(op.variance),
    "std": _reduce(op.std),
    "with_row": _binary("with_row"),
    "on_row": _binary("on_row"),
    "row_operand": _binary("row_operand"),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "norm_by_hand": _norm_by_hand,
    "softmax": _unary(lambda writer, value: op.nn.softmax(value, axis=-1)),
    "log_softmax": _unary(lambda writer, value: op.nn.log_softmax(value, axis=-1)),
    "softmax_by_hand": _softmax_by_hand,
    "cast": _cast,
    "masked": _masked,
    "tanh": _unary(_apply(op.tanh)),
    "silu": _unary(_apply(op.nn.silu)),
    "gelu": _unary(_apply(op.nn.gelu)),
    "gelu_tanh": _unary(_apply(op.nn.gelu_tanh)),
    "sigmoid": _unary(_apply(op.sigmoid)),
    "erf": _unary(_apply(op.erf)),
    "exp": _unary(_apply(op.tanh), _apply(op.exp)),
    "log": _unary(_apply(op.abs), _plus_one, _apply(op.log)),
    "sqrt": _unary(_apply(op.square), _plus_one, _apply(op.sqrt)),
    "rsqrt": _unary(_apply(op.square), _plus_one, _apply(op.rsqrt)),
    "square": _unary(_apply(op.tanh), _apply(op.square)),
    "power": _unary(_apply(op.tanh), lambda writer, value: op.power(value, writer.constant(3.0, value))),
    "negative": _unary(_apply(op.negative)),
    "clip": _unary(lambda writer, value: op.clip(value, -1.5, 2.5)),
    "leaky_relu": _unary(lambda writer, value: op.nn.leakyrelu(value, 0.25)),
    "softplus": _unary(_apply(op.nn.softplus)),
    "selu": _unary(_apply(op.nn.selu)),
    "sine": _unary(_apply(op.sin)),
    "cosine": _unary(_apply(op.cos)),
}
