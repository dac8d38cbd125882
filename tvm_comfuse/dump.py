"""What a compilation leaves in a folder for a person to read: the IR after each phase, CUDA source, ptxas' figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tvm

from tvm_comfuse.errors import ModelError

#: passes of a Relax or TIR pipeline after which the IR is written, besides all of this package
_STOCK_PASSES = ("FuseTIR", "CallTIRRewrite", "AttachGlobalSymbol")
_OWN_PREFIX = "comfuse"


class Dump:
    """Numbered files in a folder, in the order of the phases; without a folder nothing is written.

    Raises ModelError if the folder cannot be made.
    """

    def __init__(self, folder: str | Path | None):
        self.folder = Path(folder) if folder is not None else None
        self._count = 0
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ModelError("a folder to write the dump to", str(error), "name another one") from error

    def ir(self, phase: str, mod: tvm.IRModule) -> None:
        """Write a module as TVMScript; constants are not printed."""
        if self.folder is not None:
            self._write(phase, "py", mod.script(show_meta=False))

    def text(self, phase: str, suffix: str, text: str) -> None:
        """Write any text, e.g. CUDA source."""
        if self.folder is not None:
            self._write(phase, suffix, text)

    def json(self, phase: str, values: Any) -> None:
        """Write plain JSON values."""
        if self.folder is not None:
            self._write(phase, "json", json.dumps(values, indent=1) + "\n")

    def instruments(self) -> list[Any]:
        """For a PassContext: writes the IR after the passes that change much."""
        return [_instrument(self)] if self.folder is not None else []

    def _write(self, phase: str, suffix: str, text: str) -> None:
        assert self.folder is not None
        (self.folder / f"{self._count:02d}_{phase}.{suffix}").write_text(text)
        self._count += 1


def _instrument(dump: Dump) -> Any:
    @tvm.ir.instrument.pass_instrument
    class WriteIR:
        """Writes the module after the passes named above."""

        def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
            name = str(info.name)
            if name in _STOCK_PASSES or name.startswith(_OWN_PREFIX):
                dump.ir(name.removeprefix(f"{_OWN_PREFIX}."), mod)

    return WriteIR()
