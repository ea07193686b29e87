"""Two ways of doing the same work, timed in turns."""

import statistics
import time
from collections.abc import Callable


def ratio(
    ours: Callable[[], None], floor: Callable[[], None], rounds: int = 9
) -> tuple[float, float, float]:
    """Median of ours / floor over rounds in which both run, and the median seconds of each; one round to warm up."""
    ratios, mine, theirs = [], [], []
    for number in range(rounds + 1):
        seconds = []
        for work in (ours, floor) if number % 2 else (floor, ours):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        a, b = seconds if number % 2 else reversed(seconds)
        if number:
            ratios.append(a / b)
            mine.append(a)
            theirs.append(b)
    return statistics.median(ratios), statistics.median(mine), statistics.median(theirs)
