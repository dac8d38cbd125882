"""Fuse matrix products with the row reductions behind them into one Hopper kernel.

``compile`` takes a PyTorch or Relax model to a runnable library, ``explain`` says what it would fuse and why not.
Importing this package checks the versions of TVM and of its FFI and imports nothing heavy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_comfuse._version import __version__
from tvm_comfuse._versions import check_versions
from tvm_comfuse.errors import VersionError

try:
    check_versions()
except VersionError:
    # the command line says it in one line without a traceback, and its doctor must run just then
    if Path(sys.argv[0]).stem not in ("comfuse", "-m"):
        raise

if TYPE_CHECKING:
    from tvm_comfuse.build import compile, load
    from tvm_comfuse.errors import ComfuseError
    from tvm_comfuse.explanation import Explanation, explain
    from tvm_comfuse.refusal import Refusal
    from tvm_comfuse.relay_patterns import FuseClusters, discover
    from tvm_comfuse.runtime import Compiled
    from tvm_comfuse.schedules.plan import Plan
    from tvm_comfuse.target import parse_target
    from tvm_comfuse.tuning.api import tune

#: public name -> module that defines it; imported at first use
_LAZY = {
    "Compiled": "tvm_comfuse.runtime",
    "ComfuseError": "tvm_comfuse.errors",
    "Explanation": "tvm_comfuse.explanation",
    "FuseClusters": "tvm_comfuse.relay_patterns",
    "Plan": "tvm_comfuse.schedules.plan",
    "Refusal": "tvm_comfuse.refusal",
    "compile": "tvm_comfuse.build",
    "discover": "tvm_comfuse.relay_patterns",
    "explain": "tvm_comfuse.explanation",
    "load": "tvm_comfuse.build",
    "parse_target": "tvm_comfuse.target",
    "tune": "tvm_comfuse.tuning.api",
}

__all__ = [
    "ComfuseError",
    "Compiled",
    "Explanation",
    "FuseClusters",
    "Plan",
    "Refusal",
    "__version__",
    "compile",
    "discover",
    "explain",
    "load",
    "parse_target",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))


def _autoload() -> None:
    """Register the TIR and Relax pipelines called "comfuse", and the function with which an RPC server measures.

    TVM calls this through the entry-point group ``tvm.backends`` at the end of ``import tvm``, also in the worker
    processes of MetaSchedule; ``tvm_comfuse.compile`` calls it too, for a TVM told not to load entry points.  It may
    be called any number of times.
    """
    import_module("tvm_comfuse.tir_passes.pipeline")
    import_module("tvm_comfuse.relax_pipeline").register()
    import_module("tvm_comfuse.tuning.remote").register()
