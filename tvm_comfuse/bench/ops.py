"""The operators of the suites: inputs, eager PyTorch, a float64 reference, and the Relax module.

All of them start with h [M, K] times w [N, K] transposed.  The reference is written out in elementary operations, apart
from the eager version, so that a wrong epsilon or a forgotten operand in one of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LN_EPS = 1e-5
RMS_EPS = 1e-6
SOFTCAP = 30.0
DTYPES = ("bfloat16", "float16", "float32")
#: shapes of the inputs by their kind
SHAPES: dict[str, tuple[str, ...]] = {
    "activation": ("M", "K"),
    "weight": ("N", "K"),
    "tile": ("M", "N"),
    "column": ("N",),
}


@dataclass(frozen=True)
class OpDef:
    """One operator.

    name       as suites write it
    inputs     (name, kind) of each input in order; kinds are the keys of SHAPES, h and w come first
    eager      PyTorch function of the inputs, in their dtype; returns [M, N] in the dtype of h
    reference  the same value for float64 inputs
    graph      builds the Relax expression: (emit, product, *other inputs) -> expression, where product is h @ w.T
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    eager: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    graph: Callable[..., Any]

    def make_inputs(
        self, M: int, N: int, K: int, dtype: str = "bfloat16", seed: int = 0, device: str = "cpu"
    ) -> list[Tensor]:
        """Random inputs: the weight is N(0, 1) * K**-0.5, all others N(0, 1)."""
        generator = torch.Generator(device).manual_seed(seed)
        extents = {"M": M, "N": N, "K": K}
        made = []
        for _, kind in self.inputs:
            values = torch.randn([extents[axis] for axis in SHAPES[kind]], generator=generator, device=device)
            made.append((values * K**-0.5 if kind == "weight" else values).to(torch_dtype(dtype)))
        return made

    def exact(self, inputs: list[Tensor]) -> Tensor:
        """The reference in float64, for inputs of any dtype."""
        return self.reference(*[value.double() for value in inputs])

    def relax_module(
        self,
        M: int | str | None,
        N: int,
        K: int,
        dtype: str = "bfloat16",
        out_dtype: str | None = None,
        w_layout: str = "NK",
    ) -> Any:
        """An IRModule with `main` of the inputs as parameters, in their order.

        M      an extent; None or a name for a symbolic one
        w_layout   "NK": w [N, K] goes through permute_dims, as a torch Linear does; "KN": w is [K, N]
        out_dtype  cast the result to this dtype
        """
        from tvm import relax, tirx

        rows = M if isinstance(M, int) else tirx.Var(M or "m", "int64")
        extents = {"M": rows, "N": N, "K": K}
        params = []
        for name, kind in self.inputs:
            axes = SHAPES[kind][::-1] if kind == "weight" and w_layout == "KN" else SHAPES[kind]
            params.append(relax.Var(name, relax.TensorType([extents[axis] for axis in axes], dtype)))
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                h, w, *others = params
                product = builder.emit(relax.op.matmul(h, w if w_layout == "KN" else relax.op.permute_dims(w)))
                value = self.graph(builder.emit, product, *others)
                wanted = out_dtype or dtype
                if value.ty.dtype != wanted:
                    value = builder.emit(relax.op.astype(value, wanted))
                result = builder.emit_output(value)
            builder.emit_func_output(result)
        return builder.get()

    def bytes_per_call(self, M: int, N: int, K: int, dtype: str = "bfloat16") -> int:
        """Bytes of the inputs with M rows: what rotates between the input sets of a measurement.

        The weight and the [N] vectors are left out: a model reads the same ones again at each call.
        """
        elements = sum({"activation": M * K, "tile": M * N}.get(kind, 0) for _, kind in self.inputs)
        return elements * torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of PyTorch")
    return dtype


def _exact_layer_norm(value: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    centred = value - value.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + LN_EPS).sqrt() * gain + shift


def _exact_rms_norm(value: Tensor, gain: Tensor) -> Tensor:
    return value / (value.square().mean(-1, keepdim=True) + RMS_EPS).sqrt() * gain


def _layer_norm(h: Tensor, w: Tensor, x: Tensor, b: Tensor, g: Tensor, e: Tensor) -> Tensor:
    return F.layer_norm(x + F.linear(h, w, b), (w.shape[0],), g, e, LN_EPS)


def _rms_norm(h: Tensor, w: Tensor, x: Tensor, g: Tensor) -> Tensor:
    return x + F.rms_norm(F.linear(h, w), (w.shape[0],), g, RMS_EPS)


def _ln_relu(h: Tensor, w: Tensor, b: Tensor, g: Tensor, e: Tensor) -> Tensor:
    return F.relu(F.layer_norm(F.linear(h, w, b), (w.shape[0],), g, e, LN_EPS))


