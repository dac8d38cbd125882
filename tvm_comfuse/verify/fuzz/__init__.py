"""Fuzzing: random clusters and random legal plans through everything that needs no GPU.

python -m tvm_comfuse.verify.fuzz --examples 2000          a campaign; ``make fuzz``
models.py, plans.py   what an example is: steps of a Relax module, shape and plan
strategies.py         draws examples (needs hypothesis; nothing else here does)
case.py               one example from the Relax module to the interpreter, its numbers against float64
replay.py             a failure as a Python file that anybody can run
campaign.py           many examples; each failure shrunk and saved
"""

from __future__ import annotations

from tvm_comfuse.verify.fuzz.case import Case, FuzzError, Outcome, run_case
from tvm_comfuse.verify.fuzz.replay import replay, script_of

__all__ = ["Case", "FuzzError", "Outcome", "replay", "run_case", "script_of"]
