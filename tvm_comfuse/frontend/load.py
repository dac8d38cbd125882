"""Models named on a command line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tvm

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend.relax_import import from_relax, load_relax
from tvm_comfuse.frontend.torch_import import from_torch, load_exported_program

_FORMS = "a .pt2 file, a .json file, file.py:function or package.module:function"


@dataclass(frozen=True)
class LoadedModel:
    """An imported model.

    mod             Relax module with the function ``main``
    example_inputs  torch tensors or numpy arrays in the order of main's parameters, where the source has them
    name            a short name for messages and files: the stem of the file, or the function's name
    """

    mod: tvm.IRModule
    example_inputs: list[Any] | None
    name: str


def load_model(spec: str) -> LoadedModel:
    """Load a model from a ``.pt2`` file, a ``.json`` file of ``tvm.ir.save_json``, or a Python function.

    ``file.py:function`` or ``package.module:function`` names a function without arguments that returns a Relax
    IRModule, a torch ExportedProgram, or ``(model, example_inputs)`` or ``(model, example_inputs, dynamic_shapes)``,
    where the model may also be a torch.nn.Module.  Raises ModelError.
    """
    path = Path(spec)
    if path.suffix == ".pt2":
        program = load_exported_program(path)
        return LoadedModel(from_torch(program), _inputs_of_program(program), path.stem)
    if path.suffix == ".json":
        return LoadedModel(load_relax(path), None, path.stem)
    location, separator, function = spec.rpartition(":")
    if not separator or not location or not function.isidentifier():
        found = f"a {path.suffix or 'nameless'} file, {spec!r}" if path.is_file() else repr(spec)
        raise ModelError(_FORMS, found, "export a torch model with torch.export.save, a Relax module with save_json")
    return _from_function(location, function)


def _from_function(location: str, function: str) -> LoadedModel:
    spec = f"{location}:{function}"
    is_file = location.endswith(".py")
    with _import_path(Path(location).resolve().parent if is_file else Path.cwd()):
        module = _import_file(Path(location)) if is_file else _import_module(location)
        factory = getattr(module, function, None)
        if not callable(factory):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            found = "something that is not callable" if factory is not None else f"only {', '.join(names) or 'nothing'}"
            raise ModelError(f"a function {function} in {location}", found, "check the name behind the colon")
        try:
            result = factory()
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ModelError(
                f"{spec} to return a model", f"{type(error).__name__}: {error}", "call the function by itself"
            ) from error
    return _from_result(spec, function, result)


def _from_result(spec: str, name: str, result: Any) -> LoadedModel:
    model, inputs, dynamic_shapes = result, None, None
    if isinstance(result, (tuple, list)) and 2 <= len(result) <= 3:
        model, inputs = result[0], _inputs(spec, result[1])
        dynamic_shapes = result[2] if len(result) == 3 else None
    if isinstance(model, tvm.IRModule):
        return LoadedModel(from_relax(model), inputs, name)
    torch = sys.modules.get("torch")  # a torch model cannot have come without it
    if torch is not None and isinstance(model, torch.export.ExportedProgram):
        return LoadedModel(from_torch(model), inputs or _inputs_of_program(model), name)
    if torch is not None and isinstance(model, torch.nn.Module):
        if inputs is None:
            raise ModelError(f"{spec} to return (module, example inputs)", "a module alone", "return a pair")
        return LoadedModel(from_torch(model, tuple(inputs), dynamic_shapes), inputs, name)
    raise ModelError(
        f"{spec} to return a Relax IRModule, an ExportedProgram or (model, example inputs)",
        f"{type(model).__name__} in a tuple" if model is not result else type(result).__name__,
        "return (torch module, example inputs) or a tvm.IRModule",
    )


def _inputs(spec: str, value: Any) -> list[Any] | None:
    """Example inputs as a list; one tensor counts as a list of one."""
    if value is None:
        return None
    inputs = list(value) if isinstance(value, (tuple, list)) else [value]
    wrong = [type(item).__name__ for item in inputs if not isinstance(item, np.ndarray) and not _is_torch(item)]
    if wrong:
        raise ModelError(f"the example inputs of {spec} to be tensors", ", ".join(wrong), "return torch tensors")
    return inputs


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _inputs_of_program(program: Any) -> list[Any] | None:
    """The example inputs a program was exported with, if it has kept them and all of them are tensors."""
    import torch

    if program.example_inputs is None:
        return None
    leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
    return leaves if leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves) else None


@contextlib.contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """Python's search path with ``folder`` in front, for what the user's file imports beside itself."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError("an existing Python file", f"nothing at {path}", "check the path before the colon")
    name = f"comfuse_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise ModelError(f"{path} to run", f"{type(error).__name__}: {error}", f"python {path}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = "check the name before the colon, and that the package is installed or in the working directory"
        raise ModelError(f"a module {name}", str(error), hint) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        found = f"{type(error).__name__}: {error}"
        raise ModelError(f"{name} to import", found, f"python -c 'import {name}'") from error
