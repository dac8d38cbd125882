"""When the deferred part of a step runs: beside which slots of the next step's main loop.

What runs beside a slot's wgmmas should take less time than they do, or the tensor cores wait for the next slot's.  So the tail
is spread over as many slots as there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Plan

#: slots between sending partials and taking those of others: they must have had time to arrive; a short main loop has fewer
EXCHANGE_SLOTS, LEAST_EXCHANGE_SLOTS = 3, 2
#: slots before the end of a main loop at which operands of the head are asked for, all at once; without deferred work there are
#: registers for them sooner, a box a slot
EARLY_SLOTS, LEAST_EARLY_SLOTS = 2, 1
#: columns of a half box, half the width of a swizzled tile
HALF_BOX = 32


@dataclass(frozen=True)
class Part:
    """What runs beside one slot: the partials of all parts of the row are taken, then the tail over some half boxes."""

    takes: bool = False
    tail: tuple[int, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self != Part()


def least_slots(plan: Plan) -> int:
    """Slots that a main loop must have for a deferred part."""
    return deferred_slots(plan.tile_n, plan.exchange)


def deferred_slots(tile_n: int, exchange: str) -> int:
    """The same, of what it depends on."""
    wait = 0 if exchange == "warp" else LEAST_EXCHANGE_SLOTS
    return wait + 1 + _least_parts(tile_n) + LEAST_EARLY_SLOTS


def early_slots(plan: Plan, k: int) -> int:
    """Slots of a main loop over ``k`` that are left when operands of the head are asked for."""
    return _gaps(plan, k)[1] if plan.defer else min(plan.tile_n // (2 * HALF_BOX) + 1, _slots(plan, k))


def timetable(plan: Plan, k: int) -> list[Part]:
    """A part for each of the first slots, for a main loop over ``k`` that has enough of them: half a box of the tail with each
    slot, or more if slots are few.  For a memory warp group, which has no main loop, a box each."""
    if plan.hands_over:
        every = range(plan.tile_n // HALF_BOX)
        return [Part(takes=True), *(Part(tail=tuple(every[start : start + 2])) for start in every[::2])]
    wait, early = _gaps(plan, k)
    halves = plan.tile_n // HALF_BOX
    spread = min(_slots(plan, k) - early - wait - 1, halves)
    tail = [Part(tail=tuple(range(halves * i // spread, halves * (i + 1) // spread))) for i in range(spread)]
    return [*[Part()] * wait, Part(takes=True), *tail]


def _gaps(plan: Plan, k: int) -> tuple[int, int]:
    """Slots in front of the deferred work, for the partials to arrive, and behind it, for operands of the head."""
    spare = _slots(plan, k) - 1 - _least_parts(plan.tile_n)
    wait = 0 if plan.exchange == "warp" else EXCHANGE_SLOTS
    early = EARLY_SLOTS if spare >= wait + EARLY_SLOTS else LEAST_EARLY_SLOTS
    return min(wait, spare - early), early


def _slots(plan: Plan, k: int) -> int:
    return math.ceil(k / plan.tile_k)


def _least_parts(tile_n: int) -> int:
    """Parts of a tail: no more than two half boxes each, unless there is more room."""
    return math.ceil(tile_n // HALF_BOX / 2)
