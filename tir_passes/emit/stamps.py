"""Clock stamps: when each role of an instrumented kernel waits and works, written to a global buffer of its own.

Every stamp has a fixed place: buffer [CTAs, lanes, steps, places], where a lane is one thread of a role.  So a stamp is the
clock and nothing else, no counter lives across the main loop, and a place that stays 0 was never reached.  A span is two
neighbouring places, its begin and its end; spans of a lane nest.

Lane 0 is the CTA's: anchors that tie its SM's clock to the GPU's nanoseconds.  The clocks of two SMs have nothing in common.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script import builder as frames

from tvm_comfuse.schedules.walk import most_steps
from tvm_comfuse.tir_passes.emit.dsl import Cell, named, when
from tvm_comfuse.tir_passes.emit.instructions import anchor, clock, opaque, stamp

Expr = Any
#: roles; the last two have a lane for each MMA warp group, behind those of the others: the memory warp group one for each whose
#: tiles it takes
CTA, FILL, SEND, MAIL, MEMORY, MMA = "CTA", "ring filler", "result sender", "mail waiter", "memory group", "MMA group"
GROUPED = (MEMORY, MMA)
#: what a lane waits for, and what it does
WAITS = (
    "empty slot",  # of the ring, to fill it
    "staging tile",  # free, to load an operand to it
    "result",  # in its staging tile, to store it
    "mailboxes",  # in global memory, which an earlier launch may own
    "turn",  # of a pingpong warp group at its main loop
    "full slot",  # of the ring, to multiply
    "operand",  # in its staging tile
    "result tile",  # free, to write a result to it
    "exchange",  # partials of the other parts of the row
    "hand over",  # for a free tile, and writing it; or for a full one, and reading it
)
WORK = ("load", "store", "main loop", "drain", "head", "first pass", "second pass", "post", "tail", "output")
#: spans of a lane's step beside two for each slot of the ring: more are left out and counted
OTHER_SPANS = 48
#: places of an anchor: clock at kernel entry (0 at the end), clock, nanoseconds (low and high word)
ANCHOR_PLACES = 4


def role_of(lane: str) -> tuple[str, int]:
    """The role of a lane, and the index of its MMA warp group; 0 for a role that has no groups."""
    role = next((role for role in GROUPED if lane.startswith(role)), lane)
    return role, int(lane.removeprefix(role) or 0)


@dataclass(frozen=True)
class Site:
    """Where a kind of span lies among the places of a step.

    number  tells spans of a kind apart that the emitter wrote out one by one
    place   of the first begin; its end comes next
    extent  spans that a loop of the kernel makes, one behind the other
    """

    role: str
    kind: str
    number: int
    place: int
    extent: int = 1

    @property
    def waits(self) -> bool:
        """Whether the span is a wait."""
        return self.kind in WAITS


@dataclass(frozen=True)
class StampLayout:
    """What the places of the buffer mean.

    shape     [CTAs, lanes, steps, places] of the buffer, int32
    lanes     names in order; a role of several warp groups has a lane for each
    stride    of the rows of an MMA warp group: it does every stride-th step of the CTA, or each of them (1)
    left_out  spans that found no place
    """

    shape: tuple[int, int, int, int]
    lanes: tuple[str, ...]
    stride: int
    sites: tuple[Site, ...]
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return asdict(self)


class NoStamps:
    """An ordinary kernel: no hook emits anything."""

    def declare(self) -> None:
        """No parameter."""

    def enter(self) -> None:
        """At kernel entry."""

    def first(self) -> None:
        """Behind the prologue."""

    def last(self) -> None:
        """At the end of the kernel."""

    def role(self, name: str, group: Expr = None) -> None:
        """What follows is code of this role."""

    def begin(self, kind: str, row: Expr, number: int = 0, at: Expr = None, extent: int = 1) -> None:
        """A span begins."""

    def end(self, kind: str, row: Expr, number: int = 0, at: Expr = None, extent: int = 1) -> None:
        """A span ends."""

    def begin_round(self, kind: str, exchange: Expr) -> None:
        """A span of a round begins."""

    def end_round(self, kind: str, exchange: Expr) -> None:
        """A span of a round ends."""


class Stamps(NoStamps):
    """Emits stamps for up to `steps` steps of a CTA; those of later steps are dropped by the kernel."""

    def __init__(self, kernel: Any, steps: int):
        self.kernel, self.steps = kernel, steps
        units = -(-(kernel.spec.m or 0) // kernel.geometry.unit_rows)
        #: whether no launch has more steps
        self.fits = units > 0 and most_steps(kernel.plan, kernel.spec, units) <= steps
        roles = (MEMORY, MMA) if kernel.plan.hands_over else (MMA,)
        groups = tuple(f"{role} {group}" for role in roles for group in range(kernel.plan.mma_groups))
        self.lanes = (CTA, FILL, SEND, MAIL, *groups)
        self.places = 2 * (2 * kernel.geometry.k_slots + OTHER_SPANS)
        self.sites: dict[tuple[str, str, int], Site] = {}
        self.used: dict[str, int] = {}
        self.left_out: dict[tuple[str, str, int], int] = {}

    @property
    def layout(self) -> StampLayout:
        """Of the kernel emitted so far."""
        shape = (self.kernel.plan.ctas, len(self.lanes), self.steps, self.places)
        stride = self.kernel.geometry.steps_of_group
        return StampLayout(shape, self.lanes, stride, tuple(self.sites.values()), sum(self.left_out.values()))

    # --- the kernel's frame -------------------------------------------------------------------------------------------

    def declare(self) -> None:
        """The buffer, as the kernel's last parameter."""
        handle = frames.ir.arg("stamps_ptr", T.handle())
        self.buffer = named("stamps", T.match_buffer(handle, list(self.layout.shape), "int32", align=16))

    def enter(self) -> None:
        """The clock at kernel entry; in a dependent launch memory may not be written yet."""
        self.entry = Cell("uint32", "entry_clock", clock())

    def first(self) -> None:
        """The first anchor."""
        self._anchor(0, self.entry.value)

    def last(self) -> None:
        """The second anchor."""
        self._anchor(ANCHOR_PLACES, T.uint32(0))

    def _anchor(self, place: int, entry: Expr) -> None:
        with when(self.kernel.cta_thread == 0):
            anchor(T.address_of(self.buffer[self.kernel.cta, 0, 0, place]), entry)

    # --- spans --------------------------------------------------------------------------------------------------------

    def role(self, name: str, group: Expr = None) -> None:
        """`group`: index of the MMA warp group whose tile it is; the first thread stamps.  Other roles are one thread."""
        self.name = name
        self.lane = self.lanes.index(name if group is None else f"{name} 0") + (0 if group is None else group)
        self.elected = T.bool(True) if group is None else self.kernel.thread == 0

    def begin(self, kind: str, row: Expr, number: int = 0, at: Expr = None, extent: int = 1) -> None:
        """row: the lane's step (of an MMA warp group its use); at: which of `extent` spans."""
        self._stamp(0, kind, row, number, at, extent)

    def end(self, kind: str, row: Expr, number: int = 0, at: Expr = None, extent: int = 1) -> None:
        """The end of what began with the same arguments."""
        self._stamp(1, kind, row, number, at, extent)

    def begin_round(self, kind: str, exchange: Expr) -> None:
        """exchange: number of the exchange, use x rounds + round."""
        self._stamp(0, kind, *self._of_round(exchange))

    def end_round(self, kind: str, exchange: Expr) -> None:
        """The end of what began with the same arguments."""
        self._stamp(1, kind, *self._of_round(exchange))

    def _of_round(self, exchange: Expr) -> tuple[Expr, int, Expr, int]:
        rounds = len(self.kernel.rounds)
        return (exchange, 0, None, 1) if rounds == 1 else (exchange // rounds, 0, exchange % rounds, rounds)

    def _stamp(self, end: int, kind: str, row: Expr, number: int, at: Expr, extent: int) -> None:
        site = self._site(kind, number, extent)
        if site is None:
            return
        place = site.place + end + (0 if at is None else 2 * at)
        keep = self.elected if self.fits else T.And(self.elected, row < self.steps)
        lane = Cell("int32", "stamp_lane", self.lane)
        # or the compiler would make the address of each stamp ahead and keep it across the main loop
        opaque(lane.value)
        stamp(T.address_of(self.buffer[self.kernel.cta, lane.value, row, place]), keep)

    def _site(self, kind: str, number: int, extent: int) -> Site | None:
        """Its place in a step; None if there is none left."""
        key = (self.name, kind, number)
        if key not in self.sites:
            place = self.used.get(self.name, 0)
            if place + 2 * extent > self.places:
                self.left_out[key] = extent
                return None
            self.used[self.name] = place + 2 * extent
            self.sites[key] = Site(self.name, kind, number, place, extent)
        return self.sites[key]
