"""``comfuse run MODEL``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_comfuse.cli.common import (
    FormOption,
    JsonFlag,
    Model,
    Pretuned,
    RowsOption,
    TuningRecords,
    console,
    print_json,
    start,
)
from tvm_comfuse.errors import ModelError
from tvm_comfuse.output import check_output

if TYPE_CHECKING:
    from tvm_comfuse.runtime import Compiled


def run(
    model: Model,
    target: Annotated[
        str, typer.Option("--target", help="h200, h100, cuda, llvm; auto: the GPU if there is one.")
    ] = "auto",
    library: Annotated[Path | None, typer.Option("--library", help="Run this library instead of compiling.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the outputs to a PyTorch file.")] = None,
    tuning_records: TuningRecords = None,
    pretuned: Pretuned = True,
    form: FormOption = "auto",
    rows: RowsOption = None,
    json: JsonFlag = False,
) -> None:
    """Compile a model, run it on its example inputs, and describe the outputs."""
    start()
    if save is not None:
        check_output(save)
    from tvm_comfuse.build import compile as compile_model
    from tvm_comfuse.build import load
    from tvm_comfuse.frontend import load_model

    loaded = load_model(model)
    if loaded.example_inputs is None:
        raise ModelError(
            "example inputs to run the model on", f"none in {model}", "use file.py:function that returns them"
        )
    if library:
        compiled = load(library)
    else:
        chosen = _default_target() if target == "auto" else target
        compiled = compile_model(
            loaded.mod, chosen, tuning_records=tuning_records, use_pretuned=pretuned, form=form, rows=rows
        )
    outputs, seconds = _timed(compiled, loaded.example_inputs)
    if save is not None:
        _save(outputs, save)
    report: dict[str, Any] = {
        "model": loaded.name,
        "target": str(compiled.target),
        "seconds": seconds,
        "outputs": [_summary(output) for output in outputs],
    }
    if json:
        print_json(report)
        return
    out = console()
    out.print(f"{loaded.name}: ran in {seconds * 1e3:.2f} ms on the second call")
    for number, output in enumerate(report["outputs"]):
        out.print(
            f"output {number}: {output['shape']} {output['dtype']}, {output['finite']} of {output['elements']} finite"
        )


def _default_target() -> str:
    import tvm

    return "cuda" if tvm.cuda(0).exist else "llvm"


def _timed(compiled: Compiled, inputs: list[Any]) -> tuple[list[Any], float]:
    """Outputs as torch tensors, and the seconds of a second call; the first one also loads the code."""
    import torch

    given = [torch.as_tensor(value) for value in inputs]
    compiled.run(*given)
    start_time = time.perf_counter()
    outputs = list(_flat(compiled.run(*given)))
    return outputs, time.perf_counter() - start_time


def _flat(result: Any) -> list[Any]:
    return [leaf for part in result for leaf in _flat(part)] if isinstance(result, tuple) else [result]


def _summary(output: Any) -> dict[str, Any]:
    finite = int(output.isfinite().sum())
    return {
        "shape": list(output.shape),
        "dtype": str(output.dtype).removeprefix("torch."),
        "elements": output.numel(),
        "finite": finite,
        "norm": float(output.double().norm()) if finite == output.numel() else None,
    }


def _save(outputs: list[Any], path: Path) -> None:
    import torch

    try:
        torch.save([output.cpu() for output in outputs], path)
    except (OSError, RuntimeError) as error:
        raise ModelError("a file to write the outputs to", f"{path}: {error}", "check the path") from error
