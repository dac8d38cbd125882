"""Targets by name."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.target import Target

from tvm_comfuse.errors import TargetError
from tvm_comfuse.schedules.device import H100, H200, device_of
from tvm_comfuse.target import is_cuda, name_of, parse_target


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        ("h200", H200),
        ("H100", H100),
        ("nvidia/nvidia-h100", H100),
        ("cuda -arch=sm_90a", H200),
        ("cuda --arch=sm_80", None),
        ('{"kind": "cuda", "arch": "sm_90a"}', H200),
        ({"kind": "cuda", "arch": "sm_75"}, None),
        (Target({"kind": "cuda", "arch": "sm_90a"}), H200),
    ],
)
def test_cuda_targets(spec: Any, device: Any) -> None:
    target = parse_target(spec)
    assert is_cuda(target)
    assert target.host.kind.name == "llvm"
    assert device_of(target) == device


def test_options_reach_the_target() -> None:
    target = parse_target("llvm -mcpu=skylake -num-cores=3")
    assert str(target.attrs["mcpu"]) == "skylake"
    assert int(target.attrs["num-cores"]) == 3


def test_llvm_is_this_machine() -> None:
    target = parse_target("llvm")
    assert not is_cuda(target)
    assert str(target.attrs["mcpu"])
    assert device_of(target) is None


@pytest.mark.parametrize(("spec", "name"), [("h200", "h200"), ("cuda -arch=sm_80", "cuda sm_80"), ("llvm", "llvm")])
def test_names(spec: str, name: str) -> None:
    assert name_of(parse_target(spec)) == name


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("h300", "h300"),
        ("", "an empty string"),
        ("cuda fast", "'fast'"),
        ("cuda -arch", "'-arch'"),
        ("cuda -arch=fast", "cuda -arch=fast"),
        ("opencl", "kind 'opencl'"),
        ({"kind": "c"}, "kind 'c'"),
        ("{bad", "Expecting"),
        (3, "3"),
        (Target({"kind": "c"}), "kind 'c'"),
    ],
)
def test_unknown_targets(spec: Any, found: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_target(spec)
    assert found in caught.value.found
    assert "h200" in caught.value.hint or "JSON" in caught.value.hint
