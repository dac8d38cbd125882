"""A fast wrong kernel cannot win: twelve planted wrong or racing schedules, and none of them becomes a record.

They go through what a real search uses: four break a rule that the build checks, five compute something else and are
compiled for the CPU and measured, three race and run in the interpreter.  All would be the fastest.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from canonical_examples import EXAMPLES, Maker
from tuning_examples import done, search, task
from tvm import te, tirx
from verified_kernels import cases_for

from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tir_passes import lower as lowering
from tvm_comfuse.tuning.build import Built, build
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.measurer import Measured, Measurer
from tvm_comfuse.tuning.task import Task
from tvm_comfuse.verify.faults import FAULTS, detect

LLVM = parse_target("llvm")
SHAPE = (48, 64, 64)
#: break a rule of the protocol; verify.static sees it when the kernel is lowered
STATIC = ("wait-full-missing", "count-empty-one-more", "wgmma-fence-missing", "bytes-full-less")
#: race, or give other numbers on some order of events
RACING = ("release-early", "parity-read-stuck", "mailbox-parity")


def unnormalised(mk: Maker) -> Any:
    """The sum before the norm."""
    b, r, g, e = mk.col("b"), mk.tile("r"), mk.col("g"), mk.col("e")
    f32 = "float32"
    return _only_output(
        mk,
        lambda i, j: (mk.gemm[i, j] + b[j].astype(f32) + r[i, j].astype(f32)) * g[j].astype(f32) + e[j].astype(f32),
    )


def without_bias(mk: Maker) -> Any:
    """LayerNorm, but the bias is left out."""
    mk.col("b")
    r = mk.tile("r")
    return _norm(mk, mk.stage(0, lambda i, j: mk.gemm[i, j] + r[i, j].astype("float32")), 1.0 / mk.n)


def wrong_mean(mk: Maker) -> Any:
    """LayerNorm, but the variance is divided by one element too few."""
    b, r = mk.col("b"), mk.tile("r")
    value = mk.stage(0, lambda i, j: mk.gemm[i, j] + b[j].astype("float32") + r[i, j].astype("float32"))
    return _norm(mk, value, 1.0 / (mk.n - 4))


def half_product(mk: Maker) -> Any:
    """LayerNorm, but K ends in the middle."""
    x, w = mk.params[:2]
    k = te.reduce_axis((0, mk.k // 2), "k")
    mk.gemm = te.compute(
        (mk.m, mk.n),
        lambda i, j: te.sum(x[i, k].astype("float32") * w[j, k].astype("float32"), axis=k),
        name="gemm",
    )
    return EXAMPLES["layer_norm"].make(mk)


def last_row_zero(mk: Maker) -> Any:
    """LayerNorm, but the last row is zero."""
    b, r = mk.col("b"), mk.tile("r")
    value = mk.stage(0, lambda i, j: mk.gemm[i, j] + b[j].astype("float32") + r[i, j].astype("float32"))
    kept = mk.m - 1
    return _norm(mk, value, 1.0 / mk.n, lambda i, out: tirx.Select(i < kept, out, tirx.const(0.0, "float32")))


def _norm(mk: Maker, value: Any, share: float, last: Any = lambda i, out: out) -> Any:
    total = mk.reduce("reduce_0", te.sum, lambda i, j: value[i, j])

    def centred(i: Any, j: Any) -> Any:
        return value[i, j] - total[i] * tirx.const(share, "float32")

    squares = mk.reduce("reduce_1", te.sum, lambda i, j: centred(i, j) * centred(i, j))
    g, e = mk.col("g"), mk.col("e")
    scale = tirx.const(share, "float32")
    out = mk.out(
        2,
        lambda i, j: last(
            i,
            centred(i, j) * te.rsqrt(squares[i] * scale + tirx.const(1e-5, "float32")) * g[j].astype("float32")
            + e[j].astype("float32"),
        ),
    )
    stages = [("stage_0", ["reduce_0"], []), (None, ["reduce_1"], []), (None, [], ["stage_2_out0"])]
    return mk.func([out], "gemm_reduce", stages)


def _only_output(mk: Maker, value: Any) -> Any:
    return mk.func([mk.out(0, value)], "gemm_elementwise", [(None, [], ["stage_0_out0"])])


WRONG = {
    "without the norm": lambda: unnormalised(Maker(*SHAPE, "bfloat16", "NK")),
    "without the bias": lambda: without_bias(Maker(*SHAPE, "bfloat16", "NK")),
    "wrong mean": lambda: wrong_mean(Maker(*SHAPE, "bfloat16", "NK")),
    "half of the product": lambda: half_product(Maker(*SHAPE, "bfloat16", "NK")),
    "last row": lambda: last_row_zero(Maker(*SHAPE, "bfloat16", "NK")),
}


class Planted:
    """A builder and a runner of real parts; each candidate but the first is one of the planted faults."""

    parallel = 1
    products: dict[str, float] = {}  # noqa: RUF012
    device_name = "none"

    def __init__(self, what: Task, folder: Path, patch: pytest.MonkeyPatch):
        self.folder, self.patch = folder, patch
        self.kinds: list[tuple[str, str]] = [("good", "")]
        self.kinds += [("static", name) for name in STATIC]
        self.kinds += [("wrong", name) for name in WRONG]
        self.kinds += [("racing", name) for name in RACING]
        self.count = 0
        self.measurer = Measurer(what.func, what.rows, LLVM)
        self.func = what.func

    def submit(self, first: Any, library: str = "", reference: str = "") -> Future[Any]:
        """Of a function: builds it.  Of a task: measures a library."""
        if isinstance(first, Task):
            return done(self._measure(library, reference))
        kind, name = self.kinds[self.count]
        self.count += 1
        return done(self._build(kind, name, first))

    def discard(self, library: str) -> None:
        """The folder is the test's."""

    def prepare(self, what: Task) -> None:
        """Has no process to prepare."""

    def _build(self, kind: str, name: str, scheduled: Any) -> Built:
        path = self.folder / f"{self.count}.so"
        if kind == "static":
            ((given, _),) = cases_for(FAULTS[name].apply, 1)
            with self.patch.context() as patch:
                real = lowering.lower
                patch.setattr(lowering, "lower", lambda func, symbol=None: FAULTS[name].apply(real(func, symbol)))
                return build(given.func, parse_target("h200"), path)
        if kind == "racing":
            return Built(f"racing:{name}")
        return build(self.func if kind == "good" else WRONG[name](), LLVM, path)

    def _measure(self, library: str, reference: str) -> Measured:
        kind, _, name = library.partition(":")
        if kind != "racing":
            measured = self.measurer.measure(library)
            return measured if measured.reason else Measured((100.0,), None, "", "", measured.error, measured.allowed)
        ((given, mutated),) = cases_for(FAULTS[name].apply, 1)
        findings = detect(mutated, H200, given.inputs, given.references, seeds=(0,))
        # with no finding the candidate would be the fastest of all
        if findings:
            return Measured(reason="wrong", failure=str(findings[0]))
        return Measured((1.0,), None, error=0.0, allowed=1.0)


def test_twelve_planted_schedules_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = task("layer_norm", *SHAPE)
    planted = Planted(what, tmp_path, monkeypatch)
    assert len(planted.kinds) == 1 + 12
    found = search(planted, planted, folder=tmp_path, trials=len(planted.kinds))
    found.run([what])
    (progress,) = found.progress
    (record,) = found.store.query(what.workload, found.target)
    assert progress.best is not None
    assert record.plan == progress.best.plan == progress.default
    assert progress.best.error <= progress.best.allowed
    failed = [event for event in Log(tmp_path).events() if event["event"] == "failed"]
    assert len(failed) == 12
    assert dict(progress.failures) == {"verify": len(STATIC), "wrong": len(WRONG) + len(RACING)}
    texts = " | ".join(event["failure"] for event in failed)
    assert texts.count("error of") == len(WRONG)
