"""A search on two GPUs of this machine through TVM's tracker and servers, of which one is killed half-way.

    python benchmarks/two_gpus.py --trials 32 --json benchmarks/results/h200/two_gpus.json

Prints and writes JSON: trials measured by each server, trials lost, and which server was killed after how many trials.
``--target llvm`` tries the way on a machine without GPUs.  Needs `tornado`, as TVM's tracker does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvm_comfuse.bench import suites
from tvm_comfuse.bench.ops import OPS
from tvm_comfuse.bench.report import new_report
from tvm_comfuse.errors import ComfuseError
from tvm_comfuse.tuning.api import tune
from tvm_comfuse.tuning.log import Log
from tvm_comfuse.tuning.search import Search

KEY, HOST = "comfuse", "127.0.0.1"
#: seconds for the tracker and for servers to be there
START_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="post_norm/bert_base_attn")
    parser.add_argument("--suite-file", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--gpus", nargs="+", default=["0", "1"], help="CUDA_VISIBLE_DEVICES of each server")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--kill-after", type=int, help="measured trials; half of all if left out")
    parser.add_argument("--time-budget", type=float, default=180.0, metavar="SECONDS")
    parser.add_argument("--parallel", type=int, help="processes that build")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        text = json.dumps(run(options), indent=1)
    except (ComfuseError, OSError, TimeoutError) as error:
        print(f"two_gpus: {error}", file=sys.stderr)
        return 1
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


@dataclass
class Killer:
    """Kills a server and all its processes once enough was measured; `killed` says after how many trials."""

    server: subprocess.Popen[bytes]
    after: int
    log: Log
    killed: int | None = None

    def look(self, _: Search) -> None:
        """After an event of the search."""
        measured = sum(event["event"] == "measured" for event in self.log.events())
        if self.killed is None and measured >= self.after:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.killed = measured


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The search; what came of it.  Raises ComfuseError, and TimeoutError for a tracker or servers that do not start."""
    (row,) = suites.select(suites.load(options.suite_file), None, [options.row])
    module = OPS[row.op].relax_module(row.M, row.N, row.K, row.dtype)
    with tempfile.TemporaryDirectory(prefix="comfuse-servers-") as folder, _servers(options.gpus) as (port, servers):
        after = options.trials // 2 if options.kill_after is None else options.kill_after
        killer, start = Killer(servers[-1], after, Log(Path(folder))), time.monotonic()
        result = tune(
            module,
            options.target,
            trials=options.trials,
            time_budget=options.time_budget,
            records=folder,
            parallel=options.parallel,
            tracker=(HOST, port),
            key=KEY,
            workers=len(servers),
            on_change=killer.look,
        )
        seconds = time.monotonic() - start
        events = list(killer.log.events())
    (task,) = result.tasks
    measured = Counter(event["server"] for event in events if event["event"] == "measured")
    report = asdict(
        new_report("trials of one search on several servers, one of which was killed; see benchmarks/two_gpus.py")
    )
    return {
        **{name: report[name] for name in ("device", "date", "commit", "versions", "protocol")},
        "row": row.label,
        "target": options.target,
        "measured": dict(measured),
        "killed": {"GPU": options.gpus[-1], "after": killer.killed},
        "lost": task.failures,
        "trials": task.trials,
        "stopped": result.stopped,
        "best_us": task.us,
        "default_us": task.default_us,
        "seconds": round(seconds, 1),
    }


@contextmanager
def _servers(gpus: Sequence[str]) -> Iterator[tuple[int, list[subprocess.Popen[bytes]]]]:
    """A tracker's port and a server for each GPU, in process groups of their own; all are ended afterwards."""
    port = _free_port()
    tracker = ("tvm.exec.rpc_tracker", "--host", HOST, "--port", str(port), "--port-end", str(port + 1))
    started = [_start(tracker, {})]
    try:
        _until(lambda: _listens(port), "the tracker")
        command = ("tvm_comfuse.tuning.server", "--tracker", f"{HOST}:{port}", "--key", KEY, "--host", HOST)
        servers = [_start(command, {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus]
        started += servers
        _until(lambda: _registered(port) == len(gpus), "the servers")
        yield port, servers
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(module: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **variables}
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _until(done: Any, what: str) -> None:
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not start within {START_S:g} s; is tornado installed?")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _registered(port: int) -> int:
    """Servers that the tracker has free."""
    from tvm import rpc

    queues = rpc.connect_tracker(HOST, port).summary()["queue_info"]
    return int(queues.get(KEY, {}).get("free", 0))


if __name__ == "__main__":
    sys.exit(main())
