"""Says who talks for the row values."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import s_tir

from ..plan import Plan

#: block annotation of a row reduction: scope of the exchange, one of plan.EXCHANGE_SCOPES
EXCHANGE = "comfuse.exchange"


def set_exchange(sch: s_tir.Schedule, names: Iterable[str], plan: Plan) -> None:
    """Annotates the row reductions ``names`` with the plan's scope."""
    for name in names:
        sch.annotate(sch.get_sblock(name), EXCHANGE, plan.exchange)