def _rms(h: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(F.linear(h, w, b), (w.shape[0],), g, RMS_EPS)


def _softcap_softmax(h: Tensor, w: Tensor) -> Tensor:
    # models that cap their logits compute the cap and the softmax in float32
    return torch.softmax(SOFTCAP * torch.tanh(F.linear(h, w).float() * (1 / SOFTCAP)), -1).to(h.dtype)


def _bias(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(h, w, b)


def _bias_gelu(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(h, w, b))


def _gated(h: Tensor, w: Tensor, x: Tensor) -> Tensor:
    return F.silu(F.linear(h, w)) * x


def _exact_gelu(value: Tensor) -> Tensor:
    return 0.5 * value * (1 + torch.erf(value * 0.5**0.5))


def _graph_layer_norm(emit: Any, product: Any, x: Any, b: Any, g: Any, e: Any) -> Any:
    from tvm.relax import op

    value = emit(op.add(x, emit(op.add(product, b))))
    return emit(op.nn.layer_norm(value, g, e, axes=[-1], epsilon=LN_EPS))


def _graph_rms_norm(emit: Any, product: Any, x: Any, g: Any) -> Any:
    from tvm.relax import op

    return emit(op.add(x, emit(op.nn.rms_norm(product, g, axes=[-1], epsilon=RMS_EPS))))


def _graph_ln_relu(emit: Any, product: Any, b: Any, g: Any, e: Any) -> Any:
    from tvm.relax import op

    value = emit(op.add(product, b))
    return emit(op.nn.relu(emit(op.nn.layer_norm(value, g, e, axes=[-1], epsilon=LN_EPS))))


def _graph_rms(emit: Any, product: Any, b: Any, g: Any) -> Any:
    from tvm.relax import op

    return emit(op.nn.rms_norm(emit(op.add(product, b)), g, axes=[-1], epsilon=RMS_EPS))


def _graph_softcap_softmax(emit: Any, product: Any) -> Any:
    from tvm.relax import const, op

    value = emit(op.astype(product, "float32")) if product.ty.dtype != "float32" else product
    value = emit(op.tanh(emit(op.multiply(value, const(1 / SOFTCAP, "float32")))))
    return emit(op.nn.softmax(emit(op.multiply(value, const(SOFTCAP, "float32"))), axis=-1))


def _graph_bias(emit: Any, product: Any, b: Any) -> Any:
    from tvm.relax import op

    return emit(op.add(product, b))


def _graph_bias_gelu(emit: Any, product: Any, b: Any) -> Any:
    from tvm.relax import op

    return emit(op.nn.gelu(emit(op.add(product, b))))


def _graph_gated(emit: Any, product: Any, x: Any) -> Any:
    from tvm.relax import op

    return emit(op.multiply(emit(op.nn.silu(product)), x))


_HW = (("h", "activation"), ("w", "weight"))
_X, _B, _G, _E = ("x", "tile"), ("b", "column"), ("g", "column"), ("e", "column")

OPS: dict[str, OpDef] = {
    op.name: op
    for op in (
        OpDef(
            "layer_norm",
            (*_HW, _X, _B, _G, _E),
            _layer_norm,
            lambda h, w, x, b, g, e: _exact_layer_norm(x + h @ w.T + b, g, e),
            _graph_layer_norm,
        ),
        OpDef(
            "rms_norm",
            (*_HW, _X, _G),
            _rms_norm,
            lambda h, w, x, g: x + _exact_rms_norm(h @ w.T, g),
            _graph_rms_norm,
        ),
        OpDef(
            "ln_relu",
            (*_HW, _B, _G, _E),
            _ln_relu,
            lambda h, w, b, g, e: _exact_layer_norm(h @ w.T + b, g, e).clamp_min(0),
            _graph_ln_relu,
        ),
        OpDef("rms", (*_HW, _B, _G), _rms, lambda h, w, b, g: _exact_rms_norm(h @ w.T + b, g), _graph_rms),
        OpDef(
            "softcap_softmax",
            _HW,
            _softcap_softmax,
            lambda h, w: (SOFTCAP * torch.tanh(h @ w.T / SOFTCAP)).softmax(-1),
            _graph_softcap_softmax,
        ),
        OpDef("bias", (*_HW, _B), _bias, lambda h, w, b: h @ w.T + b, _graph_bias),
        OpDef("bias_gelu", (*_HW, _B), _bias_gelu, lambda h, w, b: _exact_gelu(h @ w.T + b), _graph_bias_gelu),
        OpDef("gated", (*_HW, _X), _gated, lambda h, w, x: F.silu(h @ w.T) * x, _graph_gated),
    )
}
