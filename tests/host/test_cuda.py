"""CUDA to cubins without a GPU: compilers, their report, the cache, TVM's hook."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te

from tvm_comfuse.cuda import CubinReport, cache, compile_cubin, find_nvcc, find_nvrtc, sources, toolchain
from tvm_comfuse.cuda import compiler as compiler_module
from tvm_comfuse.cuda.callback import own_cuda_compiler
from tvm_comfuse.cuda.report import parse_ptxas
from tvm_comfuse.errors import BuildError
from tvm_comfuse.target import parse_target

COMPILERS = [name for name, find in (("nvcc", find_nvcc), ("nvrtc", find_nvrtc)) if find() is not None]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no CUDA compiler")
ELF = b"\x7fELF"
#: 64 values that live across a barrier and 24 registers to hold them
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* out, const float* in) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 3) % 64] + v[63 - i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for each test."""
    monkeypatch.setenv("TVM_COMFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def executable() -> tvm.runtime.Executable:
    """A function with two kernels, one with static shared memory."""
    a = te.placeholder((128, 64), "float32", "a")
    b = te.compute((128, 64), lambda i, j: a[i, j] * 2.0, name="b")
    c = te.compute((128, 64), lambda i, j: te.exp(b[i, 63 - j]), name="c")
    sch = s_tir.Schedule(te.create_prim_func([a, c]))
    row, column = sch.get_loops("c")
    sch.bind(row, "blockIdx.x")
    sch.bind(column, "threadIdx.x")
    sch.compute_at("b", row)
    sch.bind(sch.get_loops("b")[-1], "threadIdx.x")
    sch.set_scope("b", 0, "shared")
    return tvm.compile(sch.mod, target=parse_target("h200"))


def test_sources_finds_the_text(executable: tvm.runtime.Executable) -> None:
    (text,) = sources(executable)
    assert "__global__" in text
    assert "__shared__" in text
    assert sources(executable.mod) == [text]


def test_sources_of_a_cpu_module() -> None:
    a = te.placeholder((8,), "float32", "a")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] + 1, name="b")])
    assert sources(tvm.compile(func, target=parse_target("llvm"))) == []


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_generated_source_compiles(executable: tvm.runtime.Executable, compiler: str) -> None:
    report = compile_cubin(sources(executable)[0], compiler=compiler)
    assert report.cubin.startswith(ELF)
    assert report.arch == "sm_90a"
    assert report.compiler.startswith(compiler)
    assert [kernel.name for kernel in report.kernels] == ["main_kernel"]
    assert 0 < report.registers <= 64
    # Hopper keeps 1 KiB of a block's shared memory for itself
    assert report.shared_bytes in (256, 1280)
    assert report.spill_stores == report.spill_loads == 0


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_spills_are_counted(compiler: str) -> None:
    report = compile_cubin(SPILLING, compiler=compiler)
    assert report.registers <= 32
    assert report.spill_stores > 0
    assert report.spill_loads > 0


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_error_is_the_compilers(compiler: str) -> None:
    with pytest.raises(BuildError, match="undefined"):
        compile_cubin("__global__ void f() { nothing(); }", compiler=compiler)


@needs_compiler
def test_fast_math_is_off_unless_asked_for() -> None:
    source = 'extern "C" __global__ void f(float* a, float* b) { a[0] = a[0] / b[0]; }'
    exact, fast = compile_cubin(source), compile_cubin(source, fast_math=True)
    assert len(exact.cubin) > len(fast.cubin)  # a division that is rounded right takes a subroutine


@needs_compiler
def test_second_compilation_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    first = compile_cubin(SPILLING)
    assert len(list(own_cache.rglob("*.json"))) == 1
    assert not list(own_cache.rglob("*.part"))
    monkeypatch.setattr(compiler_module, "_run_nvcc", _never)
    monkeypatch.setattr(compiler_module, "run_nvrtc", _never)
    assert compile_cubin(SPILLING) == first
    with pytest.raises(AssertionError, match="was compiled"):
        compile_cubin(SPILLING, arch="sm_90")
    with pytest.raises(AssertionError, match="was compiled"):
        compile_cubin(SPILLING, fast_math=True)
    with pytest.raises(AssertionError, match="was compiled"):
        compile_cubin(SPILLING, use_cache=False)


def _never(*_arguments: object) -> tuple[bytes, str]:
    raise AssertionError("the source was compiled")


