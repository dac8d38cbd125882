"""Run NVIDIA's compute-sanitizer over one small kernel of each family.

    python benchmarks/sanitize.py                       memcheck, racecheck and synccheck; needs a Hopper GPU
    python benchmarks/sanitize.py --tools memcheck --families pingpong_grid
    python benchmarks/sanitize.py --output DIR          default: benchmarks/results/<gpu>/sanitizers.json

Every kernel runs in a process of its own with a time limit: under a sanitizer a hang is as likely as without one.  The
process also compares the numbers with float64 and looks at guard bands around all tensors.  --jobs of them run side by
side, as most of the time goes into starting and compiling.  The log is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
#: exit codes: of the sanitizer when it finds something, of this file when the launch was wrong
FOUND, WRONG = 9, 10
#: seconds: sanitized code runs up to a hundred times slower
LIMIT = 300.0
#: how much of the output is kept
TAIL = 2000
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.+)")
#: both ends of a race that racecheck reports, by the function that line information names
_RACE = re.compile(r"Race reported between (\w+) access at ([\w:]+)[^\n]*\n\W*and (\w+) access at ([\w:]+)")
#: a partial of a row value is a relaxed word of (value, tag) in shared memory that its reader polls: racecheck knows no
#: ordering but barriers, and reports it
_MAILBOX = ("comfuse_post_cluster", "comfuse_take_cluster")


def launch_one(name: str, target_name: str) -> int:
    """Compile and launch the kernel of a family in this process; its exit code."""
    from tvm_comfuse.bench.ours import compile_function
    from tvm_comfuse.target import parse_target
    from tvm_comfuse.verify.families import FAMILIES
    from tvm_comfuse.verify.launch import launch

    (family,) = (family for family in FAMILIES if family.name == name)
    target = parse_target(target_name)
    func = family.cluster(target)
    result = launch(func, compile_function(func, target), family.m, 0, target)
    print(json.dumps(result.to_dict()))
    return WRONG if result.failure else 0


def sanitize(name: str, tool: str, target: str, program: str) -> dict[str, Any]:
    """One tool over one family: {"family", "tool", "status", "summary", "seconds", "output"}.

    status: clean, mailbox (nothing but what mailboxes are, see _MAILBOX), found (the tool reports something else), wrong
    (numbers or guard bands), hang, failed (everything else)
    """
    own = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--target", target]
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", *own]
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as cache:
            # line information, which is no part of the key of a cached cubin
            own_cache = {"NVCC_APPEND_FLAGS": "-lineinfo", "XDG_CACHE_HOME": cache}
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
                cwd=ROOT,
                env={**os.environ, **own_cache},
            )
        output = done.stdout + done.stderr
        status = {0: "clean", FOUND: "found", WRONG: "wrong"}.get(done.returncode, "failed")
        if status == "found" and only_mailboxes(output):
            status = "mailbox"
    except subprocess.TimeoutExpired as error:
        output, status = f"{error.stdout or ''}", "hang"
    summary = _SUMMARY.findall(output)
    return {
        "family": name,
        "tool": tool,
        "status": status,
        "summary": summary[-1].strip() if summary else "",
        "seconds": round(time.perf_counter() - start, 1),
        "output": "" if status == "clean" else output[-TAIL:],
    }


def only_mailboxes(output: str) -> bool:
    """Whether every error in a tool's output is a race between a post to a mailbox and the poll for it."""
    races = [{first, second} for _, first, _, second in _RACE.findall(output)]
    mail = all(any(name.startswith(end) for name in race) for race in races for end in _MAILBOX)
    return bool(races) and mail and len(races) == output.count("========= Error:")


def new_log(target: str) -> dict[str, Any]:
    """A log without runs for this machine, now."""
    from tvm_comfuse.bench.report import new_report

    report = new_report(f"compute-sanitizer, one small kernel of each family, target {target}").to_json()
    return {key: value for key, value in report.items() if key != "rows"} | {"sanitizers": []}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if no run finds anything but mailboxes."""
    from tvm_comfuse.verify.families import FAMILIES

    parser = argparse.ArgumentParser(description="compute-sanitizer over one kernel of each family")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--families", nargs="+", choices=[f.name for f in FAMILIES], default=[f.name for f in FAMILIES])
    parser.add_argument("--program", default="compute-sanitizer", help="the sanitizer, if it is not on the PATH")
    parser.add_argument("--jobs", type=int, default=4, help="processes side by side")
    parser.add_argument("--output", type=Path, help="folder of the log")
    options = parser.parse_args(arguments)
    if options.one:
        return launch_one(options.one, options.target)
    if shutil.which(options.program) is None:
        parser.error(f"{options.program} is not here; it comes with the CUDA toolkit (give its path with --program)")
    log = new_log(options.target)
    gpu = log["device"].lower().removeprefix("nvidia ").split()[0]
    path = (options.output or ROOT / "benchmarks" / "results" / gpu) / "sanitizers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = [(name, tool) for name in options.families for tool in options.tools]
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in pool.map(lambda pair: sanitize(*pair, options.target, options.program), pairs):
            print(f"{run['family']:24} {run['tool']:10} {run['status']:7} {run['summary']}", flush=True)
            log["sanitizers"].append(run)
            path.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return 0 if all(run["status"] in ("clean", "mailbox") for run in log["sanitizers"]) else 1


if __name__ == "__main__":
    sys.exit(main())
