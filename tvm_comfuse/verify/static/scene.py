"""A kernel with concrete sizes: who executes what how often.

The rates of barriers need two sizes.  A kernel of static M has one, so the CTA's index is moved below zero instead: index
arithmetic then describes a CTA with more steps, as of a matrix with more rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tvm import tirx

from tvm_comfuse.verify.static.evaluate import (
    AXES,
    LANE,
    RANK,
    THREAD_AXES,
    WARP,
    WARP_GROUP,
    Array,
    UnknownValueError,
    along,
    constant,
    evaluate,
    total,
)
from tvm_comfuse.verify.static.index import CTA_IN_CLUSTER, LANE_ID, WARP_GROUP_ID, WARP_ID, Guard, KernelIndex, Loop

#: loop iterations that show how a kernel goes on
FEW_STEPS = 4
#: sizes tried to reach that: powers of two
_TRIES = 24
_SCOPE_AXES = {CTA_IN_CLUSTER: RANK, WARP_GROUP_ID: WARP_GROUP, WARP_ID: WARP, LANE_ID: LANE}


class Scene:
    """Arrays of the kernel's variables for one CTA index (or cluster index) and one value of every symbolic extent."""

    def __init__(self, index: KernelIndex, cta: int, symbol: int = 1):
        self.index, self.cta, self.symbol = index, cta, symbol
        self.env: dict[Any, Array] = {variable: constant(symbol) for variable in index.symbolic}
        if index.cta_variable is not None:
            self.env[index.cta_variable] = constant(cta)
        for scope, axis in _SCOPE_AXES.items():
            if scope in index.scopes:
                variable, extent = index.scopes[scope]
                self.env[variable] = along(axis, np.arange(extent))
        self._extents: dict[Loop, Array] = {}
        self._masks: dict[Guard, Array | None] = {}
        every = [*(item.nest for item in index.instructions), *(store.nest for store in index.stores)]
        for loop in dict.fromkeys(level for nest in every for level in nest if isinstance(level, Loop)):
            extent = np.maximum(evaluate(loop.extent, self.env), 0)
            self._extents[loop] = extent
            self.env[loop.variable] = along(THREAD_AXES + loop.depth, np.arange(int(extent.max())))
        self.cells: dict[Any, Array] = {}
        self._resolve()
        self._groups: dict[tuple[Guard | Loop, ...], list[int]] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """Extents of the thread axes."""
        return {axis: self.index.scopes[s][1] for s, axis in _SCOPE_AXES.items() if s in self.index.scopes}

    def _resolve(self) -> None:
        """Locals that have one value: bound variables, and scalars that are stored once."""
        times: dict[Any, int] = {}
        for store in self.index.stores:
            times[store.buffer] = times.get(store.buffer, 0) + 1
        single = [(s.buffer, s.value) for s in self.index.stores if times[s.buffer] == 1 and _is_scalar(s.buffer)]
        for known, pairs in ((self.env, self.index.binds), (self.cells, single)):
            for variable, value in pairs:
                try:
                    known[variable] = self.value(value)
                except UnknownValueError:
                    continue

    def value(self, expr: Any, cells: dict[Any, Array] | None = None) -> Array:
        """An expression over threads and loops.  Raises UnknownValueError."""
        return evaluate(expr, self.env, {**self.cells, **(cells or {})})

    def trips(self, loop: Loop) -> Array:
        """Iterations of a loop."""
        return self._extents[loop]

    def mask(self, guard: Guard) -> Array | None:
        """Where a guard lets through; None if that is known only at run time."""
        if guard not in self._masks:
            try:
                holds = self.value(guard.condition).astype(bool)
                self._masks[guard] = holds if guard.holds else ~holds
            except UnknownValueError:
                self._masks[guard] = None
        return self._masks[guard]

    def factors(self, nest: Iterable[Guard | Loop]) -> list[Array]:
        """Indicators whose product tells whether a thread executes an iteration.  Unknown guards count as passed."""
        found = []
        for level in nest:
            if isinstance(level, Loop):
                found.append(self.env[level.variable] < self._extents[level])
            else:
                mask = self.mask(level)
                if mask is not None:
                    found.append(mask)
        return found

    def count(self, item: Any, keep: tuple[int, ...], *extra: Array) -> Array:
        """Executions of an instruction or store, weighted by the product of `extra`, over the axes to keep."""
        lengths = dict(self.lengths)
        for loop in (level for level in item.nest if isinstance(level, Loop)):
            lengths[THREAD_AXES + loop.depth] = int(self._extents[loop].max())
        counted = total([*self.factors(item.nest), *extra], keep, lengths)
        shape = [lengths.get(axis, 1) if axis in keep else 1 for axis in range(AXES)]
        return np.broadcast_to(counted, shape)

    def groups(self, item: Any) -> list[int]:
        """The warp groups of which some thread executes it."""
        if item.nest not in self._groups:
            self._groups[item.nest] = [int(g) for g in np.flatnonzero(self.count(item, (WARP_GROUP,)).ravel())]
        return self._groups[item.nest]

    def threads(self, item: Any) -> int:
        """Threads of a cluster that execute it at least once."""
        return int((self.count(item, (RANK, WARP_GROUP, WARP, LANE)) > 0).sum())

    def values(self, expr: Any, item: Any, cells: dict[Any, Array] | None = None) -> Array:
        """The values of an expression where `item` is executed, as a flat array."""
        value = self.value(expr, cells)
        where = np.ones([1] * AXES, dtype=bool)
        for factor in self.factors(item.nest):
            # only conditions on axes the expression varies along can rule a value out; others at most all of them
            lost = tuple(a for a in range(AXES) if factor.shape[a] > 1 and value.shape[a] == 1)
            where = where & factor.astype(bool).any(axis=lost, keepdims=True)
        value, where = np.broadcast_arrays(value, where)
        return value[where]


def scenes(index: KernelIndex) -> tuple[Scene, Scene]:
    """Two sizes, in which every loop whose length depends on the size makes some, and some more, iterations."""
    found: list[Scene] = []
    for power in range(_TRIES):
        scene = Scene(index, 0, 2**power) if index.symbolic else Scene(index, 1 - 2**power)
        wanted = FEW_STEPS if not found else 2 * FEW_STEPS
        # the steps of a warp group that does every second step grow half as fast
        if _steps(scene) >= wanted:
            found.append(scene)
        if len(found) == 2:
            return found[0], found[1]
    return scene, scene


def _is_scalar(buffer: Any) -> bool:
    return str(buffer.dtype) == "int32" and str(buffer.scope()) == "local" and all(int(e) == 1 for e in buffer.shape)


def _steps(scene: Scene) -> int:
    """Iterations of the shortest loop whose extent is not a constant; the goal if there is none."""
    extents = [int(scene.trips(loop).min()) for loop in scene._extents if not isinstance(loop.extent, tirx.IntImm)]
    return min(extents, default=2 * FEW_STEPS)
