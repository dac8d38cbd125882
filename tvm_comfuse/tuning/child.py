"""One request to a child process, with limits; what goes wrong is a result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tvm_comfuse.worker import Worker

#: seconds between attempts to end children: one may be just about to start
_ATTEMPT = 0.1


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


def stop(pool: ThreadPoolExecutor, futures: Sequence[Future[Any]], workers: Sequence[Worker]) -> None:
    """Ends children and the threads that wait for their answers; work that has not begun is cancelled."""
    pool.shutdown(wait=False, cancel_futures=True)
    with ThreadPoolExecutor(len(workers)) as enders:
        # not futures.wait, for which a cancelled future is never done
        while not all(future.done() for future in futures):
            list(enders.map(Worker.end, workers))
            time.sleep(_ATTEMPT)
        list(enders.map(Worker.close, workers))
    pool.shutdown()
