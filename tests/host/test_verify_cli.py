"""``comfuse verify`` and what is behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tvm
from typer.testing import CliRunner

from tests.host.relax_models import bare, bias_residual_layer_norm, build
from tvm_comfuse.cli.main import app
from tvm_comfuse.errors import TargetError
from tvm_comfuse.verify import static
from tvm_comfuse.verify.api import verify
from tvm_comfuse.verify.finding import Finding


@pytest.fixture
def model(tmp_path: Any) -> str:
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(build(bias_residual_layer_norm, "bfloat16", 256)))
    return str(path)


def test_prints_what_was_checked(model: str) -> None:
    result = CliRunner().invoke(app, ["verify", model, "--seeds", "1"])
    assert result.exit_code == 0, result.output
    for text in ("passed", "static checks", "barriers", "interleavings", "against float64", "reduced:"):
        assert text in result.output


def test_json(model: str) -> None:
    result = CliRunner().invoke(app, ["verify", model, "--seeds", "2", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] is True
    (kernel,) = report["kernels"]
    assert kernel["interleavings"] > 5
    assert kernel["findings"] == []
    assert all(0 < kernel["errors"][name] <= kernel["allowed"][name] for name in kernel["errors"])
    assert set(kernel["checks"]) == set(static.CHECKS)


def test_a_changed_plan_is_what_is_verified(model: str, tmp_path: Any) -> None:
    values = json.loads(CliRunner().invoke(app, ["explain", model, "--json"]).stdout)
    plan = values["matmuls"][0]["plan"]
    plans = tmp_path / "plans.json"
    plan["pipeline_depth"] = 2
    plans.write_text(json.dumps(values))
    result = CliRunner().invoke(app, ["verify", model, "--plans", str(plans), "--seeds", "1", "--json"])
    assert result.exit_code == 0, result.output
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["plan"]["pipeline_depth"] == 2
    plan["pipeline_depth"] = 99
    plans.write_text(json.dumps(values))
    result = CliRunner().invoke(app, ["verify", model, "--plans", str(plans)])
    assert result.exit_code != 0


def test_a_finding_fails_the_command(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("register-budget", "setmaxnreg", "1 + 1 = 3", {"used": 3})
    monkeypatch.setattr(static, "check", lambda kernel, device: [found])
    result = CliRunner().invoke(app, ["verify", model, "--json"])
    assert result.exit_code == 1
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["findings"][0]["text"] == "1 + 1 = 3"
    assert kernel["interleavings"] == 0
    shown = CliRunner().invoke(app, ["verify", model])
    assert "FAILED" in shown.output
    assert "register-budget" in shown.output


def test_a_model_without_kernels(tmp_path: Any) -> None:
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(build(bare, "float32", 256)))
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert "no kernel to verify" in result.output


def test_a_target_without_kernels() -> None:
    with pytest.raises(TargetError, match="llvm"):
        verify(build(bias_residual_layer_norm, "bfloat16", 256), "llvm")
