"""One request to a child process, with limits; what goes wrong is a result."""

from __future__ import annotations

from typing import Any

from tvm_comfuse.worker import Worker


def ask(
    worker: Worker, request: dict[str, Any], doing: str, limit: float, start: float
) -> tuple[dict[str, Any] | None, str]:
    """The child's answer, or None and what went wrong in words; then the child is ended and the next call starts one.

    doing         what the child is asked to do, for the message
    limit, start  seconds for the answer and for the start of a child
    """
    step, allowed = "start", start
    try:
        if not worker.running:
            worker.start()
            worker.answer(allowed)
        step, allowed = doing, limit
        worker.request(request)
        return worker.answer(allowed), ""
    except TimeoutError:
        failure = f"did not {step} within {allowed:g} s: it hangs"
    except (ChildProcessError, OSError) as error:
        failure = f"the process that should {step} ended: {error}"
    worker.end()
    return None, failure
