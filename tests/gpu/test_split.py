"""The split form of every row, and rows kernels with what suites do not have, against float64 with poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tvm

from tests.gpu.gpu_rows import SEEDS, SUITES, TARGET, edge
from tvm_comfuse.bench.isolate import IsolatedChecks
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.ours import Records
from tvm_comfuse.bench.suites import Row
from tvm_comfuse.frontend import from_relax
from tvm_comfuse.fusion import fuse
from tvm_comfuse.schedules.rows import is_rows
from tvm_comfuse.target import parse_target
from tvm_comfuse.verify.gpu import FirstLaunches, Limits

SPLIT = Records(form="split")

EDGES = [
    edge("one_row", "layer_norm", 1, 768, 768),
    edge("half", "layer_norm", 1024, 1024, 256, "float16"),
    edge("ragged_rows", "rms", 4099, 512, 256),
    edge("few_columns", "rms", 500, 72, 256),
    edge("softmax_odd_n", "softcap_softmax", 777, 1000, 256),
    edge("two_warps_ragged", "ln_relu", 1001, 2312, 128, "float16"),
    edge("long_row", "rms_norm", 300, 16384, 128),
    edge("longest_row", "layer_norm", 64, 32768, 64),
]


@pytest.mark.parametrize("row", [*SUITES, *EDGES], ids=lambda row: row.label)
def test_row(row: Row, isolated: IsolatedChecks) -> None:
    check = isolated.check(row, SEEDS, TARGET, SPLIT)
    assert check.failure is None, check.failure
    assert check.refusal is None, check.refusal
    assert check.via == "split"
    assert len(check.seeds) == len(SEEDS)
    assert check.passed, check.seeds


@pytest.fixture(scope="module")
def launches() -> Iterator[FirstLaunches]:
    with FirstLaunches(TARGET, Limits(start=120, build=120, launch=30)) as started:
        yield started


@pytest.mark.parametrize("n", [72, 1000, 5120])
@pytest.mark.parametrize("m", [5, 4099])
@pytest.mark.parametrize("op", ["layer_norm", "softcap_softmax"])
def test_rows_kernel_with_a_symbolic_number_of_rows(op: str, m: int, n: int, launches: FirstLaunches) -> None:
    """With bands around every tensor: nothing beside them is written."""
    fused, _ = fuse(from_relax(OPS[op].relax_module(None, n, 64)), parse_target(TARGET), form="split")
    (func,) = (f for _, f in fused.functions_items() if isinstance(f, tvm.tirx.PrimFunc) and is_rows(f))
    result = launches.check("rows", func, m)
    assert not result.failure, result.report()
