"""Time both forms of the suites' rows on a Hopper GPU, and the two kernels of the split form alone.

    python benchmarks/split.py [--suite NAME] [--row NAME ...] [--json FILE.json]

FILE.json is a list of what benchmarks/pretune.py takes, so that records have both times: the plan, microseconds ("us") and
error of the fused form, and "split_us"; besides microseconds of the split form's kernels, the rows kernel's GB/s (every [M, N]
tensor once), the split form's error, and what the cost model had said.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import tvm

from tvm_comfuse.bench import suites, timing
from tvm_comfuse.bench.checks import run_seed
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import Records, compile_function, compile_row, new_output
from tvm_comfuse.bench.report import commit, device_name, environment
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.refusal import Refusal
from tvm_comfuse.schedules.rows import is_rows, spec_of
from tvm_comfuse.target import parse_target

COLUMNS = ("us", "split_us", "gemm_us", "rows_us", "rows_gbps", "error", "split_error", "eager_error")


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite")
    parser.add_argument("--row", action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'row':24}" + "".join(f"{name:>12}" for name in COLUMNS))
    for row in suites.select(suites.load(), options.suite, options.row):
        rows.append(measure(row))
        cells = (rows[-1].get(name) for name in COLUMNS)
        print(f"{row.name:24}" + "".join(f"{'-' if cell is None else f'{cell:.4g}':>12}" for cell in cells), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(row: suites.Row) -> dict[str, Any]:
    """One row; what has no kernel has no time."""
    target, op = parse_target("cuda"), OPS[row.op]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = timing.make_sets(op, row.M, row.N, row.K, row.dtype, l2_bytes=l2)
    out = new_output(row, "cuda")
    found: dict[str, Any] = {"row": row.label, "device": device_name(), "commit": commit(), "versions": environment()}
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with torch.no_grad():
        for form in ("fused", "split"):
            kernel = compile_row(row, target, Records(form=form))
            if isinstance(kernel, Refusal):
                found[f"{form}_refusal"] = str(kernel)
                continue
            prefix = "split_" if form == "split" else ""
            report = run_seed(row, kernel, 0, "cuda")
            found |= {
                f"{prefix}error": report["error"],
                "eager_error": report["eager_error"],
                f"{prefix}plan": kernel.plan,
            }
            found[f"{prefix}us"] = timing.time_call(lambda *inputs, run=kernel.run: run(list(inputs), out), sets)
    module = from_relax(op.relax_module(row.M, row.N, row.K, row.dtype))
    split, explanation = fuse(module, target, form="split")
    forms = explanation.matmuls[0].forms
    found["estimates"] = {"fused_us": forms.fused_us, "split_us": forms.split_us} if forms else None
    for _, func in split.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            found |= _alone(func, row, l2)
    return found


def _alone(func: Any, row: suites.Row, l2: int) -> dict[str, float]:
    """A kernel of the split form by itself, its inputs not in the cache."""
    params = [([int(extent) for extent in param.shape], getattr(torch, str(param.dtype))) for param in func.params]
    # every tensor of [M, ...] rotates, the outputs as well
    moved = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in params if shape[0] == row.M)
    sets = [
        [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in params]
        for _ in range(timing.number_of_sets(moved, l2))
    ]
    kernel = compile_function(func, parse_target("cuda"))
    us = timing.time_call(lambda *tensors: kernel(*tensors), sets)
    if not is_rows(func):
        return {"gemm_us": us}
    spec = spec_of(func)
    streams = [*spec.tile_operands, *spec.tile_outputs]
    size = sum(getattr(torch, tensor.dtype).itemsize for tensor in streams) * row.M * row.N
    return {"rows_us": us, "rows_gbps": size / us / 1e3}


if __name__ == "__main__":
    main()
