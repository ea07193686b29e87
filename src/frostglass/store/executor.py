"""What lets other processes make steps: missing steps, assignments, and who carries them out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Job = Callable[..., Any]  # takes a store, and calls its steps in an order of its own


class Missing(NamedTuple):
    """A step that a job needs and that is not finished."""

    step: str
    key: str
    partial: Path

    @property
    def title(self) -> str:
        return f"{self.step} {self.key[:8]}"


class Pending(BaseException):
    """Steps are missing that others will make; a job that raises this is run again later."""

    def __init__(self, *missing: Missing) -> None:
        self.missing = missing
        super().__init__()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls that do not depend on each other, in order.

    All are called, even if steps of some are missing, so that everything that can be made now is
    known at once.
    """
    results: list[Any] = []
    missing: list[Missing] = []
    for call in calls:
        try:
            results.append(call())
        except Pending as pending:
            missing += pending.missing
    if missing:
        raise Pending(*missing)
    return results


@dataclass(frozen=True)
class Assignment:
    """A step of a job to make, or, `helping`, to make parts of while another process makes it."""

    job: Job
    step: str
    key: str
    helping: bool = False

    @property
    def title(self) -> str:
        return f"{self.step} {self.key[:8]}"


@dataclass(frozen=True)
class Outcome:
    """How an assignment ended.

    `error` is what the step raised. `lost` says how the worker died. `unseen` names a finished step
    that the worker did not find, because a network folder does not show it yet.
    """

    error: Exception | None = None
    lost: str = ""
    unseen: str = ""


class Executor(ABC):
    """Carries out assignments in other processes; all of them use one store."""

    @property
    @abstractmethod
    def free(self) -> int:
        """How many assignments can be begun now."""

    @abstractmethod
    def submit(self, assignment: Assignment) -> None:
        """Begin an assignment; returns at once."""

    @abstractmethod
    def wait(self, seconds: float) -> Sequence[tuple[Assignment, Outcome]]:
        """Return the assignments that ended, after at most so many seconds."""

    @abstractmethod
    def close(self) -> None:
        """End all processes; what they were making stays in the store's checkpoints."""
