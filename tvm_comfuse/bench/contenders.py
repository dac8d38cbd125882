"""The others: bare cuBLAS, eager PyTorch, and TorchInductor at the best of several settings."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tvm_comfuse.bench.ops import OpDef
from tvm_comfuse.bench.timing import Captured, capture

#: Settings of TorchInductor by name.  A setting that a version of PyTorch lacks is left out of its patch.
MAX = {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
INDUCTOR_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "coordinate-descent": {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True},
    "max-autotune": MAX,
    "max-autotune-no-epilogue": {**MAX, "epilogue_fusion": False},
    "max-autotune-tma": {
        **MAX,
        "triton.enable_persistent_tma_matmul": True,
        "coordinate_descent_check_all_directions": True,
    },
    "max-autotune-exhaustive": {
        **MAX,
        "triton.enable_persistent_tma_matmul": True,
        "coordinate_descent_check_all_directions": True,
        "max_autotune_gemm_search_space": "EXHAUSTIVE",
    },
}
#: which settings a level of effort tries, the one most likely to win first
INDUCTOR_LEVELS: dict[str, tuple[str, ...]] = {
    "none": (),
    "default": ("default",),
    "quick": ("default", "coordinate-descent", "max-autotune-no-epilogue"),
    "full": tuple(INDUCTOR_SETTINGS),
}


def mm_call(h: torch.Tensor, w: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """The bare matrix product: a floor for what is fused with it."""
    return torch.mm(h, w.t())


@contextmanager
def inductor_setting(name: str) -> Iterator[None]:
    """TorchInductor's configuration changed to a setting, and back."""
    import torch._inductor.config as config

    with config.patch({key: value for key, value in INDUCTOR_SETTINGS[name].items() if _has(config, key)}):
        yield


@dataclass(frozen=True)
class Skipped:
    """A setting of TorchInductor that has no time, and why."""

    why: str


def capture_inductor(
    op: OpDef,
    sets: Sequence[Sequence[torch.Tensor]],
    level: str,
    budget: float,
    capture: Callable[[Callable[..., Any], Sequence[Sequence[torch.Tensor]]], Captured] = capture,
) -> dict[str, Captured | Skipped]:
    """`op.eager` compiled at each setting of a level, and captured over the sets.

    budget  seconds; once they are used no further setting is started (one that runs is not stopped: its compilers are
            threads and processes that do not stand being interrupted)

    A setting that fails is recorded with its error and never ends the run.
    """
    found: dict[str, Captured | Skipped] = {}
    start = time.monotonic()
    for name in INDUCTOR_LEVELS[level]:
        if time.monotonic() - start > budget:
            found[name] = Skipped(f"not tried: the budget of {budget:g} s was used")
            continue
        try:
            with inductor_setting(name), torch.no_grad():
                compiled = torch.compile(_anew(op.eager), dynamic=False)
                # the compilation must happen while the configuration is patched
                compiled(*sets[0])
                found[name] = capture(compiled, sets)
        except Exception as error:  # any error of another compiler is a result, not a reason to stop
            found[name] = Skipped(f"{type(error).__name__}: {error}"[:300])
    return found


def _anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: what PyTorch keeps of a compilation belongs to that, and a graph needs
    the kernels of its setting for as long as it is replayed."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _has(config: Any, key: str) -> bool:
    value = config
    for part in key.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
