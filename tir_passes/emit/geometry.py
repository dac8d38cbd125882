"""Who works on which part of the result.

The N columns are cut into `parts` of `cta_columns`; a CTA keeps its part for its whole life.  The M rows are cut into
units of `unit_rows`.  `parts` CTAs with different parts form a row group; group q works on units q, q + groups,
q + 2 groups, ...: its steps 0, 1, 2, ...  In the pingpong layout MMA warp group g of G does the steps s with s % G == g;
in the cooperative layout both warp groups do every step together.  cluster_m neighbouring groups share W, so they do the same
number of steps; a unit that begins behind M computes rows that nobody stores.

That is walk ``columns``.  With walk ``tiles`` cluster c of C takes tiles c, c + C, c + 2 C, ... of the whole result, in units
of cluster_m rows of tiles: band by band of columns, in a band row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.walk import band_parts, in_turn

Expr = Any


@dataclass(frozen=True)
class Geometry:
    """The static part of the map from CTAs to the result."""

    plan: Plan
    spec: ClusterSpec

    @property
    def pingpong(self) -> bool:
        """Whether each MMA warp group has a tile of its own."""
        return self.plan.layout == "pingpong"

    @property
    def unit_rows(self) -> int:
        """Rows of one step of one CTA."""
        return self.plan.tile_m if self.pingpong else self.plan.tile_m * self.plan.groups_m

    @property
    def parts(self) -> int:
        """CTAs that share a row."""
        return -(-self.spec.n // self.plan.cta_columns)

    @property
    def row_parts(self) -> int:
        """Tiles of MMA warp groups that share a row; part p covers the columns [p tile_n, (p + 1) tile_n)."""
        return self.parts * self.plan.groups_n

    @property
    def row_groups(self) -> int:
        """Row groups of the grid."""
        return self.plan.ctas // self.parts

    @property
    def cluster_size(self) -> int:
        """CTAs of a thread block cluster."""
        return self.plan.cluster_m * self.plan.cluster_n

    @property
    def slot_writers(self) -> int:
        """CTAs that write to a pipeline slot: those that share W and those that share A, this one among them."""
        return self.plan.cluster_m + (self.plan.cluster_n - 1 if self.plan.share_a else 0)

    @property
    def row_clusters(self) -> int:
        """Thread block clusters that share a row."""
        return self.parts // self.plan.cluster_n

    @property
    def k_slots(self) -> int:
        """Pipeline slots that one step fills."""
        return -(-self.spec.k // self.plan.tile_k)

    @property
    def ragged_n(self) -> bool:
        """Whether the last part has columns behind N."""
        return self.spec.n % self.plan.cta_columns != 0

    @property
    def steps_of_group(self) -> int:
        """1 if every MMA warp group does every step, else the distance between its steps."""
        return self.plan.mma_groups if self.pingpong else 1


@dataclass(frozen=True)
class CtaPlace:
    """The kernel's view of itself: index expressions of one CTA."""

    geometry: Geometry
    cluster: Expr
    rank: Expr
    rows: Expr

    @property
    def part(self) -> Expr:
        """Index of this CTA's columns among `parts`."""
        clusters = self.geometry.row_clusters
        if clusters == 1:
            return self.seat
        first = self.cluster % clusters
        return first * self.geometry.plan.cluster_n + self.seat if self.geometry.plan.cluster_n > 1 else first

    @property
    def seat(self) -> Expr:
        """Index of this CTA among the cluster_n that have the same rows."""
        return self.rank // self.geometry.plan.cluster_m

    @property
    def share(self) -> Expr:
        """Index of this CTA among the cluster_m that share W."""
        return self.rank % self.geometry.plan.cluster_m

    @property
    def first_row_group(self) -> Expr:
        """Row group of the CTA with share 0."""
        return (self.cluster // self.geometry.row_clusters) * self.geometry.plan.cluster_m

    @property
    def row_group(self) -> Expr:
        """Row group of this CTA."""
        return self.first_row_group + self.share

    @property
    def units(self) -> Expr:
        """Units of rows in the result, int32."""
        unit = self.geometry.unit_rows
        return T.cast((self.rows + (unit - 1)) // unit, "int32")

    @property
    def steps(self) -> Expr:
        """Steps this CTA does: as many as the one of its cluster that has the most."""
        if in_turn(self.geometry.plan):
            return (self._teams * self.geometry.parts - self.cluster + (self._clusters - 1)) // self._clusters
        groups = self.geometry.row_groups
        return (self.units - self.first_row_group + (groups - 1)) // groups

    def row(self, step: Expr) -> Expr:
        """First row of the unit of a step, int32."""
        if in_turn(self.geometry.plan):
            return (self._tile(step)[0] * self.geometry.plan.cluster_m + self.share) * self.geometry.unit_rows
        return (self.row_group + step * self.geometry.row_groups) * self.geometry.unit_rows

    def column(self, step: Expr) -> Expr:
        """First column of a step."""
        if in_turn(self.geometry.plan):
            return self._tile(step)[1] * self.geometry.plan.cta_columns
        return self.first_column

    @property
    def first_column(self) -> Expr:
        """First column of this CTA, if it keeps its columns."""
        return self.part * self.geometry.plan.cta_columns

    @property
    def _clusters(self) -> int:
        return self.geometry.plan.ctas // self.geometry.plan.cluster_m

    @property
    def _teams(self) -> Expr:
        """Units of rows, cluster_m at a time."""
        cluster_m = self.geometry.plan.cluster_m
        return (self.units + (cluster_m - 1)) // cluster_m

    def _tile(self, step: Expr) -> tuple[Expr, Expr]:
        """(cluster_m units of rows, part) of a step that takes its turn."""
        parts, width = self.geometry.parts, band_parts(self.geometry.plan, self.geometry.spec)
        number = self.cluster + step * self._clusters
        if width == parts:
            return number // parts, number % parts
        of_band = self._teams * width
        # a CTA that the static checks give an index below zero has columns of the tensor all the same
        band, rest = number // of_band % -(-parts // width), number % of_band
        columns = T.min(parts - band * width, width) if parts % width else width
        return rest // columns, band * width + rest % columns

    def peer(self, share: Expr) -> Expr:
        """Cluster rank of the CTA with the same columns and another share."""
        return self.seat * self.geometry.plan.cluster_m + share

    def writer(self, index: Expr) -> Expr:
        """Cluster rank of CTA number `index` of the slot_writers: first those with the same columns, then those with the same
        rows."""
        cluster_m = self.geometry.plan.cluster_m
        if not self.geometry.plan.share_a:
            return self.peer(index)
        other = index - cluster_m
        seat = other + T.cast(other >= self.seat, "int32")
        return T.Select(index < cluster_m, self.peer(index), seat * cluster_m + self.share)
