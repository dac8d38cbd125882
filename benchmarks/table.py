"""Make the README's table of benchmark results.

    python benchmarks/table.py                 rewrites the part of README.md between the markers
    python benchmarks/table.py --check         only says, by its exit status, whether README.md is up to date
    python benchmarks/table.py --print         prints the table

Reads every report of `comfuse bench` in benchmarks/results/<gpu>/.  A row measured more than once counts with its latest
run.  Losses and refusals are shown like everything else.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from tvm_comfuse.bench.report import BenchReport, RowResult

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
HEAD = (
    "| workload | op | M, N, K | ours | split | best TorchInductor | eager | bare mm | speed-up | error (eager's) |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def read_reports(folder: Path) -> list[BenchReport]:
    """The reports of a folder, oldest first; the folder also has records of other measurements, which are left out.

    Raises ReportError for a report that is not whole.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if BenchReport.is_one(path)]
    return sorted(map(BenchReport.read, paths), key=lambda report: report.date)


def latest_rows(reports: list[BenchReport]) -> list[tuple[BenchReport, RowResult]]:
    """Each workload's latest row with its report, in the order in which workloads first came up."""
    latest: dict[tuple[object, ...], tuple[BenchReport, RowResult]] = {}
    for report in reports:
        for row in report.rows:
            latest[row.suite, row.name, row.dtype, row.M, row.N, row.K] = (report, row)
    return list(latest.values())


def render(reports: list[BenchReport]) -> str:
    """The Markdown of all reports of one device: where they come from, a table a suite, and what the numbers mean."""
    rows = latest_rows(reports)
    lines = []
    for suite in dict.fromkeys(row.suite for _, row in rows):
        members = [row for _, row in rows if row.suite == suite]
        lines += [f"**{suite}**", "", *HEAD, *(_line(row) for row in members), ""]
        lines += [f"{_summary(members)}", ""]
    used = list({id(report): report for report, _ in rows}.values())
    return "\n".join([*lines, *(_source(report) for report in used)]).rstrip() + "\n"


def insert(readme: str, table: str) -> str:
    """The text of a README with what is between the markers replaced.  Raises ValueError if the markers are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"needed the markers {BEGIN} and {END}; found none or one; try: add both to the README")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def _line(row: RowResult) -> str:
    ours = _ours(row)
    inductor = f"{_us(row.inductor_us)} ({row.inductor_setting})" if row.inductor_setting else _us(row.inductor_us)
    error = f"{_error(row.error)} ({_error(row.eager_error)})"
    speedup = f"{row.speedup:.2f}" if row.speedup else "-"
    cells = (
        row.name if row.dtype == "bfloat16" else f"{row.name} ({row.dtype})",
        row.op,
        f"{row.M}, {row.N}, {row.K}",
        ours,
        _us(row.split_us),
        inductor,
        _us(row.eager_us),
        _us(row.mm_us),
        speedup,
        error,
    )
    return f"| {' | '.join(cells)} |"


def _ours(row: RowResult) -> str:
    """The time, or in one word why there is none."""
    if row.refusal:
        return f"refused: {row.refusal['code']}"
    if row.ours_us is not None:
        return _us(row.ours_us)
    # a kernel with a wrong result is not timed
    return "wrong" if row.passed is False and not row.failure else "failed" if row.failure else "-"


def _summary(rows: list[RowResult]) -> str:
    """Geometric mean and count of losses, over the rows with both times."""
    speedups = [row.speedup for row in rows if row.speedup]
    if not speedups:
        return "No row has been measured against another contender."
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    lost = sum(speedup < 1 for speedup in speedups)
    text = f"Geometric mean of the speed-up {mean:.2f} over {len(speedups)} of {len(rows)} rows, {lost} lost."
    return text


def _source(report: BenchReport) -> str:
    versions = report.versions
    shown = [name for name in ("apache-tvm", "torch", "triton", "driver") if name in versions]
    parts = ", ".join(f"{name} {versions[name]}" for name in shown)
    return f"{report.device}, {report.date}, commit {report.commit[:12]}; {parts}."


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if --check finds a difference or there is nothing to show."""
    parser = argparse.ArgumentParser(description="Make the README's table of benchmark results.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "h200")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing, say whether the README is up to date")
    parser.add_argument("--print", action="store_true", dest="show", help="print the table instead")
    options = parser.parse_args(arguments)
    reports = read_reports(options.results)
    if not reports:
        print(f"no reports in {options.results}: make one with `comfuse bench --json`", file=sys.stderr)
        return 1
    table = "Microseconds a call; speed-up over the faster of TorchInductor and eager.\n\n" + render(reports)
    if options.show:
        print(table, end="")
        return 0
    text = options.readme.read_text(encoding="utf-8")
    changed = insert(text, table)
    if options.check:
        return int(changed != text)
    options.readme.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
