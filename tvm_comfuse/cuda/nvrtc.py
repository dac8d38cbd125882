"""Compilation in this process, with NVRTC."""

from __future__ import annotations

from typing import Any

from tvm_comfuse.errors import BuildError

#: NVRTC has no <cuda.h> and no <math.h>: the tensor map's type (size and alignment of cuda.h) and the names that
#: generated code takes from them.  The macros silence a header of CUDA 13 that uses them without defining them.
_PRELUDE_NAME = b"comfuse_prelude.h"
_PRELUDE = b"""
#include <cuda/std/cstdint>
#include <cuda/std/limits>
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif
#ifndef __asm__
#define __asm__ asm
#endif
#ifndef __volatile__
#define __volatile__ volatile
#endif
"""
_QUIET = [f"-D__NV_SILENCE_{where}DEPRECATION_{end}=".encode() for where in ("", "HOST_") for end in ("BEGIN", "END")]


def run_nvrtc(source: str, options: list[str]) -> tuple[bytes, str]:
    """The cubin and the compiler's messages.  Raises BuildError; NVRTC must be there (toolchain.find_nvrtc)."""
    from cuda.bindings import nvrtc

    headers = {_PRELUDE_NAME: _PRELUDE, b"cuda.h": b""}
    program = _call(
        nvrtc.nvrtcCreateProgram,
        source.encode(),
        b"kernels.cu",
        len(headers),
        list(headers.values()),
        list(headers),
    )
    try:
        arguments = [option.encode() for option in options] + _QUIET + [b"--pre-include=" + _PRELUDE_NAME]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        text = bytes(log).rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            raise BuildError("CUDA source that NVRTC compiles", text.strip()[-4000:], "read the message above")
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(function: Any, *arguments: Any) -> Any:
    """The result of an NVRTC function that gives (status,) or (status, value)."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise BuildError("an NVRTC that works", f"{function.__name__} gave {status}", "reinstall tvm-comfuse[nvrtc]")
    return values[0] if values else None
