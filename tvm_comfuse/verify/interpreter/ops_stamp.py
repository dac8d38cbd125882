"""Clock stamps of an instrumented kernel, with the scheduler's steps for a clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_comfuse.verify.interpreter.memory import Tensor
from tvm_comfuse.verify.interpreter.state import State


class StampOps(State):
    """Part of Actor."""

    def clock(self) -> int:
        """The number of choices the scheduler has made and of readings before: no two readings are equal.

        It stands for the SM's clock and for the GPU's nanoseconds.
        """
        self.machine.readings += 1
        return int(self.scheduler.steps + self.machine.readings)

    def stamp(self, tensor: Tensor, indices: tuple, keep: Any, mask: Any, where: str) -> None:
        """The lanes that `keep` names write the clock to their places."""
        self.reach_global(where)
        lanes = self.active(mask)
        lanes = lanes[np.broadcast_to(np.asarray(keep), (self.lanes,))[lanes] != 0]
        if len(lanes):
            self._write(tensor, indices, lanes, [self.clock()], where)

    def anchor(self, tensor: Tensor, indices: tuple, entry: int, mask: Any, where: str) -> None:
        """`entry`, the clock, and the time in two words."""
        self.reach_global(where)
        now = self.clock()
        self._write(tensor, indices, self.active(mask), [int(self.one(entry, mask, where)), now, now, 0], where)

    def _write(self, tensor: Tensor, indices: tuple, lanes: Any, values: list[int], where: str) -> None:
        chosen = tuple(index[lanes] if isinstance(index, np.ndarray) else index for index in indices)
        at = tensor.flatten(chosen, self.label, where, len(values))
        for number, value in enumerate(values):
            tensor.write(np.atleast_1d(at) + number, value, self.number, self.label, where)
