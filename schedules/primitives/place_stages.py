"""Says which warp groups run the stages."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import s_tir

#: block annotation: role of the warp groups that run a block
ROLE = "comfuse.role"
#: the kernel form runs all stages where the product is, in the registers of the MMA warp groups
ROLES = ("mma",)


def place_stages(sch: s_tir.Schedule, names: Iterable[str], role: str = "mma") -> None:
    """Annotates blocks with the role that runs them.

    Raises ValueError for a role that the kernel form does not have.
    """
    if role not in ROLES:
        raise ValueError(f"needed a role of {ROLES}; found {role!r}; try: 'mma'")
    for name in names:
        sch.annotate(sch.get_sblock(name), ROLE, role)
