"""Values in generated code, and the functions that it calls on them.

A value is uniform (a Python number, a NumPy float scalar) or has one element per lane (an array).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
_ABSENT = object()
WRAP = {"uint32": 0xFFFFFFFF, "uint64": 0xFFFFFFFFFFFFFFFF, "uint16": 0xFFFF, "uint8": 0xFF}
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


@dataclass(frozen=True)
class Value:
    """Python source of a value; varying: one element per lane; known: the value itself if it does not depend on the run."""

    code: str
    varying: bool = False
    known: Any = _ABSENT

    @property
    def is_known(self) -> bool:
        """Whether it is known when code is generated."""
        return self.known is not _ABSENT


def to_dtype(value: Any, dtype: str) -> Any:
    """Conversion as C does it; floats round to nearest even."""
    if isinstance(value, np.ndarray):
        return value.astype(FLOATS.get(dtype) or np.dtype(dtype))
    if dtype in FLOATS:
        return FLOATS[dtype](value)
    if dtype == "bool":
        return bool(value)
    return int(value) & WRAP[dtype] if dtype in WRAP else int(value)


def reinterpret(value: Any, dtype: str, source: str) -> Any:
    """The same bits as another type."""
    to = FLOATS.get(dtype) or np.dtype(dtype)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).view(to)
    bits = np.array([value], FLOATS.get(source) or np.dtype(source)).view(to)[0]
    return bits if dtype in FLOATS else int(bits)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """condition ? yes : no, per lane."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def pack(high: Any, low: Any, dtype: Any) -> Any:
    """cvt.rn.{bf16x2,f16x2}.f32: two rounded numbers in one 32-bit word."""
    upper = np.asarray(high, np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    lower = np.asarray(low, np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    return upper << np.uint32(16) | lower


def one_float(function: Any) -> Any:
    """A float32 function as one that keeps float32."""

    def call(*values: Any) -> Any:
        result = function(*values)
        return result if getattr(result, "dtype", None) == np.float32 else np.asarray(result).astype(np.float32)[()]

    return call


#: tirx intrinsics on floats, by name
MATH: dict[str, Any] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(np.float32(10), x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "tanh": np.tanh,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "erf": np.frompyfunc(math.erf, 1, 1),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "atan": np.arctan,
    "pow": np.power,
    "fabs": np.abs,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x),
    "nearbyint": np.rint,
    "fmod": np.fmod,
    "copysign": np.copysign,
}


def _coarse_tanh(x: Any) -> Any:
    """With the error that tanh.approx may have, alternating in sign from one value to the next."""
    exact = np.tanh(x)
    sign = np.where(np.asarray(x).view(np.uint32) & 1, 1.0, -1.0) if np.asarray(x).dtype == np.float32 else 1.0
    return (exact * (1.0 + sign * 2.0**-11)).astype(np.float32)


def _packed(function: Any, kind: str) -> Any:
    """A function of float64 numbers on both halves of words; each result is rounded once."""
    dtype = FLOATS[PACKED_KINDS[kind]]

    def call(*words: Any) -> Any:
        halves = [
            np.asarray(word, np.uint32)[..., None].view(np.uint16).view(dtype).astype(np.float64) for word in words
        ]
        with np.errstate(all="ignore"):
            result = np.asarray(function(*halves)).astype(np.float32).astype(dtype)
        found = np.ascontiguousarray(result).view(np.uint32)[..., 0]
        return found if found.ndim else int(found)

    return call


PACKED_KINDS = {"bf16x2": "bfloat16", "f16x2": "float16"}
PACKED: dict[str, Any] = {
    "fma": lambda a, b, c: a * b + c,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
}
#: wrappers of single instructions on words of two half-precision numbers
WORDS: dict[str, Any] = {
    f"func.comfuse_{op}_{kind}": _packed(function, kind) for op, function in PACKED.items() for kind in PACKED_KINDS
}
WORDS |= {
    f"func.comfuse_pack_{kind}": lambda low, high, dtype=FLOATS[name]: pack(high, low, dtype)
    for kind, name in PACKED_KINDS.items()
}
#: wrappers of single instructions that have a value, by the name of the CUDA function
WRAPPED: dict[str, Any] = WORDS | {
    "func.comfuse_max": np.maximum,
    "func.comfuse_min": np.minimum,
    "func.comfuse_tanh": _coarse_tanh,
    "func.comfuse_exp": np.exp,
}
TESTS: dict[str, Any] = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}


def namespace() -> dict[str, Any]:
    """Names that generated code may use."""
    names: dict[str, Any] = {f"math_{name}": one_float(function) for name, function in MATH.items()}
    names |= {f"math_{name}": function for name, function in TESTS.items()}
    names |= {f"math_{name.removeprefix('func.')}": function for name, function in WRAPPED.items()}
    names |= {"np": np, "to_dtype": to_dtype, "reinterpret": reinterpret, "select": select, "pack": pack}
    names |= {"bfloat16": ml_dtypes.bfloat16, "inf": math.inf, "nan": math.nan}
    return names
