"""Parts of error messages."""

from __future__ import annotations

import re

LONGEST_LINE = 300  # characters; exporters put whole graphs on a line

# lines of TVM and Python that say nothing to who reads one line only
_SAYS_NOTHING = re.compile(
    r"#|File \"|Traceback|During handling|The above exception|An error occurred during|"
    r"Check failed: \(.*\) is false:?$|InternalError:?$|\W*$"
)
# the object that TVM prints in front of the sentence: ir.Op(span=None, ..., support_level=10)
_PRINTED_OPERATOR = re.compile(r"ir\.Op\([^\"]*name=\"([\w.]+)\".*support_level=\d+\)")
_CONDITION = re.compile(r"^Check failed: \(.*?\) is false: (?=\S)")


def first_line(error: BaseException) -> str:
    """The first line with text in the message of ``error``, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:LONGEST_LINE] if lines else "no message"


def telling_line(error: BaseException, *, last: bool = False) -> str:
    """The first line (or the last one) of the message of ``error`` that says something, cut to a readable length.

    Comments, locations, bare conditions and printed objects are left out; if nothing else is there the first line is
    given after all.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not _SAYS_NOTHING.match(line)]
    if not telling:
        return first_line(error)
    line = telling[-1 if last else 0]
    return _CONDITION.sub("", _PRINTED_OPERATOR.sub(r"\1", line))[:LONGEST_LINE]
