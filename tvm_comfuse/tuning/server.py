"""A TVM RPC server that can measure:  python -m tvm_comfuse.tuning.server --tracker HOST:PORT --key KEY

The same as ``python -m tvm.exec.rpc_server`` where this package is installed; it also serves from a checkout, whose entry
points TVM does not see.  CUDA_VISIBLE_DEVICES says which GPU it is for.
"""

from __future__ import annotations

import argparse

from tvm import rpc

from tvm_comfuse.tuning.remote import register


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT")
    parser.add_argument("--key", required=True)
    parser.add_argument("--host", default="0.0.0.0", help="where to listen")
    parser.add_argument("--port", type=int, default=9091, help="the first one that is tried")
    options = parser.parse_args()
    host, _, port = options.tracker.rpartition(":")
    server = rpc.Server(
        options.host,
        options.port,
        port_end=options.port + 1000,
        key=options.key,
        tracker_addr=(host, int(port)),
        # every client is served by a fork of the process in which this is called
        server_init_callback=register,
    )
    server.proc.join()


if __name__ == "__main__":
    main()
