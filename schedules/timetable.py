"""When the deferred part of a step runs: beside which slots of the next step's main loop.

What runs beside a slot's wgmmas should take less time than they do, or the tensor cores wait for the next slot's.  So the tail
is spread over as many slots as there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Plan

#: slots between sending partials and taking those of others: they must have had time to arrive
EXCHANGE_SLOTS = 3
#: slots before the end of a main loop at which operands of the head are asked for
EARLY_SLOTS = 2
#: columns of a half box
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
    return _wait(exchange) + 1 + math.ceil(tile_n // HALF_BOX / 2) + EARLY_SLOTS


def timetable(plan: Plan, k: int) -> list[Part]:
    """A part for each of the first slots, for a main loop over ``k`` that has enough of them: half a box of the tail with each
    slot, or more if slots are few."""
    slots = math.ceil(k / plan.tile_k) - EARLY_SLOTS
    halves, begin = plan.tile_n // HALF_BOX, _wait(plan.exchange) + 1
    spread = min(slots - begin, halves)
    tail = [Part(tail=tuple(range(halves * i // spread, halves * (i + 1) // spread))) for i in range(spread)]
    return [*[Part()] * (begin - 1), Part(takes=True), *tail]


def _wait(exchange: str) -> int:
    return 0 if exchange == "warp" else EXCHANGE_SLOTS
