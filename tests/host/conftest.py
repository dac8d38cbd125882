"""Makes the helper modules beside the tests importable, which pytest's importlib mode does not; and what several tests call."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


#: files that take a minute or more: they begin first, so that processes side by side end at about the same time
SLOW = ("test_fuzz.py", "test_verify_faults.py", "test_memory_layout.py", "test_tuning_space.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW)


@pytest.fixture
def comfuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command line: (exit code, standard output, standard error)."""
    from tvm_comfuse.cli.main import main

    def call(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["comfuse", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        return code, *capsys.readouterr()

    return call
