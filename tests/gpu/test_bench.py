"""The benchmark itself on a GPU: all contenders of one small row."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tvm_comfuse.bench import run_suite
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.timing import make_sets, time_call


def test_all_contenders_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run_suite("ragged", rows=["small_m"], seeds=1, inductor="default", json_path=path)
    values = json.loads(path.read_text())
    (row,) = values["rows"]
    assert row["failure"] is None, row["failure"]
    assert "H" in values["device"]
    assert row["inductor_setting"] == "default"
    for time in ("mm_us", "eager_us", "inductor_us", *(["ours_us"] if row["fused"] else [])):
        assert 1.0 < row[time] < 1000.0, time
    assert row["mm_us"] < row["eager_us"]


def test_time_is_the_time_of_the_work() -> None:
    """Twice the work takes about twice the time, and the call's result does not depend on being captured."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    times = []
    for rows in (8192, 16384):
        sets = make_sets(OPS["bias"], rows, 2048, 2048, "bfloat16", l2_bytes=l2)
        with torch.no_grad():
            times.append(time_call(OPS["bias"].eager, sets))
    assert 1.6 < times[1] / times[0] < 2.4