def _entry(cubin: bytes = b"code") -> CubinReport:
    return CubinReport(cubin, (), ("a warning",), "nvcc 1.0", "sm_90a")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"cubin": 3}', '{"cubin": "AA==", "kernels": [{"x": 1}]}'])
def test_unreadable_entry_is_ignored_and_replaced(own_cache: Path, text: str) -> None:
    cache.write("ab12", _entry())
    (path,) = own_cache.rglob("*.json")
    path.write_text(text)
    assert cache.read("ab12") is None
    cache.write("ab12", _entry(b"again"))
    assert cache.read("ab12") == _entry(b"again")


def test_cache_that_cannot_be_written_does_no_harm(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    cache.write("ab12", _entry())
    assert cache.read("ab12") is None


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_COMFUSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/tvm_comfuse")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "tvm_comfuse"


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "find_nvcc", lambda: None)
    monkeypatch.setattr(compiler_module, "find_nvrtc", lambda: None)
    with pytest.raises(BuildError) as caught:
        compile_cubin(SPILLING)
    assert caught.value.found == "no nvcc and no nvrtc"
    assert "tvm-comfuse[nvrtc]" in caught.value.hint
    with pytest.raises(BuildError, match="'gcc'"):
        compile_cubin(SPILLING, compiler="gcc")


def test_compilers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH first; in pip's wheels, with their headers, where PATH and toolkits have none."""
    wheels = tmp_path / "site" / "nvidia" / "cu13"
    for folder, version in ((tmp_path / "path", "13.1"), (wheels / "bin", "13.2")):
        folder.mkdir(parents=True)
        program = folder / "nvcc"
        program.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.1"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (wheels / "include" / "cccl").mkdir(parents=True)
    (wheels / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr(toolchain, "_toolkit_roots", list)
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    find = toolchain.find_nvcc.__wrapped__
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin:/usr/bin")
    assert str(find()) == "nvcc 13.1"
    assert find().include == ()
    (tmp_path / "path" / "nvcc").unlink()
    monkeypatch.setenv("PATH", "/bin")
    assert str(find()) == "nvcc 13.2"
    assert find().include == (str(wheels / "include"), str(wheels / "include" / "cccl"))
    (wheels / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert find() is None


def test_headers_without_the_cpp_library_are_passed_over(tmp_path: Path) -> None:
    """As the wheels that PyTorch brings."""
    bare, full = tmp_path / "bare" / "include", tmp_path / "full" / "targets" / "x86_64-linux" / "include"
    for folder in (bare, full / "cccl" / "cuda" / "std"):
        folder.mkdir(parents=True)
    for file in (bare / "cuda_runtime.h", full / "cuda_runtime.h", full / "cccl" / "cuda" / "std" / "cstdint"):
        file.touch()
    roots, headers = [tmp_path / "bare", tmp_path / "full"], ("cuda_runtime.h", "cuda/std/cstdint")
    assert toolchain._include_folders(roots, headers) == (str(full), str(full / "cccl"))
    assert toolchain._include_folders(roots, headers[:1]) == (str(bare),)
    assert toolchain._include_folders(roots[:1], headers) == ()


def test_ptxas_log() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    64 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 64 bytes cumulative stack size, 1040 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    kernels, warnings = parse_ptxas(log)
    report = CubinReport(b"", kernels, warnings, "nvcc", "sm_90a")
    assert [kernel.name for kernel in kernels] == ["first", "second"]
    assert kernels[0].stack_frame == 64
    assert (report.registers, report.spill_stores, report.spill_loads, report.shared_bytes) == (168, 12, 20, 1040)
    assert len(warnings) == 1
    assert "serialized" in warnings[0]
    assert report.to_dict()["kernels"][1]["registers"] == 8
    assert parse_ptxas("") == ((), ())


@needs_compiler
def test_hook_compiles_and_is_put_back() -> None:
    before = tvm.get_global_func("tvm_callback_cuda_compile")
    with own_cuda_compiler("sm_90a"):
        cubin = bytes(tvm.get_global_func("tvm_callback_cuda_compile")(SPILLING))
        assert cubin == compile_cubin(SPILLING).cubin
        with parse_target("cuda -arch=sm_80"):
            other = bytes(tvm_ffi.get_global_func("tvm_callback_cuda_compile")(SPILLING))
        assert other == compile_cubin(SPILLING, "sm_80").cubin != cubin
    assert tvm.get_global_func("tvm_callback_cuda_compile").same_as(before)
