"""Measurements through TVM's own tracker and servers, on this machine."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm_ffi
from tuning_examples import task

from tvm_comfuse.errors import TargetError
from tvm_comfuse.target import parse_target
from tvm_comfuse.tuning import tracker as tracker_module
from tvm_comfuse.tuning.api import tune
from tvm_comfuse.tuning.build import build
from tvm_comfuse.tuning.remote import FUNCTION, measure
from tvm_comfuse.tuning.runner import Runner
from tvm_comfuse.tuning.tracker import keys, stand_in
from tvm_comfuse.worker import Limits

LLVM = parse_target("llvm")


@pytest.mark.skipif(importlib.util.find_spec("tornado") is None, reason="TVM's tracker needs tornado")
def test_servers_of_a_tracker_measure(tmp_path: Path) -> None:
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    what = task("layer_norm", 48, 64, 64)
    built = build(what.func, LLVM, tmp_path / "k.so")
    tracker = Tracker(host="127.0.0.1", port=9000, port_end=9999)
    server = Server(host="127.0.0.1", port=9000, port_end=9999, key="cpu", tracker_addr=("127.0.0.1", tracker.port))
    command = [sys.executable, "-m", "tvm_comfuse.tuning.remote", "127.0.0.1", str(tracker.port), "cpu"]
    try:
        with Runner(LLVM, Limits(launch=30.0), [command], remote=True) as runner:
            first = runner.submit(what, built.library).result()
            # what is no library is refused there, and the next one is measured
            (tmp_path / "none.so").write_text("no library")
            bad = runner.submit(what, str(tmp_path / "none.so")).result()
            second = runner.submit(what, built.library, built.library).result()
    finally:
        server.terminate()
        tracker.terminate()
    assert [first.reason, bad.reason, second.reason] == ["", "load", ""], (bad.failure, second.failure)
    assert first.us
    assert second.reference_us
    assert runner.device_name == str(LLVM.attrs["mcpu"])


@pytest.mark.skipif(importlib.util.find_spec("tornado") is None, reason="TVM's tracker needs tornado")
def test_no_server_with_the_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    monkeypatch.setattr(tracker_module, "_SERVER_S", 0.0)
    tracker = Tracker(host="127.0.0.1", port=9000, port_end=9999)
    address = ("127.0.0.1", tracker.port)
    servers = []
    try:
        with pytest.raises(TargetError, match=r"key 'h200' at the tracker .*; found no server at all"):
            tune("model.py:build", "llvm", tracker=address, key="h200")
        servers += [
            Server(host="127.0.0.1", port=9000, port_end=9999, key=key, tracker_addr=address) for key in ("cpu", "a:b")
        ]
        # a server is known some time after it was started
        monkeypatch.setattr(tracker_module, "_SERVER_S", 60.0)
        for key in ("cpu", "a:b"):
            assert stand_in(address, key)[-3:] == ("127.0.0.1", str(tracker.port), key)
        monkeypatch.setattr(tracker_module, "_SERVER_S", 0.0)
        with pytest.raises(TargetError, match=r"found servers with the key 'a:b' or 'cpu'; try: .* --key h200"):
            tune("model.py:build", "llvm", tracker=address, key="h200")
    finally:
        for server in servers:
            server.terminate()
        tracker.terminate()


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request", b"", None])
def test_what_is_no_tracker_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> None:
    """It answers something else, hangs up, or says nothing."""
    monkeypatch.setattr(tracker_module, "_TRACKER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4)
                if answer is None:
                    connection.recv(1)  # until the other side gives up
                else:
                    connection.sendall(answer)

        pool.submit(serve)
        with pytest.raises(TargetError, match="an RPC tracker"):
            keys(listening.getsockname())


def test_no_tracker_is_an_error(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(64, 64).to(torch.bfloat16), "
        "(torch.zeros(8, 64, dtype=torch.bfloat16),)\n"
    )
    with pytest.raises(TargetError, match="an RPC tracker"):
        tune(f"{model}:build", "h200", tracker=("127.0.0.1", 1), key="none")


def test_a_server_survives_what_its_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is an answer with the reason; the next request gets a new process, and so does one after an end."""
    child = 'import sys, time\nprint(\'{"event": "ready"}\', flush=True)\nfor line in sys.stdin:\n'
    child += (
        "    time.sleep(60 * ('hang' in line))\n    print('{\"pid\": %d}' % __import__('os').getpid(), flush=True)\n"
    )
    monkeypatch.setattr("tvm_comfuse.tuning.runner.CHILD", [sys.executable, "-c", child])
    monkeypatch.setattr("tvm_comfuse.tuning.remote._workers", workers := [])
    limits = {"doing": "answer", "limit": 0.5, "start": 20.0}
    try:
        first, again = (json.loads(measure(json.dumps({"task": "good", **limits}))) for _ in range(2))
        hung = json.loads(measure(json.dumps({"task": "hang", **limits})))
        other = json.loads(measure(json.dumps({"task": "good", **limits})))
        assert json.loads(measure(json.dumps({"end": True, **limits}))) == {"ended": True}
        last = json.loads(measure(json.dumps({"task": "good", **limits})))
    finally:
        for worker in workers:
            worker.close()
    assert first == again
    assert "did not answer within 0.5 s" in hung["failed"]
    assert len({first["pid"], other["pid"], last["pid"]}) == 3


def test_every_process_that_loads_tvm_can_serve() -> None:
    assert tvm_ffi.get_global_func(FUNCTION) is not None
