"""The float64 value of a cluster's canonical function, computed from its expressions with NumPy.

It knows nothing of tiles, registers and threads: what a kernel does differently shows as an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.schedules.analysis import normal_forms
from tvm_comfuse.schedules.rows import spec_of
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.verify.inexact import Inexact, Packing, Parking

Array = np.ndarray
EXACT = Inexact()
EMPTY: Array = np.zeros(0)
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Div: operator.truediv,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}
#: what packed arithmetic rounds
_ROUNDED = (tirx.Add, tirx.Sub, tirx.Mul)
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}


def _erf(value: Array) -> Array:
    import torch

    return torch.special.erf(torch.from_numpy(np.ascontiguousarray(value))).numpy()


_CALLS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "erf": _erf,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda value: 1.0 / np.sqrt(value),
    "sin": np.sin,
    "cos": np.cos,
    "pow": np.power,
    "fabs": np.abs,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "nearbyint": np.rint,
    "round": np.rint,
    "isnan": np.isnan,
    "sigmoid": lambda value: 1.0 / (1.0 + np.exp(-value)),
    "if_then_else": np.where,
}


def reference(func: tirx.PrimFunc, inputs: Sequence[Array], inexact: Inexact = EXACT) -> list[Array]:
    """The outputs in float64, in the order of the parameters.

    func     canonical, a rows function as well, scheduled or not
    inputs   one array for each parameter before the outputs, of any float dtype
    inexact  what is computed less exactly
    Raises LoweringError if the function is not canonical or has an operator that is not known here.
    """
    spec, blocks = spec_of(func), normal_forms(func)
    values: dict[Any, Array] = {
        param: np.asarray(array, dtype=np.float64) for param, array in zip(func.params, inputs, strict=False)
    }
    first, second = (values.get(param, EMPTY) for param in func.params[:2])
    kept: dict[Parking, Array] = {}
    with np.errstate(all="ignore"):
        for name, block in blocks.items():
            if isinstance(spec, ClusterSpec) and name == "gemm":
                values[block.store.buffer] = first @ (second.T if spec.w_layout == "NK" else second)
                continue
            one_column = (
                block.op is None and len(block.store.buffer.shape) == 2 and _is_one(block.store.buffer.shape[1])
            )
            shape = (first.shape[0], 1 if one_column else spec.n)
            seen = values
            for parking in (each for each in inexact.parkings if name in each.readers):
                carried = blocks[parking.block].store.buffer
                if parking not in kept:
                    kept[parking] = parking.kept(seen[carried])
                seen = {**seen, carried: kept[parking]}
            packing = inexact.packing if name in inexact.packing.blocks else None
            value = np.broadcast_to(_value(block.value, seen, _places(block, shape), inexact.calls, packing), shape)
            result = value if block.op is None else _REDUCE[block.op](value, axis=1)
            values[block.store.buffer] = np.array(result, dtype=np.float64)
    return [values[func.params[output.index]] for output in spec.outputs]


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _places(block: Any, shape: tuple[int, int]) -> dict[Any, Array]:
    places = {block.i: np.arange(shape[0])[:, None]}
    if block.j is not None:
        places[block.j] = np.arange(shape[1])[None, :]
    return places


def _value(
    expr: Any,
    values: dict[Any, Array],
    places: dict[Any, Array],
    calls: Mapping[str, Callable[..., Any]],
    packing: Packing | None,
) -> Any:
    def go(node: Any) -> Any:
        if isinstance(node, tvm.ir.TensorLoad):
            return values[node.source][tuple(go(index) for index in node.indices)]
        if isinstance(node, tirx.Var):
            return places[node]
        if isinstance(node, tirx.IntImm):
            return int(node.value)
        if isinstance(node, tirx.FloatImm):
            return float(node.value)
        if isinstance(node, tirx.Cast):
            return _cast(go(node.value), str(node.ty))
        if isinstance(node, tirx.Select):
            return np.where(go(node.condition), go(node.true_value), go(node.false_value))
        if isinstance(node, tirx.Not):
            return np.logical_not(go(node.a))
        if type(node) in _BINARY:
            result = _BINARY[type(node)](go(node.a), go(node.b))
            return packing.rounded(result) if packing is not None and type(node) in _ROUNDED else result
        if isinstance(node, tvm.ir.Call):
            name = str(node.op.name).rsplit(".", 1)[-1]
            if name in _CALLS:
                return calls.get(name, _CALLS[name])(*map(go, node.args))
        raise LoweringError("an operator that verify.reference knows", f"{type(node).__name__}: {node}", "add it there")

    return go(expr)


def _cast(value: Any, dtype: str) -> Any:
    if dtype.startswith(("int", "uint")):
        return np.trunc(value).astype(np.int64)
    return value != 0 if dtype == "bool" else np.asarray(value, dtype=np.float64)
