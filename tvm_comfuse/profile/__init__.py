"""Where a kernel's time goes: an instrumented build's clock stamps as a timeline, and Nsight Compute's figures.

`subject` finds the kernel, `measure` runs it on a GPU, `timeline` reads the stamps, `summary` adds them up, `picture` draws
them, `ncu` asks Nsight Compute; `report` is the file that all of it is kept in.
"""

from tvm_comfuse.profile.report import Profile, ProfileError

__all__ = ["Profile", "ProfileError"]
