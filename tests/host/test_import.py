"""Importing the package: versions are checked, little is loaded, TVM's hook works."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

import tvm_comfuse
from tvm_comfuse import _versions
from tvm_comfuse.errors import VersionError


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.27.0.post1", (0, 27, 0)),
        ("0.1.14.post1", (0, 1, 14)),
        ("0.28", (0, 28, 0)),
        ("1", (1, 0, 0)),
        ("x", (0, 0, 0)),
    ],
)
def test_release(version: str, numbers: tuple[int, ...]) -> None:
    assert _versions.release(version) == numbers


@pytest.mark.parametrize(
    ("name", "version", "good"),
    [
        ("apache-tvm-ffi", "0.1.14.post0", True),
        ("apache-tvm-ffi", "0.1.15.post2", False),
        ("apache-tvm-ffi", "0.1.13", False),
        ("apache-tvm", "0.27.0.post1", True),
        ("apache-tvm", "0.28.0", False),
        ("apache-tvm", "0.26.0", False),
    ],
)
def test_check_versions(monkeypatch: pytest.MonkeyPatch, name: str, version: str, good: bool) -> None:
    real = metadata.version
    monkeypatch.setattr(_versions.metadata, "version", lambda asked: version if asked == name else real(asked))
    if good:
        _versions.check_versions()
        return
    with pytest.raises(VersionError) as caught:
        _versions.check_versions()
    text = str(caught.value)
    assert f"{name} {version}" in text
    assert "pip install" in text
    assert "\n" not in text


def test_missing_tvm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_versions.metadata, "version", missing)
    with pytest.raises(VersionError, match="no installed apache-tvm"):
        _versions.check_versions()


def test_wrong_version_at_import_is_one_line_and_loads_nothing() -> None:
    run = _python(
        "import sys\n"
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '0.1.15.post2' if name == 'apache-tvm-ffi' else real(name)\n"
        "try:\n"
        "    import tvm_comfuse\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "print([name for name in ('tvm', 'tvm_ffi', 'torch') if name in sys.modules])\n"
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 2, run.stderr
    assert "apache-tvm-ffi 0.1.15.post2" in lines[0]
    assert lines[1] == "[]"


def test_import_is_light() -> None:
    run = _python("import sys, tvm_comfuse\nprint([n for n in ('tvm', 'torch', 'typer') if n in sys.modules])")
    assert run.stdout.strip() == "[]", run.stderr


def test_autoload_registers_pipelines_without_torch() -> None:
    """TVM itself imports torch where it is installed, so its absence is played."""
    run = _python(
        "import sys; sys.modules['torch'] = None\n"
        "import tvm, tvm_comfuse\n"
        "tvm_comfuse._autoload(); tvm_comfuse._autoload()\n"
        "from tvm.tirx.compilation_pipeline import PIPELINE_MAP\n"
        "print('comfuse' in PIPELINE_MAP, sys.modules['torch'])",
        TVM_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert run.stdout.strip() == "True None", run.stderr


def test_every_public_name_resolves() -> None:
    for name in tvm_comfuse.__all__:
        assert getattr(tvm_comfuse, name) is not None
        assert name in dir(tvm_comfuse)
    with pytest.raises(AttributeError, match="no_such_name"):
        tvm_comfuse.no_such_name  # noqa: B018
