"""An actor: a warp, or a warp group that runs wgmma, and every instruction it can execute."""

from __future__ import annotations

from typing import Any

from tvm_comfuse.verify.interpreter.ops_async import AsyncOps
from tvm_comfuse.verify.interpreter.ops_mail import MailOps
from tvm_comfuse.verify.interpreter.ops_stamp import StampOps
from tvm_comfuse.verify.interpreter.ops_wgmma import WgmmaOps


class Actor(AsyncOps, MailOps, StampOps, WgmmaOps):
    """All instructions of one actor.  Generated code calls them; those that may wait are generators."""

    def __init__(self, machine: Any, cta: Any, label: str, number: int, group: int, warps: range):
        super().__init__(machine, cta, label, number, group, warps)
        self._start_async()
        self._start_wgmma()

    def finish(self) -> None:
        """The last instruction is done."""
        self.done = True
        self._end_async()
        self.cta.leave(self)

    def uninitialised(self, cells: Any, index: int, name: str) -> None:
        """A register is read before it is written."""
        text = f"register {name}[{index}] is read before anything is written to it"
        self.report.add("uninitialised-read", f"{self.label}, register {name}", text)
        if isinstance(cells, list) and cells[index] is None:
            cells[index] = 0
