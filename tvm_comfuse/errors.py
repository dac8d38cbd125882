"""Exceptions.  Each message says what was needed, what was found, and what to try."""

from __future__ import annotations

import re


class ComfuseError(Exception):
    """Base class of every error this package raises on purpose."""

    def __init__(self, needed: str, found: str, hint: str):
        self.needed, self.found, self.hint = needed, found, hint
        super().__init__(f"needed {needed}; found {found}; try: {hint}")


class VersionError(ComfuseError, ImportError):
    """A dependency has a version this package is known not to work with."""


class ModelError(ComfuseError, ValueError):
    """A model, file or function given by the user cannot be used."""


class TargetError(ComfuseError, ValueError):
    """A target is unknown or not supported."""


class PlanError(ComfuseError, ValueError):
    """A plan given by the user is malformed or not legal for the function it is applied to."""


class BuildError(ComfuseError, RuntimeError):
    """A compiler (nvcc, NVRTC, LLVM) failed or is missing."""


class OutputError(BuildError):
    """A file cannot be written where it was asked for."""


class LoweringError(ComfuseError, RuntimeError):
    """A function reached a lowering pass in a form that the pass does not take."""


class VerifyError(ComfuseError, RuntimeError):
    """A lowered kernel breaks a rule of its protocol or of the device."""

    def __init__(self, needed: str, found: str = "", hint: str = ""):
        # an exception of a Python pass comes back from TVM as its class called with its text
        parts = _TEXT.fullmatch(needed.strip()) if not found else None
        super().__init__(*(parts.groups() if parts else (needed, found, hint)))


_TEXT = re.compile(r"needed (.+?); found (.+); try: (.+)", re.DOTALL)
