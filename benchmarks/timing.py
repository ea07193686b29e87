"""Times two implementations of the same work alternately."""

import statistics
import time
from collections.abc import Callable


def ratio(
    ours: Callable[[], None], baseline: Callable[[], None], rounds: int = 9
) -> tuple[float, float, float]:
    """Return the median of ours / baseline, and the median seconds of each, after a warm-up round.

    Both run in every round, in alternating order.
    """
    seconds: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        if number % 2:
            seconds.append((_seconds(ours), _seconds(baseline)))
        else:
            second = _seconds(baseline)
            seconds.append((_seconds(ours), second))
    mine, theirs = zip(*seconds[1:], strict=True)
    ratios = [a / b for a, b in seconds[1:]]
    return statistics.median(ratios), statistics.median(mine), statistics.median(theirs)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
