"""Time GPU operators: replays of a CUDA graph over several input sets, and beside them calls that include the host.

A graph leaves the host out; input sets that together exceed the cache (very small ones, at most 64, may not) make every
call meet cold operands; operators that are compared take turns, so that a drift of the clock hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil, floor
from statistics import median

import torch

LEAST_SETS, MOST_SETS = 3, 64
LEAST_REPLAYS, MOST_REPLAYS = 20, 3000  # in all rounds together
LEAST_LOOPS = 6  # of eager calls, likewise
_CACHE_FACTOR = 4  # the operands of all sets are so many times larger than the cache
_EAGER_SHARE = 1 / 3  # of a replay's time is spent on eager calls

Call = Callable[[], torch.Tensor]
Context = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over rounds of their medians, and two quantiles of all samples."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Measurement:
    """What one operator takes on the GPU alone (``graph``), and with the host (``eager``)."""

    graph: Timing
    eager: Timing


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The value that ``fraction`` of the samples stay below, linear between neighbours."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarize(rounds: Sequence[Sequence[float]]) -> Timing:
    """One timing of the samples of several rounds."""
    pooled = [sample for samples in rounds for sample in samples]
    return Timing(median(map(median, rounds)), quantile(pooled, 0.2), quantile(pooled, 0.8))


def repeats(seconds_each: float, seconds: float, least: int, most: int) -> int:
    """How often an action fits a time, between two bounds."""
    return min(most, max(least, int(seconds / seconds_each)))


def count_sets(smallest: int, total: int, cache: int, memory: int) -> int:
    """How many input sets an operator rotates among: enough to exceed the cache fourfold, from 3 to 64.

    Args:
        smallest: Bytes of one set's operands, of the operator that reads least.
        total: Bytes that one set takes in memory, for all operators.
        cache: Bytes of the last cache.
        memory: Bytes that all sets may take; 3 sets are made in any case.
    """
    wanted = min(MOST_SETS, _CACHE_FACTOR * cache // smallest + 1)
    return max(LEAST_SETS, min(wanted, memory // total))


def capture(calls: Sequence[Call], pool: tuple | None = None) -> torch.cuda.CUDAGraph:
    """One graph of all calls, one after the other; each must have run before, so that nothing compiles in it.

    Args:
        calls: What to capture.
        pool: Memory shared with other graphs; they must not run at the same time, nor their results be read.
    """
    graph = torch.cuda.CUDAGraph()
    # The outer context brings the stream back when a call cannot be captured; torch leaves its own in place.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
        outputs = [call() for call in calls]  # alive together, so that each call writes where no other does
    del outputs
    return graph


def event_times(action: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each of ``count`` runs, one behind the other with no wait between them.

    One more run goes ahead and is not timed: behind it the host has a start on the GPU.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    action()
    for begin, end in events:
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for begin, end in events]


class TurnTimer:
    """Times operators that take turns.

    Args:
        rounds: Turns that each operator gets.
        seconds: GPU time to spend on each operator's replays, about; the smallest number of replays may take longer.
    """

    def __init__(self, rounds: int = 3, seconds: float = 0.3) -> None:
        self._rounds, self._seconds = rounds, seconds
        self._operators: dict[str, _Operator] = {}
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def add(self, name: str, calls: Sequence[Call], context: Context = nullcontext) -> None:
        """Warm an operator up and capture its graph.

        Args:
            name: Its key in the result.
            calls: One call for each input set.
            context: Makes what the calls run inside, entered once around many of them.
        """
        operator = _Operator(calls, context, self._pool)
        operator.plan(self._rounds, self._seconds)
        self._operators[name] = operator

    def run(self, progress: Callable[[], object] = lambda: None) -> dict[str, Measurement]:
        """Measure all operators in turns; ``progress`` is called after each turn."""
        for _ in range(self._rounds):
            for operator in self._operators.values():
                operator.take_turn()
                progress()
        return {name: operator.measurement() for name, operator in self._operators.items()}


class _Operator:
    """One operator of a `TurnTimer`, with its samples: a list for each round, microseconds a call."""

    def __init__(self, calls: Sequence[Call], context: Context, pool: tuple | None) -> None:
        self.calls, self.context = calls, context
        self.graph_rounds: list[list[float]] = []
        self.eager_rounds: list[list[float]] = []
        with context():
            self.call_all()
            self.graph = capture(calls, pool)

    def call_all(self) -> None:
        for call in self.calls:
            call()

    def plan(self, rounds: int, seconds: float) -> None:
        replay, loop = (median(samples) / 1e6 for samples in self._sample(3, 3))
        bounds = ceil(LEAST_REPLAYS / rounds), ceil(MOST_REPLAYS / rounds)
        self.replays = repeats(replay, seconds / rounds, *bounds)
        self.loops = repeats(loop, _EAGER_SHARE * seconds / rounds, ceil(LEAST_LOOPS / rounds), bounds[1])

    def take_turn(self) -> None:
        graph, eager = self._sample(self.replays, self.loops)
        self.graph_rounds.append([sample / len(self.calls) for sample in graph])
        self.eager_rounds.append([sample / len(self.calls) for sample in eager])

    def _sample(self, replays: int, loops: int) -> tuple[list[float], list[float]]:
        graph = event_times(self.graph.replay, replays)
        with self.context():
            return graph, event_times(self.call_all, loops)

    def measurement(self) -> Measurement:
        return Measurement(summarize(self.graph_rounds), summarize(self.eager_rounds))
