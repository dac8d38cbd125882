"""Global memory of a kernel for exchanges across the grid: mailboxes, their owner, the tag base and the launch counter.

It is static memory of the CUDA module, zero when the module is loaded.

Tags start at `base`, which the last CTA of a launch moves past every tag the launch used, so a slot never holds a tag of the
future and nothing is cleared.

Launches of one kernel at the same time, on several streams, take turns: a launch owns the mailboxes from `enter` to the last
`leave`.  A CTA must know which launch it belongs to.  The driver tells: it gives every cooperative launch a workspace for
the barrier of its grid, which two launches that run at the same time cannot share, and %envreg1 and %envreg2 hold its address
(cooperative_groups/details/driver_abi.h reads them for grid.sync()).  Without a cooperative launch they are zero, every
launch looks the same, and nobody waits.

Only the last CTA of the grid takes the mailboxes; the others wait until their launch has them.  CTAs are given SMs in order,
so the others then run already: a launch that owns the mailboxes waits for nothing that another launch holds.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import do

Expr = Any

_MAIL = """__device__ unsigned long long {name}_mail_slots[{slots}];
__device__ __forceinline__ void* {name}_mail(unsigned index) {{ return {name}_mail_slots + index; }}
"""
#: owner; tag base and number of CTAs that have left
_STATE = """__device__ unsigned long long {name}_state_words[2];
__device__ __forceinline__ void* {name}_state() {{ return {name}_state_words; }}
"""
_ENTER = """__device__ __forceinline__ unsigned comfuse_enter(void* state, unsigned takes) {
  unsigned high, low, base; unsigned long long owner;
  asm volatile("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm volatile("mov.u32 %0, %%envreg2;" : "=r"(low));
  unsigned long long launch = ((unsigned long long)high << 32) | low;
  while (true) {
    if (takes) {
      asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], 0, %2;"
                   : "=l"(owner) : "l"(state), "l"(launch) : "memory");
      if (owner == 0) break;
    } else {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(owner) : "l"(state) : "memory");
    }
    if (owner == launch) break;
    __nanosleep(100);
  }
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(base) : "l"((unsigned*)state + 2) : "memory");
  return base; }
"""
_LEAVE = """__device__ __forceinline__ void comfuse_leave(void* state, unsigned ctas, unsigned tags) {
  unsigned* words = (unsigned*)state + 2; unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(words + 1) : "memory");
  if (old == ctas - 1) {
    words[1] = 0; words[0] += tags;
    asm volatile("st.release.gpu.global.u64 [%0], 0;" :: "l"(state) : "memory"); } }
"""


class Workspace:
    """Mailboxes of `slots` words for the kernel called `name`."""

    def __init__(self, name: str, slots: int):
        self.name, self.slots = f"comfuse_{name}", slots

    def slot(self, index: Expr) -> Expr:
        """Address of a slot."""
        source = _MAIL.format(name=self.name, slots=self.slots)
        return T.cuda.func_call(f"{self.name}_mail", T.cast(index, "uint32"), source_code=source, return_type="handle")

    def _state(self) -> Expr:
        source = _STATE.format(name=self.name)
        return T.cuda.func_call(f"{self.name}_state", source_code=source, return_type="handle")

    def enter(self, takes: Expr) -> Expr:
        """One thread of each CTA: waits until this launch owns the mailboxes, which the CTA that `takes` (bool) brings about.
        Gives the tag behind those of earlier launches, uint32."""
        return T.cuda.func_call(
            "comfuse_enter", self._state(), T.cast(takes, "uint32"), source_code=_ENTER, return_type="uint32"
        )

    def leave(self, ctas: int, tags: Expr) -> None:
        """One thread of each CTA, at its end: the last one moves the base past this launch's tags and gives the mailboxes
        away."""
        do(T.cuda.func_call("comfuse_leave", self._state(), T.uint32(ctas), tags, source_code=_LEAVE))
