"""Small Relax models for the discovery tests: each is a product and what a pattern has behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

N, K = 64, 32
#: rows of the static form and of a run of the symbolic form; neither is a multiple of a tile
STATIC_M, RUN_M = 24, 13
EPS = 1e-5


class Model:
    """Builds one function.  Every method that emits gives the new variable."""

    def __init__(self, dtype: str, rows: Any, layout: str = "NK", n: int = N, k: int = K):
        self.dtype, self.rows, self.n, self.k = dtype, rows, n, k
        self.builder = relax.BlockBuilder()
        self.layout = layout
        self.params: list[Any] = []
        self.x = self.param("x", (rows, k))
        self.w = self.param("w", (n, k) if layout == "NK" else (k, n))

    def param(self, name: str, shape: Sequence[Any], dtype: str | None = None) -> Any:
        var = relax.Var(name, relax.TensorType(tuple(shape), dtype or self.dtype))
        self.params.append(var)
        return var

    def col(self, name: str, dtype: str | None = None) -> Any:
        return self.param(name, (self.n,), dtype)

    def tile(self, name: str, dtype: str | None = None) -> Any:
        return self.param(name, (self.rows, self.n), dtype)

    def row(self, name: str, dtype: str | None = None) -> Any:
        return self.param(name, (self.rows, 1), dtype)

    def emit(self, expr: Any) -> Any:
        return self.builder.emit(expr)

    def const(self, value: float, dtype: str | None = None) -> Any:
        return relax.const(value, dtype or self.dtype)

    def matmul(self, x: Any = None, w: Any = None, out_dtype: str | None = None) -> Any:
        w = self.w if w is None else w
        w = self.emit(op.permute_dims(w)) if self.layout == "NK" else w
        return self.emit(op.matmul(self.x if x is None else x, w, out_dtype=out_dtype))

    def chain(self, value: Any, *steps: Callable[[Any], Any]) -> Any:
        for step in steps:
            value = self.emit(step(value))
        return value


Body = Callable[[Model], Any]


def build(body: Body, dtype: str, rows: Any, layout: str = "NK", n: int = N, k: int = K) -> tvm.IRModule:
    """The module of `body`, which emits on a Model and returns one variable or a list of them."""
    model = Model(dtype, rows, layout, n, k)
    with model.builder.function("main"):
        with model.builder.dataflow():
            result = body(model)
            outputs = [model.builder.emit_output(each) for each in (result if isinstance(result, list) else [result])]
        model.builder.emit_func_output(outputs if len(outputs) > 1 else outputs[0], params=model.params)
    return model.builder.finalize()


def symbolic() -> Any:
    return tirx.Var("m", "int64")


def inputs(mod: tvm.IRModule, seed: int = 0, rows: int = RUN_M) -> list[Any]:
    """Random inputs of the module's main function; w is scaled so that products are of size one."""
    draw = np.random.default_rng(seed)
    given = []
    for param in mod["main"].params:
        shape = [int(dim) if isinstance(dim, tirx.IntImm) else rows for dim in param.ty.shape]
        scale = 1 / math.sqrt(K) if param.name.startswith("w") else 1.0
        given.append((draw.standard_normal(shape) * scale).astype(str(param.ty.dtype.dtype)))
    return given


def run_module(mod: tvm.IRModule, given: Sequence[Any]) -> list[Any]:
    """Outputs of main on the LLVM virtual machine, in float64."""
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(value) for value in given])
    results = [result] if hasattr(result, "numpy") else list(result)
    return [value.numpy().astype("float64") for value in results]


def assert_close(got: Any, want: Any, dtype: str) -> None:
    """One rounding to `dtype` and float32 noise before it; more means that an intermediate was not float32."""
    relative = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}[dtype]
    np.testing.assert_allclose(got, want, rtol=relative * 1.01 + 1e-5, atol=2e-5, equal_nan=True)


def bias_residual_layer_norm(m: Model) -> Any:
    y = m.chain(m.matmul(), lambda v: op.add(v, m.col("b")), lambda v: op.add(m.tile("r"), v))
    return m.emit(op.nn.layer_norm(y, m.col("g"), m.col("be"), axes=[-1], epsilon=EPS))


def layer_norm_decomposed(m: Model) -> Any:
    y = m.chain(m.matmul(), lambda v: op.astype(v, "float32"))
    mean = m.emit(op.mean(y, -1, keepdims=True))
    d = m.emit(op.subtract(y, mean))
    squares = m.emit(op.power(d, m.const(2.0, "float32")))
    variance = m.chain(squares, lambda v: op.mean(v, -1, keepdims=True), lambda v: op.add(v, m.const(EPS, "float32")))
    out = m.emit(op.divide(d, m.emit(op.sqrt(variance))))
    out = m.emit(op.multiply(out, m.emit(op.astype(m.col("g"), "float32"))))
    out = m.emit(op.add(out, m.emit(op.astype(m.col("be"), "float32"))))
    return m.emit(op.astype(out, m.dtype))


