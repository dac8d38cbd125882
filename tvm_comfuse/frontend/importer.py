"""TVM's importer of exported programs, with every operator checked.

The stock importer lets whatever its parts raise come out, without saying which operator it was about, and where it fixes
a dtype of its own (a convolution or a batch norm of a half precision model gives float32) nobody compares it with the
program's.  Both are done here, around each operator: a failure is a ModelError that names the operator and its operands,
and a result has the dtype that the program says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend.messages import telling_line

# a converter gets the node and this importer, and returns a Relax expression or a tuple of them
Converter = Callable[[fx.Node, "Importer"], Any]

_TRY = "write it with other operators of PyTorch, or import the model another way and give the Relax module"

# a whole layer as one operator: PyTorch's fast path for inference
_FAST_PATH = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_TRY_FAST_PATH = "export the model after torch.backends.mha.set_fastpath_enabled(False)"


class Importer(ExportedProgramImporter):
    """Use once: ``Importer(converters).convert(program, keep_params)``.

    stock  the converters of TVM that ours stand in front of: ``importer.stock[name](node)``
    """

    def __init__(self, converters: dict[str, Converter]):
        self._own = converters
        self.stock: dict[str, Callable[[fx.Node], Any]] = {}
        super().__init__()

    def convert(self, program: torch.export.ExportedProgram, keep_params: bool) -> tvm.IRModule:
        """A Relax module with the function ``main``.  Raises ModelError where an operator is unknown or refused."""
        try:
            return self.from_exported_program(program, keep_params, True, False, None)
        except BaseException:
            self._close()
            raise

    def create_convert_map(self) -> dict[str, Callable[[fx.Node], Any]]:
        self.stock = super().create_convert_map()
        return {name: self._checked(name) for name in {**self.stock, **self._own}}

    def _check_unsupported_func_type(self, nodes: Any) -> None:
        calls = [node for node in nodes if node.op == "call_function"]
        unknown = sorted({node.target.__name__ for node in calls if node.target.__name__ not in self.convert_map})
        if unknown:
            names = ", ".join(f"aten.{name.removesuffix('.default')}" for name in unknown)
            whole = any(name.removesuffix(".default") in _FAST_PATH for name in unknown)
            raise ModelError(
                "operators that the importer knows", f"{names}, which it does not", _TRY_FAST_PATH if whole else _TRY
            )

    def _checked(self, name: str) -> Callable[[fx.Node], Any]:
        def convert(node: fx.Node) -> Any:
            try:
                result = self._own[name](node, self) if name in self._own else self.stock[name](node)
            except ModelError:
                raise
            except Exception as error:  # the stock converters raise what they meet: assertions, KeyError, TVM's errors
                words = f"{_operation(name, node)}: {telling_line(error)} ({type(error).__name__})"
                raise ModelError("operators that TVM can express as Relax", words, _TRY) from error
            return self._typed(result, node.meta.get("val"))

        return convert

    def _typed(self, result: Any, expected: Any) -> Any:
        """``result`` with the dtypes of ``expected``, a fake tensor or a tuple of them."""
        if isinstance(result, (tuple, list)) and isinstance(expected, (tuple, list)) and len(result) == len(expected):
            return type(result)(self._typed(*pair) for pair in zip(result, expected, strict=True))
        if not isinstance(expected, torch.Tensor) or not isinstance(result, tvm.ir.Expr):
            return result
        dtype = str(expected.dtype).removeprefix("torch.")
        if not isinstance(result.ty, relax.TensorType) or str(result.ty.dtype) == dtype:
            return result
        return self.block_builder.emit(relax.op.astype(result, dtype))

    def _close(self) -> None:
        """End what a failure has left open: TVM warns of a builder that dies with open blocks."""
        builder = getattr(self, "block_builder", None)
        while builder is not None:
            try:
                builder._end_block()
            except tvm.error.InternalError:  # none is open
                return


def _operation(name: str, node: fx.Node) -> str:
    """``aten.convolution(bfloat16 [2, 8, 12, 12], ...)``"""
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    words = [f"{str(tensor.dtype).removeprefix('torch.')} {[str(e) for e in tensor.shape]}" for tensor in tensors]
    operands = ", ".join(words).replace("'", "")
    return f"aten.{name.removesuffix('.default')}({operands})"
