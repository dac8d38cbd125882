"""Suites: named lists of workloads in a JSON file.

    {"protocol": "...",
     "families": {"post_norm": {"layer_norm": "LayerNorm(x + h @ W.T + b) * g + e",
                                "rows": [{"name": "bert", "op": "layer_norm", "M": 16384, "N": 768, "K": 768}]}}}

A family is a suite.  Besides its rows it may say in words what its operators compute; `tvm_comfuse.bench.ops` has what
they really compute.  A row may have a ``dtype`` (bfloat16 unless said).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_comfuse.bench.ops import DTYPES, OPS
from tvm_comfuse.errors import ComfuseError

#: the suites that come with the package
BUILTIN = Path(__file__).with_name("suites.json")
#: names people write for the dtypes
DTYPE_ALIASES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32"}
ROW_FIELDS = ("name", "op", "M", "N", "K", "dtype")


class SuiteError(ComfuseError, ValueError):
    """A suite file cannot be used, or names a suite or a row that is not there."""


@dataclass(frozen=True)
class Row:
    """One workload: x [M, K] times w [N, K] and what `op` does with the product."""

    suite: str
    name: str
    op: str
    M: int
    N: int
    K: int
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """The name that is unique over all suites."""
        return f"{self.suite}/{self.name}"


def load(path: str | Path | None = None) -> dict[str, list[Row]]:
    """The suites of a file, or of the package if `path` is None: suite name to its rows.

    Raises SuiteError that names the file and the place for anything that is not of the form above.
    """
    file = Path(path) if path is not None else BUILTIN
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(f"a suite file at {file}", str(error.strerror or error), "check the path") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"JSON in {file}", str(error), "correct the file at that place") from error
    return parse(content, str(file))


def parse(content: Any, source: str = "suite") -> dict[str, list[Row]]:
    """The suites of a decoded JSON value.  `source` names it in errors.  Raises SuiteError."""
    families = _object(content, source, "families").get("families")
    _known(content, ("protocol", "families"), source)
    suites: dict[str, list[Row]] = {}
    for suite, family in _object(families, f"{source}: families").items():
        place = f"{source}: {suite}"
        rows = _object(family, place, "rows")["rows"]
        _known(family, ("rows", *OPS), place)
        if not isinstance(rows, list) or not rows:
            raise SuiteError(f"a list of rows in {place}", repr(rows)[:80], "add at least one row")
        suites[suite] = [_row(suite, row, f"{place}: row {index}") for index, row in enumerate(rows)]
        names = [row.name for row in suites[suite]]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SuiteError(f"row names that differ in {place}", f"{', '.join(twice)} twice", "rename one")
    if not suites:
        raise SuiteError(f"at least one family in {source}", "none", "see tvm_comfuse/bench/suites.json")
    return suites


def select(suites: dict[str, list[Row]], suite: str | None = None, rows: Iterable[str] | None = None) -> list[Row]:
    """The rows of one suite (of all if None), only those named in `rows` if given.

    Raises SuiteError for a suite or a row that is not there.
    """
    if suite is not None and suite not in suites:
        raise SuiteError(f"a suite out of {', '.join(suites)}", repr(suite), "name one of them, or leave it out")
    chosen = [row for name, members in suites.items() if suite in (None, name) for row in members]
    if rows is None:
        return chosen
    wanted = list(rows)
    known = {row.name for row in chosen} | {row.label for row in chosen}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise SuiteError(
            f"rows out of {', '.join(row.name for row in chosen)}", ", ".join(missing), "correct the names"
        )
    return [row for row in chosen if row.name in wanted or row.label in wanted]


def _row(suite: str, row: Any, place: str) -> Row:
    values = dict(_object(row, place, *ROW_FIELDS[:5]))
    _known(values, ROW_FIELDS, place)
    if not isinstance(values["name"], str) or not values["name"]:
        raise SuiteError(f"a name in {place}", repr(values["name"]), "give the row a name")
    place = f"{place} ({values['name']})"
    if values["op"] not in tuple(OPS):  # a tuple: what JSON has here may be unhashable
        raise SuiteError(f"op out of {', '.join(OPS)} in {place}", repr(values["op"]), "use one of them")
    for extent in ("M", "N", "K"):
        if not isinstance(values[extent], int) or isinstance(values[extent], bool) or values[extent] < 1:
            raise SuiteError(f"a positive whole number for {extent} in {place}", repr(values[extent]), "correct it")
    given = values.get("dtype", "bfloat16")
    dtype = DTYPE_ALIASES.get(given, given) if isinstance(given, str) else given
    if dtype not in DTYPES:
        raise SuiteError(f"dtype out of {', '.join(DTYPES)} in {place}", repr(given), "use one of them")
    return Row(suite, values["name"], values["op"], values["M"], values["N"], values["K"], dtype)


def _object(value: Any, place: str, *required: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SuiteError(f"a JSON object in {place}", type(value).__name__, "see tvm_comfuse/bench/suites.json")
    missing = [name for name in required if name not in value]
    if missing:
        raise SuiteError(f"the field {', '.join(missing)} in {place}", f"only {', '.join(value)}", "add it")
    return value


def _known(value: dict[str, Any], known: Iterable[str], place: str) -> None:
    names = tuple(known)
    unknown = [name for name in value if name not in names]
    if unknown:
        raise SuiteError(f"fields out of {', '.join(names)} in {place}", ", ".join(unknown), "remove or rename them")
