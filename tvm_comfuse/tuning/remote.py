"""Measurements on other machines, by TVM's own tracker and servers.

A machine serves with ``python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY``; it needs this package installed,
which TVM loads, and nothing else.  There a function of this module keeps the measuring process, with its limits.  Here
this module is that process's stand-in:  python -m tvm_comfuse.tuning.remote HOST PORT KEY
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import tvm_ffi

from tvm_comfuse.tuning.child import ask
from tvm_comfuse.worker import Worker, serve

#: the function's name in TVM's registry
FUNCTION = "comfuse.tuning.measure"
#: seconds after which a server lets go of a client that is still there; then this process ends, and the next one gets another
LEASE_S = 3600
#: of a server's process for one client
_workers: list[Worker] = []


def register() -> None:
    """Makes a TVM RPC server of this process able to measure; may be called any number of times."""
    tvm_ffi.register_global_func(FUNCTION, measure, override=True)


def measure(request: str) -> str:
    """On the server: passes a request on to its measuring process, and the answer back, both as JSON.

    The request has the process's own and "doing", "limit", "start" as for `child.ask`.  The answer is the process's, or
    {"failed": what went wrong}.  {"connect"} is answered by {"server": a name for people}.
    """
    from tvm_comfuse.tuning.runner import CHILD

    values = json.loads(request)
    if "connect" in values:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return json.dumps({"server": socket.gethostname() + (f" GPU {gpus}" if gpus else "")})
    doing, limit, start = (values.pop(name) for name in ("doing", "limit", "start"))
    if not _workers:
        _workers.append(Worker(CHILD))
    if values.get("end"):
        _workers[0].end()
        return json.dumps({"ended": True})
    message, failure = ask(_workers[0], values, doing, limit, start)
    return json.dumps(message if message is not None else {"failed": failure})


class Server:
    """On the client: one server, got from the tracker when it is first needed."""

    def __init__(self, host: str, port: int, key: str):
        self._address, self._key = (host, port), key
        self._remote: Any = None
        self._sent: dict[str, str] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The server's answer; libraries named in the request are sent along.  Raises what TVM raises."""
        if self._remote is None:
            from tvm import rpc

            tracker = rpc.connect_tracker(*self._address)
            self._remote = tracker.request(self._key, 1, LEASE_S)
        sent = {name: self._send(request[name]) for name in ("library", "reference") if request.get(name)}
        text = self._remote.get_function(FUNCTION)(json.dumps({**request, **sent}))
        return dict(json.loads(text))

    def _send(self, path: str) -> str:
        """Where a library lies on the server; sent once, because one that is loaded must not be written again."""
        if path not in self._sent:
            name = Path(path).name
            self._remote.upload(path, name)
            self._sent[path] = str(self._remote.get_function("tvm.rpc.server.workpath")(name))
        return self._sent[path]


def main() -> int:
    """Serve until standard input ends; the exit status."""
    host, port, key = sys.argv[1:4]
    server = Server(host, int(port), key)
    for request, answers in serve():
        answers.send(server.answer(request))
    return 0


if __name__ == "__main__":
    sys.exit(main())
