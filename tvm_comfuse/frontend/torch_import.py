"""PyTorch -> Relax."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend.messages import first_line, telling_line

if TYPE_CHECKING:
    import torch


def from_torch(
    model: torch.nn.Module | torch.export.ExportedProgram | str | Path,
    example_args: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    *,
    keep_params: bool = False,
    normalize: bool = True,
) -> tvm.IRModule:
    """Import a PyTorch model; the result has one Relax function ``main``.

    model           a module, an exported program or the path of a ``.pt2`` file.  A module is exported here, in eval
                    mode whatever mode it is in (and is left in): dropout does nothing, batch norm uses its running
                    statistics.  The fused attention fast path is off
    example_args    for a module: the tuple of tensors that ``torch.export.export`` is called with
    dynamic_shapes  for a module: as for ``torch.export.export``; a ``torch.export.Dim`` becomes a symbolic extent
    keep_params     parameters stay arguments of ``main``, behind the inputs, with their values in its attribute
                    ``params``; otherwise they are constants
    normalize       run ``frontend.normalize`` on the result

    A single output is returned as a tensor and not as a tuple.  Raises ModelError.
    """
    torch = _torch()
    from tvm_comfuse.frontend.importer import Importer
    from tvm_comfuse.frontend.normal_form import normalize as normalize_pass
    from tvm_comfuse.frontend.torch_converters import converters

    with warnings.catch_warnings():
        # PyTorch warns of what it does itself when it copies a program
        warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
        program = _decompose(torch, _program(torch, model, example_args, dynamic_shapes))
    try:
        mod = Importer(converters()).convert(program, keep_params)
    except ModelError:
        raise
    except Exception as error:  # outside the operators: parameters, symbolic shapes, the outputs
        raise ModelError(
            "a program that TVM's PyTorch importer takes",
            f"{type(error).__name__}: {telling_line(error)}",
            "export it again without unusual inputs, outputs and dynamic shapes",
        ) from error
    return normalize_pass()(mod) if normalize else mod


def load_exported_program(path: str | Path) -> torch.export.ExportedProgram:
    """Read a ``.pt2`` file.  Raises ModelError where it is missing or is not one."""
    torch = _torch()
    path = Path(path)
    if not path.is_file():
        raise ModelError("an existing .pt2 file", f"nothing at {path}", "check the path")
    try:
        if not zipfile.is_zipfile(path):  # of such a file PyTorch 2.14 logs a traceback besides raising
            raise zipfile.BadZipFile("not a ZIP archive")
        return torch.export.load(str(path))
    except (RuntimeError, ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ModelError(
            "a file written by torch.export.save",
            f"{path} cannot be read ({type(error).__name__}: {first_line(error)})",
            f"write it again with torch.export.save, with a PyTorch like this one ({torch.__version__})",
        ) from error


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ModelError("PyTorch, to read a PyTorch model", "no module named torch", "pip install torch") from error
    return torch


def _program(torch: Any, model: Any, example_args: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    if isinstance(model, torch.nn.Module):
        if example_args is None:
            raise ModelError("example_args, to export a torch module", "None", "pass a tuple of example tensors")
        return _export(torch, model, example_args, dynamic_shapes)
    if example_args is not None or dynamic_shapes is not None:
        raise ModelError(
            "no example_args and no dynamic_shapes for a program that is exported already",
            "some",
            "leave them out: shapes were fixed by torch.export.export",
        )
    if isinstance(model, torch.export.ExportedProgram):
        return model
    if isinstance(model, (str, Path)):
        return load_exported_program(model)
    raise ModelError(
        "a torch.nn.Module, a torch.export.ExportedProgram or the path of a .pt2 file",
        type(model).__name__,
        "export the model with torch.export.export",
    )


def _export(torch: Any, module: Any, example_args: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    args = tuple(example_args) if isinstance(example_args, (tuple, list)) else (example_args,)
    with _inference(torch, module), _one_message():
        try:
            return torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
        except Exception as error:  # torch.export documents no set of exceptions, and user code runs inside it
            raise ModelError(
                "a module that torch.export.export can trace",
                f"{type(error).__name__}: {first_line(error)}",
                "call torch.export.export yourself to see the whole message",
            ) from error


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """What PyTorch logs and prints to standard error on its way to an exception is left to the exception."""
    before, told = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(told):
            yield
        sys.stderr.write(told.getvalue())
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _inference(torch: Any, module: Any) -> Iterator[None]:
    """Eval mode, and the attention fast path off: it is one opaque operator that no compiler can look into."""
    training = {child: child.training for child in module.modules()}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for child, mode in training.items():
            child.training = mode


def _decompose(torch: Any, program: Any) -> Any:
    """Down to core ATen, except the operators that have a converter."""
    from tvm_comfuse.frontend.torch_converters import preserved_ops

    table = torch.export.default_decompositions()
    for operator in preserved_ops():
        table.pop(operator, None)
    return program.run_decompositions(table)
