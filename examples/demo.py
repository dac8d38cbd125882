"""What ``make demo`` runs: a PyTorch encoder layer to Hopper kernels, on a machine that needs no GPU.

1. import the layer and explain what is fused;
2. compile it for an H200 and each kernel to an sm_90a cubin;
3. compile the same layer for this machine's CPU, run it on short sequences, and compare with PyTorch.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings

import torch
from encoder_layer import build
from rich.console import Console

import tvm_comfuse
from tvm_comfuse.cli.compile import kernel_table
from tvm_comfuse.cli.explain import show

#: the error our result may have, as a multiple of eager PyTorch's in the same dtype
ERROR_FACTOR = 2.0


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, in float64."""
    return float((out.double() - reference).norm() / reference.norm())


def show_kernels(console: Console, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Compile for the H200 and print the compiler's figures of the fused kernels; True if none of them spills."""
    start = time.perf_counter()
    compiled = tvm_comfuse.compile(layer, "h200", example_args=inputs)
    reports = compiled.kernel_report()
    console.print(kernel_table(reports))
    spilled = sum(report.spill_stores + report.spill_loads for report in reports)
    size = sum(len(report.cubin) for report in reports)
    console.print(f"{size} bytes of sm_90a code, {spilled} bytes spilled, {time.perf_counter() - start:.1f} s\n")
    return spilled == 0


def show_numbers(console: Console, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Run on the CPU and print the errors; True if ours is small enough."""
    compiled = tvm_comfuse.compile(layer, "llvm", example_args=inputs)
    ours = compiled.run(*inputs)
    with torch.no_grad():
        eager = layer(*inputs)
        reference = copy.deepcopy(layer).double()(*[value.double() for value in inputs])
    error, eager_error = relative_error(ours, reference), relative_error(eager, reference)
    console.print(f"relative error against float64: compiled {error:.2e}, eager bfloat16 {eager_error:.2e}")
    return error <= ERROR_FACTOR * eager_error


def main() -> int:
    """Exit code 0 if everything is as it should be."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch.export's own
    console = Console(width=120, highlight=False, markup=False)
    layer, inputs = build(batch=32, sequence=512)
    explanation = tvm_comfuse.explain(layer, "h200", example_args=inputs)
    show(console, explanation)
    checks = {
        "every matmul is fused": all(matmul.fused for matmul in explanation.matmuls),
        "no kernel spills": show_kernels(console, layer, inputs),
        "numbers are right": show_numbers(console, *build()),
    }
    for name, good in checks.items():
        console.print(f"{name}: {'yes' if good else 'NO'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
