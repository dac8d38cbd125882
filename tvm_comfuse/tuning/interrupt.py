"""SIGINT between the steps of a search: an exception in the midst of one would have to find its way through TVM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noting_interrupts(noted: threading.Event) -> Iterator[None]:
    """Inside, the first SIGINT sets `noted`, and another one is a KeyboardInterrupt.

    In a thread, which signals do not reach, nothing is changed.  May be nested, with the same event.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ending_at_interrupts(code: int) -> Iterator[None]:
    """Inside, SIGINT ends the process at once with an exit code.

    For imports, which leave half a module behind where an exception breaks them off; nothing is to be lost there yet.
    """
    before = signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(code))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
