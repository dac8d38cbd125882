"""A short search on the GPU: candidates are built, compared with float64, timed and kept."""

from __future__ import annotations

from pathlib import Path

import torch

import tvm_comfuse
from tvm_comfuse.verify.numeric import check

TRIALS = 6


def test_a_search_keeps_plans_that_are_right_and_no_slower(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).to(torch.bfloat16).eval()
    x = torch.randn(1024, 256, dtype=torch.bfloat16)
    options = {"example_args": (x,), "trials": TRIALS, "time_budget": 150.0, "records": tmp_path, "parallel": 4}
    (task,) = tvm_comfuse.tune(model, "cuda", **options).tasks
    assert (task.trials, task.failures) == (TRIALS, {})
    assert task.us is not None
    assert task.default_us is not None
    assert 0 < task.us <= task.default_us
    assert task.product_us is not None
    compiled = tvm_comfuse.compile(model, "cuda", example_args=(x,), tuning_records=tmp_path)
    (matmul,) = compiled.explanation.matmuls
    assert matmul.plan == task.plan
    with torch.no_grad():
        exact, eager = model.double()(x.double()), model.to(torch.bfloat16).cuda()(x.cuda()).cpu()
    report = check(compiled.run(x.cuda()).cpu(), exact, eager)
    assert report.passed, report
