"""When the deferred part of a step runs: beside which slots of the next step's main loop.

A slot's wgmmas take about 1,000 cycles for a CTA tile of 128 x 256; what runs beside them should take less, or the tensor
cores wait for the next slot's.  So the work is spread over as many slots as there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Plan
from .spec import ClusterSpec, rounds

#: slots between sending partials and taking those of others: they must have had time to arrive
EXCHANGE_SLOTS = 2
#: slots before the end of a main loop at which operands of the head are asked for
EARLY_SLOTS = 2
#: columns of a half box
HALF_BOX = 32


@dataclass(frozen=True)
class Part:
    """What runs beside one slot, in this order.

    firsts   the quads of lanes finish the first reductions of the round
    seconds  half boxes over which the second ones run
    posts    partials are sent
    takes    those of all parts of the row are taken
    tail     half boxes that the tail is done for
    """

    firsts: bool = False
    seconds: tuple[int, ...] = ()
    posts: bool = False
    takes: bool = False
    tail: tuple[int, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return self != Part()


def least_slots(plan: Plan, spec: ClusterSpec) -> int:
    """Slots that a main loop must have for a deferred part."""
    return _before_tail(plan, spec, 1) + math.ceil(_halves(plan) / 2) + EARLY_SLOTS


def timetable(plan: Plan, spec: ClusterSpec) -> list[Part]:
    """A part for each of the first slots, for a main loop that has enough of them.

    The second reductions take two slots and each half box of the tail one, if there are so many slots.
    """
    slots = math.ceil(spec.k / plan.tile_k) - EARLY_SLOTS
    halves = _halves(plan)
    passes = 2 if slots - _before_tail(plan, spec, 2) >= math.ceil(halves / 2) else 1
    begin = _before_tail(plan, spec, passes)
    spread = min(slots - begin, halves)
    parts = [Part() for _ in range(begin + spread)]
    of_pass = [tuple(range(halves * i // passes, halves * (i + 1) // passes)) for i in range(passes)]
    second = _has_pair(spec)
    for slot in range(passes if second else 1):
        last = slot == (passes if second else 1) - 1
        parts[slot] = Part(firsts=slot == 0, seconds=of_pass[slot] if second else (), posts=last)
    parts[begin - 1] = Part(**{**vars(parts[begin - 1]), "takes": True})
    for i in range(spread):
        parts[begin + i] = Part(tail=tuple(range(halves * i // spread, halves * (i + 1) // spread)))
    return parts


def _halves(plan: Plan) -> int:
    return plan.tile_n // HALF_BOX


def _has_pair(spec: ClusterSpec) -> bool:
    return any(reduction.merge is not None for reduction in rounds(spec)[-1])


def _before_tail(plan: Plan, spec: ClusterSpec, passes: int) -> int:
    """Slots before the first of the tail, the one that takes the partials included."""
    wait = 0 if plan.exchange == "warp" else EXCHANGE_SLOTS
    return (passes if _has_pair(spec) else 1) + wait