def rms_norm_then_residual(m: Model) -> Any:
    h = m.matmul()
    f = m.emit(op.astype(h, "float32"))
    mean = m.chain(f, lambda v: op.multiply(v, v), lambda v: op.mean(v, -1, keepdims=True))
    scale = m.chain(mean, lambda v: op.add(v, m.const(EPS, "float32")), op.rsqrt)
    normed = m.emit(op.multiply(f, scale))
    g = m.emit(op.astype(m.col("g"), "float32"))
    gain = m.emit(op.add(m.const(1.0, "float32"), g))
    y = m.chain(normed, lambda v: op.multiply(v, gain), lambda v: op.astype(v, m.dtype))
    return m.emit(op.add(m.tile("r"), y))


def rms_norm_composite(m: Model) -> Any:
    return m.emit(op.nn.rms_norm(m.matmul(), m.col("g"), axes=[-1], epsilon=EPS))


def layer_norm_relu(m: Model) -> Any:
    return m.emit(op.nn.relu(bias_residual_layer_norm(m)))


def scale_tanh_softmax(m: Model) -> Any:
    y = m.chain(m.matmul(), lambda v: op.multiply(v, m.const(0.5)), op.tanh, lambda v: op.multiply(v, m.const(8.0)))
    return m.emit(op.nn.softmax(y, axis=-1))


def softmax_decomposed(m: Model) -> Any:
    y = m.chain(m.matmul(), lambda v: op.add(v, m.col("b")))
    e = m.chain(m.emit(op.max(y, -1, keepdims=True)), lambda v: op.subtract(y, v), op.exp)
    return m.emit(op.divide(e, m.emit(op.sum(e, -1, keepdims=True))))


def log_softmax(m: Model) -> Any:
    return m.emit(op.nn.log_softmax(m.matmul(), axis=1))


def gate_residual_norm(m: Model) -> Any:
    y = m.chain(m.matmul(), lambda v: op.add(v, m.col("b")))
    y = m.chain(y, lambda v: op.multiply(m.tile("gate"), v), lambda v: op.add(m.tile("r"), v))
    return [y, m.emit(op.nn.rms_norm(y, m.col("g"), axes=[-1], epsilon=EPS))]


def bias_gelu(m: Model) -> Any:
    return m.chain(m.matmul(), lambda v: op.add(v, m.col("b")), op.nn.gelu)


def bias_gelu_tanh(m: Model) -> Any:
    return m.chain(m.matmul(), lambda v: op.add(v, m.col("b")), op.nn.gelu_tanh)


def gelu_erf_decomposed(m: Model) -> Any:
    v = m.chain(m.matmul(), lambda v: op.add(v, m.col("b")))
    inner = m.chain(v, lambda v: op.multiply(v, m.const(math.sqrt(0.5))), op.erf)
    return m.emit(op.multiply(m.emit(op.multiply(v, m.const(0.5))), m.emit(op.add(inner, m.const(1.0)))))


def gelu_tanh_decomposed(m: Model) -> Any:
    v = m.chain(m.matmul(), lambda v: op.add(v, m.col("b")))
    cube = m.chain(v, lambda v: op.power(v, m.const(3.0)), lambda v: op.multiply(v, m.const(0.044715)))
    inner = m.chain(cube, lambda c: op.add(v, c), lambda c: op.multiply(c, m.const(math.sqrt(2 / math.pi))), op.tanh)
    return m.emit(op.multiply(m.emit(op.multiply(v, m.const(0.5))), m.emit(op.add(inner, m.const(1.0)))))


def bias(m: Model) -> Any:
    return m.chain(m.matmul(), lambda v: op.add(v, m.col("b")))


def bare(m: Model) -> Any:
    return m.matmul()


def softmax_then_layer_norm(m: Model) -> Any:
    p = m.emit(op.nn.softmax(m.matmul(), axis=-1))
    return m.emit(op.nn.layer_norm(p, m.col("g"), m.col("be"), axes=[-1], epsilon=EPS))


def row_scaled_statistics(m: Model) -> Any:
    y = m.emit(op.multiply(m.matmul(out_dtype="float32"), m.row("s", "float32")))
    deviation = m.emit(op.std(y, -1, keepdims=True))
    return [deviation, m.emit(op.min(y, -1)), m.emit(op.divide(y, deviation))]


def masked(m: Model) -> Any:
    y = m.matmul()
    keep = m.emit(op.greater(y, m.const(-0.5)))
    return m.emit(op.where(keep, y, m.emit(op.multiply(y, m.const(0.125)))))


PATTERNS: dict[str, Body] = {
    body.__name__: body
    for body in (
        bias_residual_layer_norm,
        layer_norm_decomposed,
        rms_norm_then_residual,
        rms_norm_composite,
        layer_norm_relu,
        scale_tanh_softmax,
        softmax_decomposed,
        log_softmax,
        gate_residual_norm,
        bias_gelu,
        bias_gelu_tanh,
        gelu_erf_decomposed,
        gelu_tanh_decomposed,
        bias,
        bare,
        softmax_then_layer_norm,
        row_scaled_statistics,
        masked,
    )
}
