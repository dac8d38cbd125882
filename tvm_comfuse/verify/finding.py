"""What a check found wrong with a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One violation of a rule.

    code     stable, machine-readable, lower-case with dashes, e.g. ``"register-budget"``
    where    the instruction, barrier or role, as a person would call it
    text     the rule and the arithmetic that breaks it
    numbers  the quantities of the arithmetic, plain JSON values
    """

    code: str
    where: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.code} at {self.where}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values."""
        return {"code": self.code, "where": self.where, "text": self.text, "numbers": dict(self.numbers)}
