"""Relax modules given by the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from tvm_comfuse.errors import ModelError
from tvm_comfuse.frontend.messages import first_line
from tvm_comfuse.frontend.normal_form import normalize as normalize_pass


def from_relax(mod: Any, *, normalize: bool = True) -> tvm.IRModule:
    """Check that ``mod`` is a well-formed Relax module with a function ``main``; returns it in normal form.

    Raises ModelError.
    """
    if not isinstance(mod, tvm.IRModule):
        raise ModelError("a tvm.IRModule", type(mod).__name__, "build one with relax.BlockBuilder or an importer")
    names = sorted(str(name.name_hint) for name in mod.get_global_vars())
    if "main" not in names:
        found = ", ".join(names) if names else "no function"
        raise ModelError("a module with a function main", found, "rename the entry function to main")
    main = mod["main"]
    if not isinstance(main, relax.Function):
        raise ModelError("main to be a Relax function", type(main).__name__, "wrap it in a Relax function")
    try:
        relax.analysis.well_formed(mod)
    except Exception as error:  # TVM raises ValueError, TypeError or InternalError, by the rule that is broken
        raise ModelError(
            "a well-formed Relax module",
            f"{type(error).__name__}: {first_line(error)}",
            "check for variables used out of their scope, and build the module with relax.BlockBuilder",
        ) from error
    return normalize_pass()(mod) if normalize else mod


def load_relax(path: str | Path, *, normalize: bool = True) -> tvm.IRModule:
    """Read a module written by ``tvm.ir.save_json``.  Raises ModelError where the file is missing or is not one."""
    path = Path(path)
    if not path.is_file():
        raise ModelError("an existing .json file", f"nothing at {path}", "check the path")
    needed, hint = "a module written by tvm.ir.save_json", "write it again with tvm.ir.save_json(mod)"
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise ModelError(needed, f"{path} is not JSON ({error})", hint) from error
    # TVM's reader is native code and trusts its input: look at the outline before it does.
    if not isinstance(document, dict) or "nodes" not in document:
        raise ModelError(needed, f"{path} holds some other JSON document", hint)
    try:
        loaded = tvm.ir.load_json(text)
    except Exception as error:  # the reader raises RuntimeError, ValueError, KeyError, TypeError and TVM's own errors
        writer = _version(document)
        found = f"{path}, written by TVM {writer}, cannot be read by TVM {tvm.__version__} ({type(error).__name__})"
        raise ModelError(needed, found, hint) from error
    return from_relax(loaded, normalize=normalize)


def _version(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    version = metadata.get("tvm_version") if isinstance(metadata, dict) else None
    return str(version) if version else "of unknown version"
