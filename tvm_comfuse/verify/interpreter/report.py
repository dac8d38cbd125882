"""Collects what goes wrong during a run, each thing once."""

from __future__ import annotations

from typing import Any

from tvm_comfuse.verify.finding import Finding

#: a run stops after this many different findings: what follows are consequences
MOST_FINDINGS = 40


class HaltError(Exception):
    """The run cannot go on: the finding that says why is already reported."""


class Report:
    """Findings of one run."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._seen: set[tuple[str, str]] = set()

    def add(self, code: str, where: str, text: str, **numbers: Any) -> None:
        """Reports a finding; the same code at the same place counts once.  Raises HaltError after MOST_FINDINGS."""
        if (code, where) in self._seen:
            return
        self._seen.add((code, where))
        self.findings.append(Finding(code, where, text, numbers))
        if len(self.findings) >= MOST_FINDINGS:
            raise HaltError(code)

    def fatal(self, code: str, where: str, text: str, **numbers: Any) -> None:
        """Reports a finding that ends the run."""
        self.add(code, where, text, **numbers)
        raise HaltError(code)
