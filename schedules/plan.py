"""The plan: every choice that makes one kernel of a cluster.

A plan is built from the schedule's decisions and is all that lowering may ask.  It is frozen, hashable, printable and
goes to JSON and back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tvm_comfuse.errors import PlanError

from .registers import THREADS_OF_GROUP

#: who must talk for a row value, from near to far
EXCHANGE_SCOPES = ("none", "warp", "cta", "cluster", "grid")
#: how the MMA warp groups share the work of a CTA
LAYOUTS = ("pingpong", "cooperative", "memory")
#: the order in which rows of w become columns of the result in a warp group's registers
W_ORDERS = ("rows", "quads")
#: how the CTAs go through the tiles of the result
WALKS = ("columns", "tiles")
#: where an [M, N] operand is read from: a tile that TMA fills, or global memory
PLACEMENTS = ("tma", "global")
#: columns that a quad of lanes has together with w_order quads, eight each
QUAD_COLUMNS = 32
#: MMA warp groups of the cooperative layout
COOPERATIVE_GROUPS = 2


@dataclass(frozen=True)
class Plan:
    """One kernel.

    tile_m, tile_n   rows and columns of the result one MMA warp group holds in registers
    tile_k           depth of one pipeline slot, in elements of K
    pipeline_depth   slots of the ring between the producer and the MMA warp groups
    layout           ``pingpong``: each MMA warp group has a tile of its own and their main loops take turns, so that the
                     stages of one run while the tensor cores work for another;
                     ``cooperative``: the groups work on one CTA tile at the same time;
                     ``memory``: likewise, but they only multiply: they hand their tiles over to a memory warp group, which runs
                     the stages while they go on with the next tile
    groups_m,        how the MMA warp groups of a CTA tile stand: 2 x 1 or 1 x 2 (cooperative), 2 x 1 (memory); 1 x 1 for
    groups_n         pingpong
    exchange         scope of the row values; ``none`` without a row reduction, ``warp`` if one warp group's tile has
                     the whole row
    cluster_m        CTAs along M that share W by TMA multicast
    cluster_n        CTAs along N that exchange row values through distributed shared memory (exchange = cluster) or share A;
                     1 otherwise
    ctas             CTAs of the persistent grid
    operands         placement of each [M, N] operand, in the order of the function's parameters
    store            how outputs leave: ``tma`` or ``global``, in the order of the function's tile outputs
    fast_math        tanh and exp of the stages by the special function unit alone: relative errors of 2**-11 and of 2**-22
                     times 1 + |x|, where the CUDA library has 2**-22
    defer            run the passes behind a step's last exchange during the next step's main loop; until then the carried
                     value waits in registers, in half precision
    w_order          ``rows``: a lane has two of every eight neighbouring columns, as wgmma leaves them;
                     ``quads``: rows of w are loaded in such an order that a lane has eight neighbours of every 32, which
                     global memory takes and gives with one access
    w_resident       each CTA loads its columns of W once and keeps them in shared memory; the ring then carries x only
    mma_groups       MMA warp groups of a CTA: 2 to 4 in the pingpong layout, where more of them hide stages that take longer
                     than one main loop; 2 in the others
    dependent_launch start before the kernel in front in the stream has ended, and wait for it behind the prologue
                     (programmatic dependent launch)
    share_a          the CTAs along N of a thread block cluster share A by TMA multicast
    walk             ``columns``: a CTA keeps its columns; ``tiles``: CTAs take turns at all tiles (schedules/walk.py)
    packed_tail      the arithmetic behind the last exchange in packed half precision: one instruction for two neighbours,
                     which rounds each intermediate result
    """

    tile_m: int
    tile_n: int
    tile_k: int
    pipeline_depth: int
    layout: str
    groups_m: int
    groups_n: int
    exchange: str
    cluster_m: int
    cluster_n: int
    ctas: int
    operands: tuple[str, ...] = ()
    store: tuple[str, ...] = ()
    fast_math: bool = False
    defer: bool = False
    w_order: str = "rows"
    w_resident: bool = False
    mma_groups: int = COOPERATIVE_GROUPS
    dependent_launch: bool = False
    packed_tail: bool = False
    walk: str = "columns"
    share_a: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        values = asdict(self)
        return {**values, "operands": list(self.operands), "store": list(self.store)}

    def to_json(self) -> str:
        """One line of JSON with sorted keys; the form kept in a schedule's annotation."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def short(self) -> str:
        """The choices that tell plans apart at a glance."""
        groups = f" {self.groups_m}x{self.groups_n}" if self.layout != "pingpong" else ""
        groups += f" of {self.mma_groups} groups" if self.mma_groups != COOPERATIVE_GROUPS else ""
        resident = ", W resident" if self.w_resident else ""
        cluster = f", cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_m * self.cluster_n > 1 else ""
        cluster += " sharing A" if self.share_a else ""
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}, depth {self.pipeline_depth}, {self.layout}{groups}{resident}, "
            f"exchange {self.exchange}{cluster}, {self.ctas} CTA{'s' if self.ctas > 1 else ''}"
            f"{', tiles in turn' if self.walk == 'tiles' else ''}"
            f"{', quads' if self.w_order == 'quads' else ''}{', deferred' if self.defer else ''}"
            f"{', packed tail' if self.packed_tail else ''}"
            f"{', dependent launch' if self.dependent_launch else ''}"
        )

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """The inverse of to_dict.

        Raises PlanError for missing or unknown fields and for values of the wrong type.
        """
        known = {f.name: f for f in fields(Plan)}
        unknown = sorted(set(values) - set(known))
        missing = sorted(name for name in REQUIRED if name not in values)
        if unknown or missing:
            raise PlanError(
                f"a plan with the fields {', '.join(known)}",
                f"missing {missing}, unknown {unknown}",
                "take the JSON of an existing plan (`comfuse explain --json`) and change its values",
            )
        for name, value in values.items():
            kind = known[name].type
            good = {
                "int": isinstance(value, int) and not isinstance(value, bool),
                "bool": isinstance(value, bool),
                "str": isinstance(value, str),
            }.get(str(kind), isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value))
            if not good:
                wanted = "as a list of strings" if str(kind).startswith("tuple") else f"of type {kind}"
                raise PlanError(f"plan field {name} {wanted}", repr(value), "correct the value")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return Plan(**plain)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of to_json.  Raises PlanError for text that is not a JSON object."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError("a plan as a JSON object", f"{error}", "check the JSON text") from error
        if not isinstance(values, dict):
            raise PlanError("a plan as a JSON object", type(values).__name__, "check the JSON text")
        return Plan.from_dict(values)

    @property
    def threads(self) -> int:
        """Threads of a CTA: one producer warp group, the MMA warp groups and the memory warp group, if there is one."""
        return THREADS_OF_GROUP * (1 + self.mma_groups + self.hands_over)

    @property
    def hands_over(self) -> bool:
        """Whether the MMA warp groups hand their tiles over to a memory warp group."""
        return self.layout == "memory"

    @property
    def cta_rows(self) -> int:
        """Rows of the result a CTA works on at a time."""
        return self.tile_m * (self.mma_groups if self.layout == "pingpong" else self.groups_m)

    @property
    def cta_columns(self) -> int:
        """Columns of the result a CTA works on at a time."""
        return self.tile_n * self.groups_n


REQUIRED = [f.name for f in fields(Plan)][:11]
