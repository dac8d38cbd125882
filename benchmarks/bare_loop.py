"""Compare the main loop, without stages behind it, with cuBLAS on the suites' shapes.

    python benchmarks/bare_loop.py [--suite NAME] [--row NAME ...] [--plans COUNT] [--json FILE.json]

The product x w^T of each shape, stored in half precision: COUNT plans, those of different kinds that the cost model likes
best, are timed once; the fastest ones then take turns with torch.mm, by the protocol of bench/timing.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import tvm
from tvm import tirx

from tvm_comfuse.bench import suites, timing
from tvm_comfuse.bench.contenders import mm_call
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.report import commit, device_name, environment
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.choose import candidates, persistent_ctas, rank
from tvm_comfuse.schedules.co_residency import clusters_n
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.schedules.rows import is_rows
from tvm_comfuse.schedules.spec import ClusterSpec
from tvm_comfuse.schedules.walk import walks
from tvm_comfuse.target import parse_target
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.database.workload import workload_module
from tvm_comfuse.verify.twin import rebuild

#: plans that take turns with mm
FINALISTS = 3
#: an operator whose split form begins with a bare product
BARE = "softcap_softmax"
#: plans that agree in these differ in little
KIND = ("layout", "tile_m", "tile_n", "groups_m", "cluster_m", "cluster_n", "store", "w_order", "w_resident", "walk")


@dataclass(frozen=True)
class Product:
    """The canonical function of a product without stages, and what it is called with."""

    func: tirx.PrimFunc
    spec: ClusterSpec
    sets: list[list[torch.Tensor]]
    out: torch.Tensor


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite")
    parser.add_argument("--row", action="append")
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with Builder(parse_target("cuda")) as builder, torch.no_grad():
        for row in suites.select(suites.load(), options.suite, options.row):
            rows.append(measure(row, options.plans, builder))
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(report(rows))


def report(rows: list[dict[str, Any]]) -> str:
    """JSON, a line for each shape."""
    about = {"commit": commit(), "device": device_name(), "versions": environment(), "protocol": timing.PROTOCOL}
    about["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return "{" + ",\n".join([*lines, f'"rows": [\n{body}\n]']) + "}\n"


def measure(row: suites.Row, count: int, builder: Builder) -> dict[str, Any]:
    """One shape."""
    product = product_of(row)
    calls = built(kinds(product.spec, count), product, builder)
    once = {plan: timing.time_call(call, product.sets) for plan, call in calls.items()}
    best = sorted(calls, key=once.__getitem__)[:FINALISTS]
    alone = built([replace(plan, dependent_launch=False) for plan in best], product, builder)
    found = in_turns({plan: calls[plan] for plan in best} | alone | {"mm": mm_call}, product.sets)
    us = {plan: timing.median(times) for plan, times in found.items()}
    first, late = (min(plans, key=us.__getitem__) for plans in (best, alone))
    return {
        "row": row.label,
        "M": row.M,
        "N": row.N,
        "K": row.K,
        "us": us[first],
        "independent_us": us[late],
        "mm_us": us["mm"],
        "over_mm": round(us[first] / us["mm"], 4),
        "independent_over_mm": round(us[late] / us["mm"], 4),
        "error": _error(calls[first], product),
        "plan": first.to_dict(),
        "independent_plan": late.to_dict(),
        "rounds": {_name(plan): [round(value, 2) for value in times] for plan, times in found.items()},
        "once": {_name(plan): round(once[plan], 2) for plan in sorted(calls, key=once.__getitem__)},
    }


def built(plans: list[Plan], product: Product, builder: Builder) -> dict[Any, Callable[..., None]]:
    """What is called, by plan."""
    builds = [builder.submit(schedule(product.func, H200, plan)) for plan in plans]
    return {plan: _call(build.result().library, product) for plan, build in zip(plans, builds, strict=True)}


def in_turns(calls: dict[Any, Callable[..., Any]], sets: list[list[torch.Tensor]]) -> dict[Any, list[float]]:
    """Microseconds of each call, a time for each round."""
    captured = {name: timing.capture(call, sets) for name, call in calls.items()}
    found = timing.in_turns({name: graph.measure for name, graph in captured.items()})
    for graph in captured.values():
        graph.release()
    return {name: times for name, times in found.items() if not isinstance(times, Exception)}


def _name(plan: Any) -> str:
    return plan.short() if isinstance(plan, Plan) else str(plan)


def product_of(row: suites.Row) -> Product:
    """The product of a row's shape."""
    module = from_relax(OPS[BARE].relax_module(row.M, row.N, row.K, row.dtype))
    split, _ = fuse(module, parse_target("cuda"), form="split")
    functions = [func for _, func in split.functions_items() if isinstance(func, tirx.PrimFunc)]
    (scheduled,) = (func for func in functions if not is_rows(func))
    func = workload_module(rebuild(scheduled, analyze(scheduled), row.M, row.N, row.K))["main"]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = timing.make_sets(OPS[BARE], row.M, row.N, row.K, row.dtype, l2_bytes=l2)
    out = torch.empty((row.M, row.N), dtype=sets[0][0].dtype, device="cuda")
    return Product(func, analyze(func), [inputs[:2] for inputs in sets], out)


def kinds(spec: ClusterSpec, count: int) -> list[Plan]:
    """The plans of `count` different kinds that the cost model likes best."""
    ranked = sorted(_every(spec), key=lambda plan: rank(plan, spec, H200))
    first = {tuple(getattr(plan, name) for name in KIND): plan for plan in reversed(ranked)}
    return sorted(first.values(), key=lambda plan: rank(plan, spec, H200))[:count]


def _every(spec: ClusterSpec) -> Iterator[Plan]:
    """The candidates with every walk, and with A shared."""
    for plan in candidates(spec, H200):
        varied = [replace(plan, walk=walk) for walk in walks(spec)]
        shared = replace(plan, walk=walks(spec)[0], share_a=True)
        varied += [replace(shared, cluster_n=cluster_n) for cluster_n in clusters_n(shared, spec)]
        for made in varied:
            made = replace(made, ctas=persistent_ctas(made, spec, H200))
            if not legality(made, spec, H200):
                yield made


def _call(library: str, product: Product) -> Callable[..., None]:
    kernel = tvm.runtime.load_module(library)["main"]
    return lambda x, w: kernel(x, w, product.out)


def _error(call: Callable[..., None], product: Product) -> float:
    """Relative to the product in float64, in the Frobenius norm."""
    x, w = product.sets[0]
    call(x, w)
    exact = x.double() @ w.double().t()
    return float((product.out.double() - exact).norm() / exact.norm())


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    numbers = f"{row['us']:9.1f}{row['mm_us']:9.1f}{row['over_mm']:7.3f}{row['independent_over_mm']:7.3f}"
    return f"{row['row']:28}{numbers}  {Plan.from_dict(row['plan']).short()}"


if __name__ == "__main__":
    main()
