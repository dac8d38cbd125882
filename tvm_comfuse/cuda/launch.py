"""What a launch adds to a kernel: dynamic shared memory."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

_SCOPE = "shared.dyn"
#: the pass after which device functions are apart from host functions and nothing is launched yet
_SPLIT = "comfuse.dispatch"


class DynamicShared:
    """Bytes of dynamic shared memory by kernel name, filled while a module is compiled with `instrument`."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def instrument(self) -> Any:
        """For a PassContext."""
        sizes = self.sizes

        @tvm.ir.instrument.pass_instrument
        class Collect:
            """Reads the device functions."""

            def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
                if str(info.name) == _SPLIT:
                    sizes.update(dynamic_shared(mod))

        return Collect()


def dynamic_shared(mod: tvm.IRModule) -> dict[str, int]:
    """Bytes of dynamic shared memory of each function of a lowered module that has any, by its symbol."""
    sizes: dict[str, int] = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            symbol = str((func.attrs or {}).get("global_symbol", gvar.name_hint))
            size = sum(map(_bytes, _allocations(func.body)))
            if size:
                sizes[symbol] = size
    return sizes


def _allocations(body: Any) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        if str(node.buffer.scope()) == _SCOPE:
            found.append(node.buffer)

    tvm_ffi.structural_walk(body, [(tirx.AllocBuffer, visit)])
    return found


def _bytes(buffer: Any) -> int:
    elements = 1
    for extent in buffer.shape:
        elements *= int(extent)
    return elements * ((tvm.DataType(str(buffer.dtype)).bits + 7) // 8)
