"""The documentation's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tvm_comfuse
from tvm_comfuse.relay_patterns.rules import ELEMENTWISE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
_LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
_FILE = re.compile(r"`((?:tvm_comfuse|relay_patterns|schedules|tir_passes|docs|tests|benchmarks|examples)/[\w./-]+)`")


def blocks(page: str) -> list[str]:
    """The Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def rules() -> Iterator[None]:
    """Takes back what a test registers."""
    before = dict(ELEMENTWISE)
    yield
    ELEMENTWISE.clear()
    ELEMENTWISE.update(before)


@pytest.mark.usefixtures("rules")
def test_contributing_walk() -> None:
    rule, tests = blocks("CONTRIBUTING.md")
    scope: dict[str, Any] = {}
    exec(compile(tests, "CONTRIBUTING.md", "exec"), scope)
    # step 1: without the rule growth stops there, and says so
    (matmul,) = tvm_comfuse.explain(scope["model"]()).matmuls
    assert "relax.log_add_exp" not in matmul.ops
    assert "only elementwise operators, row reductions and views of the rows can join a cluster" in str(matmul.reason)
    assert "log_add_exp" in str(matmul.reason)
    exec(compile(rule, "CONTRIBUTING.md", "exec"), scope)
    names = [name for name in scope if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        scope[name]()


def test_contributing_walk_in_the_package(tmp_path: Path) -> None:
    """The rule as a file of relay_patterns that its __init__ imports: a copy of the package still imports and has the rule."""
    copy = tmp_path / "relay_patterns"
    shutil.copytree(ROOT / "relay_patterns", copy)
    (copy / "ops_logaddexp.py").write_text(blocks("CONTRIBUTING.md")[0])
    init = (copy / "__init__.py").read_text()
    (copy / "__init__.py").write_text(init.replace("    ops_norm,\n", "    ops_logaddexp,\n    ops_norm,\n", 1))
    lines = f"import tvm_comfuse; tvm_comfuse.__path__.insert(0, {str(tmp_path)!r}); "
    lines += (
        "from tvm_comfuse import relay_patterns as made; print(made.__file__, 'relax.log_add_exp' in made.ELEMENTWISE)"
    )
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert found.stdout.split() == [str(copy / "__init__.py"), "True"], found.stderr
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    checks = [
        [sys.executable, "-m", "ruff", *words] for words in (["check", *settings], ["format", "--check", *settings])
    ]
    for check in checks:
        ruff = subprocess.run([*check, str(copy / "ops_logaddexp.py")], capture_output=True, text=True, check=False)
        assert ruff.returncode == 0, ruff.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    targets = {page.parent / link for link in _LINK.findall(text) if "://" not in link}
    # the contributing walk names a file that the reader is to write
    targets |= {ROOT / name for name in _FILE.findall(text) if not name.endswith("ops_logaddexp.py")}
    assert sorted(str(target) for target in targets if not target.exists()) == []


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/database.md"])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the README's example writes a library
    (code,) = blocks(page)
    scope: dict[str, Any] = {}
    exec(compile(code, page, "exec"), scope)
    if page == "README.md":
        with scope["torch"].no_grad():
            expected = scope["model"](scope["x"])
        scope["torch"].testing.assert_close(scope["y"], expected, rtol=2e-2, atol=2e-2)
    elif page == "docs/architecture.md":
        assert "comfuse_gemm_reduce" in scope["mod"].script(show_meta=False)
        assert scope["executable"] is not None
    else:
        assert len(scope["database"].records()) == 1


def test_commands_of_the_readme_exist() -> None:
    """Every option that the README shows is one of the command's."""
    import typer

    from tvm_comfuse.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"^    comfuse (\w+)(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for name, rest in lines:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        used = set(re.findall(r"(?<= )--?[a-z][\w-]*", rest.partition("#")[0]))
        assert used <= known, name
