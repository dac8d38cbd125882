"""A failure as a Python file."""

from __future__ import annotations

import re
import sys

import tvm

from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.verify.fuzz.case import Case, FuzzError, run_case

#: exit code of a replay that fails
FAILS = 1

_SCRIPT = '''"""{title}

{module_text}
"""

from tvm_comfuse.verify.fuzz import replay

MODULE = r\'\'\'{module}\'\'\'
PLAN = {plan!r}

if __name__ == "__main__":
    replay(MODULE, PLAN, symbol={symbol}, seed={seed}, slow={slow!r}, launches={launches})
'''


def script_of(failure: FuzzError) -> str:
    """A script that replays a failure: the Relax module and the plan as JSON, the module also to be read."""
    case = failure.case
    text = case.module.script().replace("\\", "\\\\").replace('"""', "'''")
    return _SCRIPT.format(
        title=_one_line(f"{failure.kind}: {failure.text}"),
        module_text=text.strip(),
        module=tvm.ir.save_json(case.module),
        plan=case.plan.to_json() if case.plan is not None else None,
        symbol=case.symbol,
        seed=case.seed,
        slow=case.slow,
        launches=case.launches,
    )


def replay(
    module: str, plan: str | None, *, symbol: int = 1, seed: int = 0, slow: str | None = None, launches: int = 1
) -> None:
    """Runs a saved example, writes what it does to standard output, and ends the process with 1 if it fails.

    module  JSON of the Relax module; plan: JSON; the others as in Case
    """
    case = Case(
        tvm.ir.load_json(module), symbol, seed, slow, launches, Plan.from_json(plan) if plan is not None else None
    )
    try:
        outcome = run_case(case)
    except FuzzError as failure:
        sys.stdout.write(f"fails: {failure.kind}: {failure.text}\n")
        raise SystemExit(FAILS) from failure
    sys.stdout.write(f"passes{f' (rejected: {outcome.rejected})' if outcome.rejected else ''}\n")


def file_name(failure: FuzzError) -> str:
    """One file for each kind of failure."""
    return re.sub(r"[^a-z0-9]+", "_", failure.kind.lower()).strip("_") + ".py"


def _one_line(text: str) -> str:
    most = 400
    line = " ".join(text.split()).replace("\\", "/").replace('"', "'")
    return line if len(line) <= most else line[:most] + " ..."
