"""What is installed, under which names, and with which entry points."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("relay_patterns", "schedules", "tir_passes")
#: folders whose Python files are the project's
SOURCES = ("tvm_comfuse", *PARTS, "tests", "examples", "benchmarks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the checkout, so that no build folder is left behind in it."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "tvm_comfuse", *PARTS):
        subprocess.run(["cp", "-R", str(ROOT / name), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def _python_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def test_wheel_installs_one_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert tops == {"tvm_comfuse"}


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    packed = {name.removeprefix("tvm_comfuse/") for name in wheel.namelist() if name.endswith(".py")}
    expected = {name for name in _python_files(ROOT / "tvm_comfuse") if name.split("/")[0] not in PARTS}
    for part in PARTS:
        expected |= {f"{part}/{name}" for name in _python_files(ROOT / part)}
    assert packed == expected


def test_wheel_has_data_and_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "tvm_comfuse/py.typed" in names
    assert "tvm_comfuse/bench/suites.json" in names
    records = ROOT / "tvm_comfuse" / "tuning" / "pretuned"
    assert {f"tvm_comfuse/tuning/pretuned/{path.relative_to(records)}" for path in records.rglob("*.json")} == {
        name for name in names if name.startswith("tvm_comfuse/tuning/pretuned/")
    }
    assert "tvm_comfuse/tuning/pretuned/comfuse_database.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(wheel.read(name).decode())
    assert dict(parser["console_scripts"]) == {"comfuse": "tvm_comfuse.cli.main:main"}
    assert dict(parser["tvm.backends"]) == {"tvm_comfuse": "tvm_comfuse:_autoload"}


@pytest.mark.parametrize("part", PARTS)
def test_part_is_found_under_its_installed_name_only(part: str) -> None:
    spec = importlib.util.find_spec(f"tvm_comfuse.{part}")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / part / "__init__.py"
    link = ROOT / "tvm_comfuse" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def test_parts_are_never_imported_by_a_generic_name() -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    wrong = {
        f"{path.relative_to(ROOT)}: {name}" for path in files for name in _imports(path) if name.split(".")[0] in PARTS
    }
    assert wrong == set()


def test_compat_editable_mode_is_refused() -> None:
    code = (
        "import runpy, sys, setuptools\n"
        "caught = {}\n"
        "setuptools.setup = lambda **kwargs: caught.update(kwargs)\n"
        f"sys.argv = ['setup.py']; runpy.run_path({str(ROOT / 'setup.py')!r})\n"
        "command = caught['cmdclass']['editable_wheel'](setuptools.Distribution({'name': 'x'}))\n"
        "for mode in ('strict', 'compat'):\n"
        "    command.mode = mode\n"
        "    try: command.finalize_options(); print(mode, 'taken')\n"
        "    except Exception as error: print(mode, type(error).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split("\n")[:2] == ["strict taken", "compat DistutilsOptionError"], run.stderr
