"""The processes that build and measure: what hangs, dies or faults is a result, and the next one is served."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import tvm
from tuning_examples import TARGET, task

from tvm_comfuse.schedules.apply import schedule
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.target import parse_target
from tvm_comfuse.tuning.build import build
from tvm_comfuse.tuning.builder import Builder
from tvm_comfuse.tuning.measure import answer
from tvm_comfuse.tuning.measurer import LOAD_S, TRIES, Measurer
from tvm_comfuse.tuning.runner import Runner
from tvm_comfuse.worker import Limits, Worker

#: a child that does what the text behind its name says, by the last number in the library's name
CHILD = """
import json, sys, time, os
print(json.dumps({"event": "ready"}), flush=True)
behaviour = sys.argv[1].split(",")
for count, line in enumerate(sys.stdin):
    request = json.loads(line)
    if "library" not in request:
        print(json.dumps({"product_us": 5.0, "device": "stub"}), flush=True)
        continue
    number = int("".join(c for c in os.path.basename(request["library"]) if c.isdigit()))
    what = behaviour[number]
    if what == "hang":
        time.sleep(60)
    if what == "die":
        sys.exit(3)
    good = {"us": [1.0 + number], "reference_us": None, "error": 1e-3, "allowed": 2e-3}
    bad = {"reason": what, "failure": what, "us": []}
    measured = good if what == "good" else bad
    print(json.dumps({"built": {"library": request["library"]}, "measured": measured, "pid": os.getpid()}), flush=True)
"""
LIMITS = Limits(start=20.0, build=0.7, launch=0.7)
SMALL = ("layer_norm", 64, 64, 64)


def child(*behaviour: str) -> Sequence[str]:
    return [sys.executable, "-c", CHILD, ",".join(behaviour)]


def test_builds_that_hang_or_die_are_results() -> None:
    what = task(*SMALL)
    func = schedule(what.func, H200)
    with Builder(TARGET, 2, LIMITS, child("good", "hang", "die", "good", "good")) as builder:
        built = [future.result() for future in [builder.submit(func) for _ in range(5)]]
    assert [result.reason for result in built] == ["", "hang", "died", "", ""]
    assert "did not compile within 0.7 s" in built[1].failure
    assert "status 3" in built[2].failure
    assert [Path(result.library).name for result in built if result.library] == [
        "candidate0.so",
        "candidate3.so",
        "candidate4.so",
    ]


def test_measurements_that_hang_die_or_fault_are_results() -> None:
    what = task(*SMALL)
    behaviour = ("good", "hang", "die", "fault", "wrong", "good")
    with Runner(TARGET, LIMITS, [child(*behaviour)]) as runner:
        runner.prepare(what)
        results = [runner.submit(what, f"k{number}.so").result() for number in range(6)]
    assert [result.reason for result in results] == ["", "hang", "died", "fault", "wrong", ""]
    assert results[0].us == (1.0,)
    assert results[5].us == (6.0,)
    assert "it hangs" in results[1].failure
    assert runner.products == {what.key: 5.0}


def test_work_goes_to_another_server_when_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for servers: the first one's tracker has no server any more."""
    monkeypatch.setattr("tvm_comfuse.tuning.runner._CONNECT_S", 0.7)
    stand_in = CHILD.replace(
        '    if "library" not in request:',
        """    if "connect" in request:
        time.sleep(60 * (behaviour[-1] == "gone"))
        print(json.dumps({"server": behaviour[-1]}), flush=True)
        continue
    if "library" not in request:""",
    )
    commands = [[sys.executable, "-c", stand_in, f"good,good,good,good,{name}"] for name in ("gone", "there")]
    what = task(*SMALL)
    with Runner(TARGET, LIMITS, commands, remote=True) as runner:
        runner.prepare(what)
        results = [future.result() for future in [runner.submit(what, f"k{number}.so") for number in range(4)]]
    assert [result.server for result in results] == ["there"] * 4
    assert all(result.us for result in results)
    with Runner(TARGET, LIMITS, commands[:1], remote=True) as runner:
        alone = runner.submit(what, "k0.so").result()
    assert "did not find a free server within 0.7 s" in alone.failure


