"""Refusals: why something was not fused, or why a plan is not legal.

A refusal is a value that travels with the result.  It is never raised and never a bare ``None`` or ``False``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One reason.

    code     stable, machine-readable, lower-case with dashes, e.g. ``"k-alignment"``
    clause   the rule that failed, as one sentence that a person understands
    numbers  the quantities that decided, e.g. ``{"K": 100, "multiple": 8}``
    remedy   what would help
    """

    code: str
    clause: str
    numbers: dict[str, Any] = field(default_factory=dict, hash=False)
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.fact}; {self.remedy}" if self.remedy else self.fact

    @property
    def fact(self) -> str:
        """The rule and the numbers, without the remedy."""
        return f"{self.clause} ({self.amounts})" if self.numbers else self.clause

    @property
    def amounts(self) -> str:
        """The numbers alone."""
        return ", ".join(f"{key}={value}" for key, value in self.numbers.items())

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; ``text`` is the whole sentence."""
        return {
            "code": self.code,
            "text": str(self),
            "clause": self.clause,
            "numbers": {key: _plain(value) for key, value in self.numbers.items()},
            "remedy": self.remedy,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
