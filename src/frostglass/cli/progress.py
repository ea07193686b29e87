"""Progress bars on stderr, one per running step; silent where stderr is not a terminal."""

import sys
from types import TracebackType

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

from frostglass.store.store import Event


class Bars:
    """A store's listener that draws what it hears."""

    def __init__(self) -> None:
        columns = (
            SpinnerColumn(finished_text="✓"), TextColumn("{task.description:<11}"), BarColumn(bar_width=30), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("[dim]{task.fields[note]}"),
        )  # fmt: skip
        self._bars = Progress(
            *columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()
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
