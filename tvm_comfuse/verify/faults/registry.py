"""The faults by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

Apply = Callable[[tirx.PrimFunc], "tirx.PrimFunc | None"]


@dataclass(frozen=True)
class Fault:
    """One mistake that an emitter could make.

    apply     a copy of a correct kernel with the mistake, None for a kernel that has no place for it
    detector  who must find it: ``static``, ``interpreter`` (a rule of the protocol, or the numbers)
    unseen    why nobody can find it without a GPU, "" for a fault that is found
    """

    name: str
    description: str
    apply: Apply
    detector: str
    unseen: str = ""


FAULTS: dict[str, Fault] = {}


def fault(name: str, detector: str, unseen: str = "") -> Callable[[Apply], Apply]:
    """Registers a function as a fault; its docstring is the description."""

    def register(apply: Apply) -> Apply:
        assert name not in FAULTS
        assert apply.__doc__
        FAULTS[name] = Fault(name, apply.__doc__.strip().rstrip("."), apply, detector, unseen)
        return apply

    return register


def add(name: str, detector: str, description: str, apply: Apply) -> None:
    """Registers a fault that is made by a function of several."""
    assert name not in FAULTS
    FAULTS[name] = Fault(name, description, apply, detector)
