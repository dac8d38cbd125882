"""TVM's hook for compiling CUDA, so that a library holds the binary that was reported on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm.target import Target

from tvm_comfuse.cuda.compiler import compile_cubin

#: TVM calls it with the source when it builds for a GPU that is there, and when it loads a library of source only
_HOOK = "tvm_callback_cuda_compile"


@contextmanager
def own_cuda_compiler(arch: str, *, fast_math: bool = False) -> Iterator[None]:
    """Inside, TVM compiles CUDA with compile_cubin; before and after, in its own way.

    TVM's own hook turns approximate mathematics on for a whole process and keeps no binaries.
    arch  for sources that are compiled without a target in scope, such as those of a loaded library
    """
    before = tvm.get_global_func(_HOOK, allow_missing=True)

    def compile_source(source: str) -> bytearray:
        target = Target.current(allow_none=True)
        chosen = str(target.attrs.get("arch", arch)) if target is not None and target.kind.name == "cuda" else arch
        return bytearray(compile_cubin(source, chosen, fast_math=fast_math).cubin)

    tvm_ffi.register_global_func(_HOOK, compile_source, override=True)
    try:
        yield
    finally:
        if before is not None:
            tvm_ffi.register_global_func(_HOOK, before, override=True)
        else:
            tvm_ffi.registry.remove_global_func(_HOOK)
