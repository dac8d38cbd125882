"""Who is ordered after whom: one number for everything that acts on memory.

Time is a vector of counters, one for each component.  An access carries the epoch (component, counter); it happened before
another if the other's vector has at least that counter.  Components of a CTA:
  warps      generic accesses; the counter moves at each release
  wgmma      asynchronous reads of a warp group's wgmma; the counter is the number of its commit group
  bulk       asynchronous reads of a warp's TMA stores; the counter is the number of its bulk group
  barriers   asynchronous writes of TMA loads; the counter is the phase of the mbarrier that the bytes complete, plus one
"""

from __future__ import annotations

from dataclasses import dataclass

#: the component of memory nobody wrote (never known) and of words that only atomic instructions touch (always known)
NOBODY, ATOMIC, FIRST = 0, 1, 2


@dataclass(frozen=True)
class Components:
    """Numbering of the components of a grid; all numbers are per CTA."""

    ctas: int
    warps: int
    groups: int
    barriers: int

    @property
    def per_cta(self) -> int:
        """Components of one CTA."""
        return self.readers + self.barriers

    @property
    def readers(self) -> int:
        """Components that can read a CTA's shared memory; they come first."""
        return 2 * self.warps + self.groups

    @property
    def total(self) -> int:
        """Length of a vector."""
        return FIRST + self.ctas * self.per_cta

    def base(self, cta: int) -> int:
        """First component of a CTA."""
        return FIRST + cta * self.per_cta

    def warp(self, cta: int, warp: int) -> int:
        """A warp's generic accesses."""
        return self.base(cta) + warp

    def wgmma(self, cta: int, group: int) -> int:
        """A warp group's wgmma."""
        return self.base(cta) + self.warps + group

    def bulk(self, cta: int, warp: int) -> int:
        """A warp's TMA stores."""
        return self.base(cta) + self.warps + self.groups + warp

    def barrier(self, cta: int, index: int) -> int:
        """TMA loads that complete on an mbarrier."""
        return self.base(cta) + self.readers + index

    def name(self, component: int) -> str:
        """A component as a person would call it."""
        if component < FIRST:
            return ("nobody", "an atomic instruction")[component]
        cta, local = divmod(component - FIRST, self.per_cta)
        if local < self.warps:
            return f"cta {cta} warp {local}"
        local -= self.warps
        if local < self.groups:
            return f"wgmma of cta {cta} warp group {local}"
        local -= self.groups
        if local < self.warps:
            return f"TMA store of cta {cta} warp {local}"
        return f"TMA load of cta {cta} on barrier {local - self.warps}"
