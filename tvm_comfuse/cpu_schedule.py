"""A schedule of canonical functions for LLVM.

The plain loop nest of a 768-wide layer takes minutes.  This one keeps every block, runs rows in parallel, and uses the
CPU's vector units where the layout lets it: along N for w [K, N], along K for w [N, K].
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.schedules.rows import is_rows

#: float32 values worked on at a time, widest first; 64 are four AVX-512 registers, enough to hide the latency of a
#: multiply-add behind the next three
_WIDTHS = (64, 32, 16, 8, 4, 2)
_GEMM = "gemm"
_REDUCTION = "reduce_"


def cpu_schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Schedule a canonical function for LLVM, a rows function as well; M may be symbolic and N, K any size.  The attributes
    stay.

    Raises LoweringError if another function has no block ``gemm``.
    """
    # `named` must live as long as the schedule: TVM changes a function in place that nobody else holds, and with it
    # the body it shares with `func`
    named = func.with_attr("global_symbol", "main")
    sch = s_tir.Schedule(tvm.IRModule({"main": named}))
    blocks = {sch.get(block).name_hint: block for block in sch.get_child_blocks(sch.get_sblock("root"))}
    if _GEMM not in blocks and not is_rows(func):
        raise LoweringError("a canonical function with a block gemm", f"blocks {list(blocks)}", "use FuseClusters")
    for name, block in blocks.items():
        if name == _GEMM:
            _schedule_gemm(sch, block)
        else:
            _schedule_rows(sch, block, vectorize=not name.startswith(_REDUCTION))
    scheduled = sch.mod["main"]
    if "global_symbol" in func.attrs:
        return scheduled.with_attr("global_symbol", func.attrs["global_symbol"])
    return scheduled.without_attr("global_symbol")


def _width(extent: Any) -> int:
    """How many values along an axis of this extent make a vector; 1 if none of the widths divides it."""
    if not isinstance(extent, tirx.IntImm):
        return 1
    return next((width for width in _WIDTHS if int(extent) % width == 0), 1)


def _schedule_rows(sch: s_tir.Schedule, block: Any, *, vectorize: bool) -> None:
    """Rows in parallel; elementwise blocks also in vectors along N."""
    loops = sch.get_loops(block)
    sch.parallel(loops[0])
    width = _width(sch.get(loops[-1]).extent)
    if vectorize and len(loops) > 1 and width > 1:
        _, inner = sch.split(loops[-1], [None, width])
        sch.vectorize(inner)


def _schedule_gemm(sch: s_tir.Schedule, gemm: Any) -> None:
    block = sch.get(gemm)
    # the last index of w is k for w [N, K] and j for w [K, N]
    last = block.reads[1].region[-1].min
    i, j, k = sch.get_loops(gemm)
    if last.same_as(block.iter_vars[2].var):
        _along_k(sch, gemm)
        return
    width = _width(sch.get(j).extent)
    if width == 1:
        sch.parallel(i)
        return
    outer, inner = sch.split(j, [None, width])
    sch.reorder(outer, k, inner)
    sch.parallel(i)
    sch.vectorize(inner)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(gemm, k))[-1])


def _along_k(sch: s_tir.Schedule, gemm: Any) -> None:
    """One partial sum for each value of a vector, in registers; they are added up at the end of a row's k loop."""
    i, _, k = sch.get_loops(gemm)
    width = _width(sch.get(k).extent)
    if width == int(sch.get(k).extent):
        width //= 2  # a loop of one step would vanish in compute_at
    if width <= 1:
        sch.parallel(i)
        return
    _, inner = sch.split(k, [None, width])
    partial = sch.rfactor(inner, 2)
    sch.compute_at(partial, sch.get_loops(gemm)[1])
    _, _, lane, step = sch.get_loops(partial)
    sch.reorder(step, lane)
    sch.parallel(sch.get_loops(gemm)[0])
    sch.vectorize(lane)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(partial, step))[-1])
