"""CUDA source to a cubin, with nvcc or NVRTC."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tvm_comfuse.cuda import cache
from tvm_comfuse.cuda.nvrtc import run_nvrtc
from tvm_comfuse.cuda.report import CubinReport, parse_ptxas
from tvm_comfuse.cuda.toolchain import Compiler, find_nvcc, find_nvrtc
from tvm_comfuse.errors import BuildError

#: ptxas options: the report, a warning where local memory is used, and the register use TVM compiles with by default
PTXAS_OPTIONS = ("-v", "--warn-on-local-memory-usage", "--register-usage-level=10")
#: "declared but never referenced": generated code is full of it
_UNUSED = 177


def compile_cubin(
    source: str,
    arch: str = "sm_90a",
    *,
    compiler: str = "auto",
    fast_math: bool = False,
    use_cache: bool = True,
) -> CubinReport:
    """Compile one CUDA source for one architecture.

    compiler   ``nvcc``, ``nvrtc``, or ``auto``: the one named by TVM_CUDA_COMPILE_MODE if it is there, else nvcc, else
               NVRTC
    fast_math  let the compiler use approximate division, square root and exponential, and flush denormals
    use_cache  look in and write to the user's cache directory

    Raises BuildError if there is no compiler or it reports an error.
    """
    tool = choose_compiler(compiler)
    options = _options(tool, arch, fast_math)
    key = cache.key_of(source, f"{tool.kind} {tool.version} {tool.path}", options)
    if use_cache and (stored := cache.read(key)) is not None:
        return stored
    cubin, log = _run_nvcc(tool, source, options) if tool.kind == "nvcc" else run_nvrtc(source, options)
    kernels, warnings = parse_ptxas(log)
    report = CubinReport(cubin, kernels, warnings, str(tool), arch)
    if use_cache:
        cache.write(key, report)
    return report


def choose_compiler(name: str = "auto") -> Compiler:
    """The compiler of a name, see compile_cubin.  Raises BuildError if there is none of it."""
    finders = {"nvcc": find_nvcc, "nvrtc": find_nvrtc}
    if name not in (*finders, "auto"):
        raise BuildError("compiler nvcc, nvrtc or auto", repr(name), "use one of these names")
    if name == "auto":
        preferred = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvcc")
        order = sorted(finders, key=lambda kind: kind != preferred)
    else:
        order = [name]
    for kind in order:
        if (found := finders[kind]()) is not None:
            return found
    raise BuildError(
        "a CUDA compiler (nvcc on PATH, or NVRTC)",
        f"no {' and no '.join(order)}",
        'pip install "tvm-comfuse[nvrtc]"',
    )


def _options(tool: Compiler, arch: str, fast_math: bool) -> list[str]:
    include = [f"-I{folder}" for folder in tool.include]
    # both compilers approximate nothing unless told; said all the same, for the reader of a log
    math = ["--use_fast_math"] if fast_math else []
    if tool.kind == "nvcc":
        return [
            "-cubin",
            f"-arch={arch}",
            "-O3",
            "-std=c++17",
            "--expt-relaxed-constexpr",
            f"-diag-suppress={_UNUSED}",
            *math,
            f"-Xptxas={','.join(PTXAS_OPTIONS)}",
            *include,
        ]
    return [
        f"--gpu-architecture={arch}",
        "-default-device",
        "--device-int128",
        f"--diag-suppress={_UNUSED}",
        *math,
        *(f"--ptxas-options={option}" for option in PTXAS_OPTIONS),
        *include,
    ]


def _run_nvcc(tool: Compiler, source: str, options: list[str]) -> tuple[bytes, str]:
    """The cubin and the compiler's messages.  Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="comfuse-") as folder:
        text, binary = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        text.write_text(source)
        command = [tool.path, *options, "-o", str(binary), str(text)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        log = run.stdout + run.stderr
        if run.returncode != 0 or not binary.is_file():
            raise BuildError("CUDA source that nvcc compiles", log.strip()[-4000:], "read the message above")
        return binary.read_bytes(), log
