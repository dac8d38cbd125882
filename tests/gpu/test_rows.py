"""Every row of the package's suites, and rows at the edges, against float64 with poisoned outputs."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_rows import SEEDS, SUITES, TARGET, edge
from tvm_comfuse.bench.isolate import IsolatedChecks
from tvm_comfuse.bench.ours import Records
from tvm_comfuse.bench.suites import Row

#: also where the two kernels of the split form are faster, which test_split.py looks at
FUSED = Records(form="fused")

EDGES = [
    edge("half", "layer_norm", 1024, 1024, 1024, "float16"),
    edge("half_rms", "rms_norm", 2048, 2048, 512, "float16"),
    edge("half_softmax", "softcap_softmax", 512, 512, 512, "float16"),
    edge("one_row", "layer_norm", 1, 768, 768),
    edge("fewer_rows_than_a_tile", "rms_norm", 77, 1024, 512),
    edge("k_not_a_tile", "layer_norm", 1000, 768, 72),
    edge("k_below_a_tile", "rms", 300, 512, 40),
    edge("n_not_a_tile", "ln_relu", 1000, 1000, 512),
    edge("n_below_a_tile", "rms", 500, 72, 256),
    edge("everything_odd", "layer_norm", 333, 1000, 72, "float16"),
    edge("softmax_odd_n", "softcap_softmax", 777, 1000, 256),
    edge("plain_bias", "bias", 4096, 2304, 768),
    edge("plain_bias_odd", "bias", 1001, 1000, 200),
    edge("bias_gelu", "bias_gelu", 4096, 3072, 768),
    edge("bias_gelu_half", "bias_gelu", 129, 328, 136, "float16"),
]


@pytest.mark.parametrize("row", SUITES, ids=lambda row: row.label)
def test_suite_row(row: Row, isolated: IsolatedChecks) -> None:
    check = isolated.check(row, SEEDS, TARGET, FUSED)
    assert check.failure is None, check.failure
    if check.refusal is not None:
        assert row.suite != "post_norm", check.refusal["text"]
        assert check.refusal["text"]
        pytest.skip(f"refused: {check.refusal['text']}")
    assert check.fused
    assert len(check.seeds) == len(SEEDS)
    assert check.passed, check.seeds


@pytest.mark.parametrize("row", EDGES, ids=lambda row: row.name)
def test_edge_row(row: Row, isolated: IsolatedChecks) -> None:
    check = isolated.check(row, SEEDS, TARGET, FUSED)
    assert check.failure is None, check.failure
    assert check.refusal is None, check.refusal
    assert len(check.seeds) == len(SEEDS)
    assert check.passed, check.seeds


@pytest.mark.parametrize("extent", ["K", "N"])
def test_rows_that_tma_cannot_take_are_refused_with_the_number(extent: str, isolated: IsolatedChecks) -> None:
    row = edge("unaligned", "layer_norm", 256, *((508, 256) if extent == "N" else (512, 252)))
    check = isolated.check(row, SEEDS, TARGET, FUSED)
    assert check.failure is None, check.failure
    assert check.refusal is not None
    assert str(getattr(row, extent)) in check.refusal["text"]
