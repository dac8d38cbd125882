"""A process that launches a kernel a few times, for Nsight Compute:  python -m tvm_comfuse.profile.child REQUEST.json

REQUEST.json: {"func": JSON of a scheduled function, "rows": M, "target": JSON of TVM's target}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: launches, so that one behind a few others can be looked at
LAUNCHES = 6


def main(request: str) -> int:
    """Launches the kernel; the exit status."""
    import torch
    import tvm

    from tvm_comfuse.bench.ours import compile_function
    from tvm_comfuse.profile.subject import Subject
    from tvm_comfuse.target import parse_target

    values = json.loads(Path(request).read_text(encoding="utf-8"))
    subject = Subject("main", tvm.ir.load_json(values["func"]), values["rows"])
    kernel = compile_function(subject.func, parse_target(values["target"]))
    (inputs,), outputs = subject.inputs(0), subject.outputs()
    for _ in range(LAUNCHES):
        kernel(*inputs, *outputs)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
