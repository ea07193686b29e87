"""Progress on stderr: bars on a terminal, otherwise a plain line per step and every 30 s."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from frostglass.store.step import Event

SECONDS = 30  # between two plain lines of one step


def progress() -> "Bars | Lines":
    """Return a store listener that suits stderr."""
    return Bars() if sys.stderr.isatty() else Lines(sys.stderr)


class Lines:
    """Prints one line when a step starts, every 30 seconds, and when it is done."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream, clock
        self._started: dict[str, float] = {}
        self._printed: dict[str, float] = {}

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        now = self._clock()
        started = self._started.setdefault(event.key, now)
        printed = self._printed.setdefault(event.key, now)
        if event.kind == "cached" or (event.kind == "progress" and now - printed < SECONDS):
            return
        self._printed[event.key] = now
        words = {"start": "started", "resume": "resumed", "progress": f"{event.done}/{event.total}"}
        text = f"{event.step} {event.key[:8]}: {words.get(event.kind, event.kind)}"
        if event.kind in ("progress", "done"):
            text += f" after {now - started:.0f} s"
        note = f" ({event.note})" if event.note else ""
        print(text + note, file=self._stream, flush=True)


class Bars:
    """Draws one bar per running step."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=Console(file=sys.stderr),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        if event.kind == "cached":
            return
        if event.key not in self._tasks:
            self._tasks[event.key] = self._bars.add_task(event.step, total=None, note="")
        task = self._tasks[event.key]
        if event.kind == "progress":
            self._bars.update(task, completed=event.done, total=event.total, note=event.note)
        elif event.kind == "done":
            total = self._bars.tasks[self._bars.task_ids.index(task)].total or 1
            self._bars.update(task, completed=total, total=total, note="")
        else:
            self._bars.update(task, note=event.note or event.kind)
