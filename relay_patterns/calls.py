"""The bindings that call a cluster's functions in the place of its operators."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from tvm_comfuse.relay_patterns.canonical import Canonical, operand_shape
from tvm_comfuse.relay_patterns.cluster import Cluster
from tvm_comfuse.relay_patterns.shapes import dims_of, equal
from tvm_comfuse.relay_patterns.split_form import ROWS, SplitForm


def calls(builder: Any, cluster: Cluster, made: Canonical, form: tirx.PrimFunc | SplitForm) -> list[Any]:
    """Bindings that compute a cluster's outputs with one call of a function, or with two of a split form.

    made  the cluster's canonical function, whose parameters `form` has, unless it is split
    """
    writer = _Writer(builder, cluster)
    anchor = cluster.anchor
    x = writer.shaped(anchor.x, (anchor.rows, anchor.depth))
    if isinstance(form, SplitForm):
        values = writer.call(form.gemm, form.gemm.func, [x, anchor.w], "gemm_elementwise")
        writer.call(form.rows, form.rows.func, [values[form.between]], ROWS)
    else:
        writer.call(made, form, [x, anchor.w], cluster.kind)
    return writer.bindings


class _Writer:
    def __init__(self, builder: Any, cluster: Cluster) -> None:
        self.builder, self.anchor = builder, cluster.anchor
        self.bindings: list[Any] = []

    def bind(self, value: Any, var: Any = None, name: str = "comfuse") -> Any:
        value = self.builder.normalize(value)
        var = relax.DataflowVar(name, value.ty) if var is None else var
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def shaped(self, expr: Any, shape: tuple[Any, ...]) -> Any:
        """`expr` with this shape."""
        dims = dims_of(expr)
        fits = dims is not None and len(dims) == len(shape) and equal(dims, shape)
        return expr if fits else self.bind(relax.op.reshape(expr, shape), name="flat")

    def call(self, made: Canonical, func: tirx.PrimFunc, base: list[Any], kind: str) -> list[Any]:
        """Calls a function and gives its outputs, as matrices; the variables of the model that they are get bound.

        base  arguments in front of the operands
        """
        anchor = self.anchor
        args = [self.shaped(o.expr, operand_shape(o.shape, anchor.rows, anchor.columns)) for o in made.operands]
        types = [
            relax.TensorType((anchor.rows, anchor.columns if each.node.shape == "tile" else 1), each.dtype)
            for each in made.outputs
        ]
        # the module names its functions; a global symbol of its own would clash with the model's entry
        target = self.builder.add_func(func.without_attr("global_symbol"), f"comfuse_{kind}")
        result = relax.op.call_tir(target, relax.Tuple([*base, *args]), types if len(types) > 1 else types[0])
        if len(types) == 1 and _is_result(made, types[0]):
            return [self.bind(result, made.outputs[0].vars[0])]
        whole = self.bind(result)
        values = []
        for number, output in enumerate(made.outputs):
            value = self.bind(relax.TupleGetItem(whole, number), name="part") if len(types) > 1 else whole
            values.append(value)
            for var in output.vars:
                dims = dims_of(var)
                assert dims is not None
                exact = len(dims) == 2 and equal(dims, tuple(types[number].shape.values))
                self.bind(value if exact else relax.op.reshape(value, dims), var)
        return values


def _is_result(made: Canonical, ty: Any) -> bool:
    """Whether the only output is one variable of the model as it is."""
    vars_ = made.outputs[0].vars
    dims = dims_of(vars_[0]) if len(vars_) == 1 else None
    return dims is not None and len(dims) == 2 and equal(dims, tuple(ty.shape.values))
