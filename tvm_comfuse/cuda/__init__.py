"""CUDA compilation without a GPU: source to cubin, with what ptxas reports about each kernel."""

from tvm_comfuse.cuda.compiler import compile_cubin
from tvm_comfuse.cuda.report import CubinReport, KernelReport
from tvm_comfuse.cuda.sources import sources
from tvm_comfuse.cuda.toolchain import find_nvcc, find_nvrtc

__all__ = ["CubinReport", "KernelReport", "compile_cubin", "find_nvcc", "find_nvrtc", "sources"]
