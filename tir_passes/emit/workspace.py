"""Global memory of a kernel for exchanges across the grid: mailboxes and the launch counter.

It is static memory of the CUDA module, zero when the module is loaded.  Tags start at `base`, which the last CTA of a
launch moves past every tag the launch used, so a slot never holds a tag of the future and nothing is cleared.  Two launches
of the same kernel at the same time, on two streams, would share it: that is not supported yet.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import do

Expr = Any

_MAIL = """__device__ unsigned long long {name}_mail_slots[{slots}];
__device__ __forceinline__ void* {name}_mail(unsigned index) {{ return {name}_mail_slots + index; }}
"""
_STATE = """__device__ unsigned {name}_state_words[2];
__device__ __forceinline__ unsigned* {name}_state() {{ return {name}_state_words; }}
"""
_BASE = """__device__ __forceinline__ unsigned comfuse_tag_base(void* state) { unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(state) : "memory"); return v; }
"""
_LEAVE = """__device__ __forceinline__ void comfuse_leave(void* state, unsigned ctas, unsigned tags) {
  unsigned* p = (unsigned*)state; unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(p + 1) : "memory");
  if (old == ctas - 1) { p[1] = 0; p[0] += tags; } }
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

    def tag_base(self) -> Expr:
        """The tag behind those of earlier launches."""
        return T.cuda.func_call("comfuse_tag_base", self._state(), source_code=_BASE, return_type="uint32")

    def leave(self, ctas: int, tags: Expr) -> None:
        """One thread of each CTA, at its end: the last one moves the base past this launch's tags."""
        do(T.cuda.func_call("comfuse_leave", self._state(), T.uint32(ctas), tags, source_code=_LEAVE))
