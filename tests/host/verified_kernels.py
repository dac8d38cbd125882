"""Small kernels of every family, with inputs and float64 references, made once."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tvm import tirx

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import plan_of
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes.lower import lower
from tvm_comfuse.verify.dynamic import PLAN_ERRORS, compare, error, random_inputs
from tvm_comfuse.verify.families import FAMILIES
from tvm_comfuse.verify.inexact import of_plan
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.reference import reference
from tvm_comfuse.verify.static import check

NAMES = [family.name for family in FAMILIES]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    func: tirx.PrimFunc
    kernel: tirx.PrimFunc
    inputs: list[Any]
    references: list[Any]


@cache
def case(name: str) -> Case:
    (family,) = (family for family in FAMILIES if family.name == name)
    func = family.cluster(parse_target("h200"))
    inputs = random_inputs(func, family.m, 1, seed=0)
    return Case(func, lower(func, name), inputs, reference(func, inputs))


def load_script(path: str) -> Any:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(f"comfuse_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes_in(folder: str, pattern: str) -> set[str]:
    """What a pattern finds in the source of a package."""
    texts = [path.read_text() for path in sorted((ROOT / "tvm_comfuse" / "verify" / folder).glob("*.py"))]
    return {code for text in texts for code in re.findall(pattern, text)}


def cases_for(apply: Callable[[tirx.PrimFunc], Any], most: int) -> list[tuple[Case, Any]]:
    """The first families that a fault can be put into, with the faulty kernel."""
    found = []
    for name in NAMES:
        if len(found) < most and (mutated := apply(case(name).kernel)) is not None:
            found.append((case(name), mutated))
    return found


def assert_right(func: tirx.PrimFunc, rows: int, outputs: int = 1, slow: str | None = None) -> None:
    """The kernel of a scheduled function keeps the static rules; the interpreter finds nothing in it, and float64's numbers, as
    exactly as the plan wants them.
    """
    kernel = lower(func, "kernel")
    assert check(kernel, H200) == []
    inputs = random_inputs(func, rows, outputs, seed=0)
    result = Program(kernel).run(inputs, seed=1, slow=slow)
    assert not result.findings, result.findings[0]
    exact = reference(func, inputs)
    coarse = reference(func, inputs, of_plan(plan_of(func), analyze(func)))
    besides = [PLAN_ERRORS * error(less, more) for less, more in zip(coarse, exact, strict=True)]
    assert compare(result.outputs, exact, besides) == []
