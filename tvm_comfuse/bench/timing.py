"""How long one call takes on a GPU.

The protocol, for every contender alike and in one process:

* A CUDA graph of at least 8 calls, so that launch gaps of Python wrappers are not counted (without graphs the same
  kernel was seen to swing between 80 and 145 us).
* The calls go round over input sets which together exceed 3x the L2 cache, so that no input is found in the cache that
  would not be there in a model.  The weight and the [N] vectors are the same in all sets, as in a model.
* Outputs are the allocator's business: in the graph's pool an output is free again once nobody holds it, so each call
  of PyTorch's contenders writes where the one before wrote.  Ours gets one preallocated output: the same.
* 3 replays to warm up, then 12 replays, each timed by a pair of events; the median, divided by the calls of the graph.
* Contenders take turns at that, three rounds of them, and the median of the rounds counts.  From K = 2048 on the board is at
  its power limit: within a minute everything, cuBLAS as well, takes 10 to 15 % longer, so whoever came first would win.  A turn
  is whole replays: a contender of several kernels never finds its neighbour's data in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvm_comfuse.bench.ops import SHAPES, OpDef

#: one turn
TURN = (
    "CUDA graph of at least 8 calls over input sets that together exceed 3x the L2, replayed; median of 12 replays; the "
    "weight and the [N] vectors are the same in all sets"
)
PROTOCOL = (
    f"{TURN}; in one process all contenders take turns, and the median of three rounds counts; weights scaled by K**-0.5, "
    "other tensors N(0,1); outputs of successive calls share memory"
)
MIN_CALLS = 8
L2_MULTIPLE = 3
WARMUP_REPLAYS = 3
REPLAYS = 12
ROUNDS = 3
#: calls before the capture: compilers, workspaces and allocators must have done what capture forbids
WARMUP_CALLS = 3


def number_of_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Input sets that together exceed L2_MULTIPLE times the L2 cache."""
    return L2_MULTIPLE * l2_bytes // max(1, bytes_per_set) + 1


def make_sets(
    op: OpDef, M: int, N: int, K: int, dtype: str, *, l2_bytes: int, seed: int = 0, device: str = "cuda"
) -> list[list[torch.Tensor]]:
    """Input sets for one measurement; the weight and the [N] vectors are shared."""
    count = number_of_sets(op.bytes_per_call(M, N, K, dtype), l2_bytes)
    first = op.make_inputs(M, N, K, dtype, seed, device)
    sets = [first]
    generator = torch.Generator(device).manual_seed(seed + 1)
    for _ in range(count - 1):
        inputs = []
        for (_, kind), value in zip(op.inputs, first, strict=True):
            rotates = "M" in SHAPES[kind]
            inputs.append(torch.empty_like(value).normal_(generator=generator) if rotates else value)
        sets.append(inputs)
    return sets


def median(values: Sequence[float]) -> float:
    """The upper median, as `sorted(values)[len(values) // 2]`.  Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[len(values) // 2]


@dataclass
class Captured:
    """A CUDA graph of calls over input sets.

    graph  None once it is released
    calls  in the graph
    call   and what it needs, kept as long as the graph
    """

    graph: torch.cuda.CUDAGraph | None
    calls: int
    call: Callable[..., Any]

    def measure(self) -> float:
        """Microseconds a call: the median of REPLAYS replays behind some to warm up."""
        assert self.graph is not None
        for _ in range(WARMUP_REPLAYS):
            self.graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / self.calls)
        return median(times)

    def load(self, seconds: float) -> None:
        """Replays for so long, so that clock and power are those of a board at work."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(REPLAYS):
                self.graph.replay()  # type: ignore[union-attr]
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives the graph's memory back."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


def capture(call: Callable[..., Any], sets: Sequence[Sequence[torch.Tensor]]) -> Captured:
    """A graph of `call(*inputs)` over all sets, on the current CUDA device.

    Whatever the call or the capture raises goes through.
    """
    calls = max(len(sets), MIN_CALLS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(WARMUP_CALLS):
            call(*sets[index % len(sets)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            call(*sets[index % len(sets)])
    return Captured(graph, calls, call)


def time_call(call: Callable[..., Any], sets: Sequence[Sequence[torch.Tensor]]) -> float:
    """Microseconds of `call(*inputs)` in one turn of the protocol above; raises what `capture` raises."""
    captured = capture(call, sets)
    try:
        return captured.measure()
    finally:
        captured.release()


def in_turns(measures: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float] | Exception]:
    """What each measurement gives in each of the rounds, by name; for one that fails, its error instead: it takes no further
    turn."""
    found: dict[str, list[float] | Exception] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            times = found[name]
            if isinstance(times, Exception):
                continue
            try:
                times.append(measure())
            except Exception as error:  # one contender's error must not cost the others their times
                found[name] = error
    return found