def test_children_leave_interrupts_to_their_parent() -> None:
    """A terminal sends Ctrl-C to all processes of a command."""
    code = (
        "import os\nfrom tvm_comfuse.worker import serve\nfor _, answers in serve(): answers.send({'pid': os.getpid()})"
    )
    with Worker([sys.executable, "-c", code]) as worker:
        worker.start()
        worker.answer(20.0)
        worker.request({})
        pid = worker.answer(20.0)["pid"]
        os.kill(pid, signal.SIGINT)
        worker.request({})
        assert worker.answer(20.0)["pid"] == pid


def test_leaving_ends_what_is_under_way() -> None:
    what = task(*SMALL)
    func = schedule(what.func, H200)
    slow = Limits(start=20.0, build=60.0, launch=60.0)
    with Builder(TARGET, 1, slow, child("hang", "hang")) as builder, Runner(TARGET, slow, [child("hang")]) as runner:
        futures = [builder.submit(func), builder.submit(func), runner.submit(what, "k0.so")]
    assert all(future.done() for future in futures)


def test_a_library_for_a_gpu_is_built_without_one(tmp_path: Path) -> None:
    """Lowered, checked, compiled and reported on; the cubin is what a measurement would load."""
    func = schedule(task("rms_residual", 256, 128, 128).func, H200)
    built = build(func, TARGET, tmp_path / "k.so")
    assert built.reason == ""
    assert Path(built.library).is_file()
    assert built.registers is not None
    assert 0 < built.registers <= 168
    assert built.spills == 0


def test_the_cpu_goes_the_same_way(tmp_path: Path) -> None:
    what, target = task("layer_norm", 48, 64, 64), parse_target("llvm")
    built = build(what.func, target, tmp_path / "k.so")
    assert built.reason == ""
    measurer = Measurer(what.func, 48, target)
    # two loads of one library are one kernel: the reference may be the kernel itself
    results = [measurer.measure(built.library, built.library) for _ in range(4)]
    assert all(result.reason == "" and result.us and result.reference_us for result in results)
    assert len({result.reference_us for result in results}) > 1
    assert measurer.measure(built.library).reference_us is None
    assert all(result.error is not None and 0 < result.error <= (result.allowed or 0) for result in results)
    assert measurer.product_us() is None
    assert measurer.measure(str(tmp_path / "none.so")).reason == "load"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # steady at once; then a clock that falls between the two looks at the reference; then one that never rests
        ([100.0, 90.0, 101.0], (90.0, 100.5)),
        ([100.0, 99.0, 112.0, 112.0, 101.0, 112.0], (101.0, 112.0)),
        ([100.0, 99.0, 112.0, 112.0, 101.0, 118.0, 118.0, 90.0, 100.0], (101.0, 115.0)),
    ],
)
def test_a_candidate_is_timed_between_two_times_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: list[float], expected: tuple[float, float]
) -> None:
    what, target = task("layer_norm", 48, 64, 64), parse_target("llvm")
    library = build(what.func, target, tmp_path / "k.so").library
    measurer = Measurer(what.func, 48, target)
    left = iter(times)
    monkeypatch.setattr(measurer, "_cuda", True)
    loads: list[float] = []

    class Listed:
        load = staticmethod(loads.append)
        times = staticmethod(lambda: (next(left),))

    monkeypatch.setattr(measurer, "_timer", lambda kernel: nullcontext(Listed))
    result = measurer.measure(library, library)
    assert (result.us, result.reference_us) == ((expected[0],), expected[1])
    assert list(left) == []
    assert loads == [LOAD_S]
    assert len(times) <= 3 * TRIES


@pytest.mark.skipif(tvm.cuda(0).exist, reason="there is a GPU to prepare it on")
def test_a_task_that_cannot_be_prepared_is_a_failure() -> None:
    what = task(*SMALL)
    request = {
        "task": "k",
        "func": tvm.ir.save_json(what.func),
        "target": tvm.ir.save_json(TARGET),
        "rows": 64,
        "chain": None,
    }
    assert set(answer(request, {})) == {"failure"}


@pytest.mark.parametrize("parallel", [1, 3])
def test_builders_work_side_by_side(parallel: int) -> None:
    func = schedule(task(*SMALL).func, H200)
    with Builder(TARGET, parallel, LIMITS, child(*["good"] * 6)) as builder:
        assert builder.parallel == parallel
        assert all(future.result().library for future in [builder.submit(func) for _ in range(6)])
