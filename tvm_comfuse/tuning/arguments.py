"""The arguments of a search, checked before anything heavy is loaded."""

from __future__ import annotations

import os
import re
from numbers import Integral, Real
from typing import Any

from tvm_comfuse.errors import ComfuseError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class TuneError(ComfuseError, ValueError):
    """An argument of a search cannot be used."""


def seconds(value: Any) -> float:
    """Seconds of a number that is not negative, or of a duration such as "90", "90s", "10m" or "1.5h".

    Raises TuneError for anything else.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip())
        if found is not None:
            return float(found[1]) * _SECONDS[found[2]]
    # not "value < 0", which holds for no NaN
    elif isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0.0:
        return float(value)
    raise TuneError("a time budget in seconds or as a duration", repr(value), "90, 90s, 10m or 1.5h")


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`.  Raises TuneError for anything else."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    raise TuneError(
        f"a whole number of {name}, {least} or more", repr(value), f"{name}={max(least, 1)}, or leave it out"
    )


def optional(name: str, value: Any) -> int | None:
    """The same, or None."""
    return None if value is None else whole(name, value)


def check_records(records: Any) -> None:
    """Raises TuneError unless it is a path or None."""
    if records is not None and not isinstance(records, (str, os.PathLike)):
        raise TuneError("the path of a folder for tuning records", type(records).__name__, "give its name")


def check_servers(tracker: Any, key: Any, workers: int | None) -> None:
    """Raises TuneError for a tracker that is no (host, port), and for a key or workers where there is none."""
    if tracker is None:
        if key or workers is not None:
            found = " and ".join(name for name, given in (("key", key), ("workers", workers)) if given)
            hint = "--tracker HOST:PORT (in Python tracker=(host, port)), or leave key and workers out"
            raise TuneError("a tracker, whose servers key and workers are about", f"{found} without one", hint)
        return
    match tracker:
        case (str(), int()) if isinstance(key, str):
            return
    found = f"tracker={tracker!r}, key={key!r}"
    raise TuneError("host and port of a tracker, and a key as text", found, 'tracker=("host", 9190), key="h200"')
