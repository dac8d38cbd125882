"""The CUDA source inside a built executable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def sources(executable: Any) -> list[str]:
    """CUDA source of each device module of a TVM executable or runtime module, outermost first.

    Without a GPU driver TVM keeps the source in a module that compiles it when it is loaded; with one, next to the
    binary.  Either way the text is what was or will be compiled.
    """
    root = getattr(executable, "mod", executable)
    return [text for module in _walk(root) if (text := _cuda_text(module))]


def _walk(module: Any) -> Iterator[Any]:
    yield module
    for imported in module.imports:
        yield from _walk(imported)


def _cuda_text(module: Any) -> str | None:
    if module.kind != "cuda":
        return None
    return str(module.inspect_source()) or None
