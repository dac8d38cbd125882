"""Clauses of legality about CTAs that work together: the scope that their row values need, clusters, one wave."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_comfuse.refusal import Refusal

from .device import Device
from .footprint import row_parts
from .plan import COOPERATIVE_GROUPS, Plan
from .spec import ClusterSpec
from .walk import TURNS, in_turn, walks

MAX_CLUSTER = 8
MAX_WGMMA_N = 256


def exchange(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """The scope reaches every part of a row, and is none exactly if there is no row value."""
    parts = row_parts(plan, spec)
    numbers = {"N": spec.n, "exchange": plan.exchange, "cta_columns": plan.cta_columns, "parts": parts}
    if not spec.reductions:
        if plan.exchange != "none":
            yield Refusal("exchange-none", "exchange must be none without a row reduction", numbers, "set it to none")
        return
    rule, good = {
        "none": ("exchange none is for clusters without row reductions, and this one has some", False),
        "warp": ("exchange warp needs the whole row in one group's tile", plan.groups_n == 1 and parts == 1),
        "cta": (
            "exchange cta needs the row in two groups side by side (cooperative 1 x 2)",
            plan.groups_n > 1 and parts == 1,
        ),
        "cluster": (f"exchange cluster needs 2 to {MAX_CLUSTER} CTAs for a row", 2 <= parts <= MAX_CLUSTER),
        "grid": ("exchange grid needs at least 2 CTAs for a row", parts >= 2),
    }[plan.exchange]
    if not good:
        yield Refusal("exchange-scope", rule, numbers, "choose the nearest scope that reaches all parts of a row")


def cluster(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """cluster_n is the CTAs of a row for exchange=cluster, a divisor of them where they share A, and 1 otherwise; the device
    runs clusters of that size."""
    good = clusters_n(plan, spec)
    if plan.cluster_n not in good:
        yield Refusal(
            "cluster-n",
            "cluster_n must be the CTAs of a row for exchange=cluster, a divisor of them if they share A, and 1 otherwise",
            {"cluster_n": plan.cluster_n, "possible": good, "exchange": plan.exchange, "share_a": plan.share_a},
            f"set cluster_n to {' or '.join(map(str, good))}" if good else "set share_a to false",
        )
    size = plan.cluster_m * plan.cluster_n
    if size > MAX_CLUSTER or not device.clusters(size):
        yield Refusal(
            "cluster-size",
            f"a cluster has at most {MAX_CLUSTER} CTAs",
            {"cluster_m": plan.cluster_m, "cluster_n": plan.cluster_n},
            "lower cluster_m, or exchange through the grid",
        )


def clusters_n(plan: Plan, spec: ClusterSpec) -> list[int]:
    """What cluster_n may be; [] if nobody is there to share A."""
    parts = row_parts(plan, spec)
    if plan.exchange == "cluster":
        return [parts]
    if not plan.share_a:
        return [1]
    return [count for count in range(2, MAX_CLUSTER // plan.cluster_m + 1) if parts % count == 0]


def grid(plan: Plan, spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """The persistent grid is whole clusters, and whole rows where each CTA keeps its columns, and runs in one wave."""
    size = plan.cluster_m * plan.cluster_n
    resident = device.clusters(size) * size
    parts = 1 if in_turn(plan) else row_parts(plan, spec)
    step = parts * plan.cluster_m
    if step > resident:
        yield Refusal(
            "row-length",
            "the CTAs that work on the same rows must all run at once",
            {"N": spec.n, "cta_columns": plan.cta_columns, "CTAs": step, "resident": resident},
            "take wider tiles" + (" or cluster_m 1" if plan.cluster_m > 1 else ""),
        )
        return
    if plan.ctas > resident:
        yield Refusal(
            "co-residency",
            "all CTAs of the persistent grid must run at once",
            {"ctas": plan.ctas, "cluster": size, "resident": resident},
            f"lower ctas to at most {resident}",
        )
    if plan.ctas % step:
        yield Refusal(
            "grid-step",
            "ctas must be a multiple of the CTAs that work on the same rows and of the cluster",
            {"ctas": plan.ctas, "multiple": step, "parts": parts},
            f"take a multiple of {step}",
        )


def most_columns(device: Device) -> int:
    """Columns that all CTAs that run at once hold together, with the widest tiles."""
    return device.clusters(1) * MAX_WGMMA_N * COOPERATIVE_GROUPS


def row_length(spec: ClusterSpec, device: Device) -> Iterator[Refusal]:
    """Where each CTA keeps its columns, a row has at most what all CTAs that run at once hold with the widest tiles."""
    if TURNS in walks(spec):
        return
    limit = most_columns(device)
    if spec.n > limit:
        pieces = -(-spec.n // limit)
        yield Refusal(
            "row-length",
            f"N is at most {limit} on {device.name}, whose CTAs hold a whole row together",
            {"N": spec.n, "limit": limit},
            f"split the weight along N into {pieces} products of at most {limit} columns",
        )
