"""The TIR pipeline "comfuse": clusters become kernels, everything else goes the stock way."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

NAME = "comfuse"


def comfuse_pipeline() -> tuple[Any, Any, Any]:
    """(module pass, host finalisation, device finalisation), the form TVM's registry wants.

    The two stock pipelines each fail on the other's functions, so the module is split: functions with s_tir semantics
    (TOPI, dlight) and TIRx functions (our kernels).
    """
    from tvm_comfuse.tir_passes.lower import LowerClusters  # the emitter is loaded when something is compiled

    stock, _, _ = tvm.s_tir.pipeline.default_s_tir_pipeline()
    kernels, host, device = tirx.compilation_pipeline.tirx_pipeline()

    @tvm.transform.module_pass(opt_level=0, name="comfuse.dispatch")
    def dispatch(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        mod = LowerClusters()(mod)
        parts: dict[bool, dict[Any, Any]] = {True: {}, False: {}}
        for gvar, func in mod.functions_items():
            parts[bool(func.attrs is not None and func.attrs.get("s_tir"))][gvar] = func
        result = tvm.IRModule({}, attrs=mod.attrs)
        for is_stock, functions in parts.items():
            if functions:
                result.update((stock if is_stock else kernels)(tvm.IRModule(functions, attrs=mod.attrs)))
        return result

    return dispatch, host, device


def register() -> None:
    """Makes `tir_pipeline="comfuse"` known to TVM."""
    tirx.compilation_pipeline.register_tir_pipeline(NAME, comfuse_pipeline)


register()
