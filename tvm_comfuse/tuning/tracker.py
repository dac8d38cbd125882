"""What a TVM RPC tracker knows, asked before a search relies on it."""

from __future__ import annotations

import socket
import struct
import sys
import time

from tvm.rpc import base

from tvm_comfuse.errors import TargetError

#: seconds to wait for a tracker
_TRACKER_S = 5.0
#: seconds to wait for a server's entry, which may have been started just before, and between two looks
_SERVER_S, _LOOK_S = 5.0, 0.2
_START = "python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190"


def stand_in(tracker: tuple[str, int], key: str) -> tuple[str, ...]:
    """The command of a process that measures on a server of a tracker.

    Raises TargetError if there is no tracker, or no server with that key, whether free or at work.
    """
    host, port = tracker
    until = time.monotonic() + _SERVER_S
    while key not in (known := keys(tracker)):
        if time.monotonic() >= until:
            found = f"servers with the key {' or '.join(map(repr, sorted(known)))}" if known else "no server at all"
            hint = f"python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key or 'KEY'}, or another --key"
            raise TargetError(f"a server with the key {key!r} at the tracker {host}:{port}", found, hint)
        time.sleep(_LOOK_S)
    return (sys.executable, "-m", "tvm_comfuse.tuning.remote", host, str(port), key)


def keys(tracker: tuple[str, int]) -> set[str]:
    """The keys of a tracker's servers.  Raises TargetError if there is no tracker."""
    host, port = tracker
    try:
        # TVM's own way of connecting tries for a minute, and waits for ever for what is no tracker
        with socket.create_connection(tracker, timeout=_TRACKER_S) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
                raise OSError("something else listens there")
            base.sendjson(connection, [base.TrackerCode.SUMMARY])
            _, summary = base.recvjson(connection)
    except (OSError, OverflowError) as error:
        raise TargetError("an RPC tracker", f"none at {host}:{port} ({error})", f"start one: {_START}") from error
    # a server calls itself "server:KEY"
    return {server["key"].partition(":")[2] for server in summary["server_info"]}
