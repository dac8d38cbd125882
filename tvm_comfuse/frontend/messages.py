"""Parts of error messages."""

from __future__ import annotations

LONGEST_LINE = 300  # characters; exporters put whole graphs on a line


def first_line(error: BaseException) -> str:
    """The first line with text in the message of ``error``, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:LONGEST_LINE] if lines else "no message"
