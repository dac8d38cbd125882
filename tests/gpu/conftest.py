"""Tests on a Hopper GPU.  Where there is none they are skipped and say so.

A kernel can hang or leave the process without a usable GPU.  Rows of suites therefore run in a child process
(`isolated`); the other tests run under a watchdog that ends the whole session and names the test.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tvm_comfuse.bench.isolate import IsolatedChecks, Limits

HERE = Path(__file__).resolve().parent
TARGET = "cuda"
#: seconds for a row in the child process; together less than WATCHDOG, which ends more than the row
LIMITS = Limits(start=120, build=120, launch=60)
#: seconds a test may take
WATCHDOG = 360.0
HANG_STATUS = 70


def missing_gpu() -> str | None:
    """Why there is no usable GPU, or None."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU on this machine"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs compute capability 9.0 (Hopper), found {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    for item in items:
        if HERE not in Path(str(item.path)).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def guarded(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the session if the test hangs or leaves a fault behind."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def give_up() -> None:
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stderr.write(f"\n{request.node.nodeid} did not end within {WATCHDOG:g} s: a kernel hangs\n")
        sys.stderr.flush()
        os._exit(HANG_STATUS)

    timer = threading.Timer(WATCHDOG, give_up)
    timer.daemon = True
    timer.start()
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} left the GPU unusable: {str(error).splitlines()[0]}", returncode=3)
    finally:
        timer.cancel()


@pytest.fixture(scope="session")
def isolated() -> Iterator[IsolatedChecks]:
    """Checks of rows in a child process that a hang does not outlive."""
    with IsolatedChecks(LIMITS) as checks:
        yield checks


@pytest.fixture
def fused(guarded: None) -> Callable[..., Any]:
    """compile() that also asserts that every matrix product was fused: a stock kernel would pass a numeric test too."""
    import tvm_comfuse

    def build(model: Any) -> Any:
        compiled = tvm_comfuse.compile(model, TARGET, form="fused")
        assert compiled.explanation.matmuls
        assert all(matmul.fused for matmul in compiled.explanation.matmuls), str(compiled.explanation)
        return compiled

    return build
