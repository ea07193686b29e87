"""Errors that say in one line what was expected, what was given and what to do.

The command line returns `exit_code`: 2 if the user can fix the call, config or files, 1 if a run
failed, 3 if its time was over.
"""

from collections.abc import Sequence
from typing import Any


class FrostglassError(ValueError):
    """Base of every error this package raises on purpose."""

    exit_code = 2

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one line each."""
        return (str(self),)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default `__init__` would get the text, and workers send errors of any signature.
        return _without_init, (type(self), self.args), vars(self)


def _without_init(kind: type[FrostglassError], args: tuple[Any, ...]) -> FrostglassError:
    return kind.__new__(kind, *args)


class ConfigError(FrostglassError):
    """A config, parameter or name that cannot be used; `problems` lists every one found."""

    def __init__(self, problems: str | Sequence[str]):
        self._problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self._problems))

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems


class DataError(FrostglassError):
    """Images or identities that cannot make a fair split."""


class ModelError(FrostglassError):
    """A network that cannot be built, wrapped or tapped."""


class CheckpointError(FrostglassError):
    """Weights that do not match the network they are meant for."""


class AccessError(FrostglassError):
    """A use of a target that its view does not grant."""


class StoreError(FrostglassError):
    """A store folder that cannot be used."""


class RunError(FrostglassError):
    """A step that started well and then failed."""

    exit_code = 1


class BudgetReached(FrostglassError):
    """A run that its time budget ended; finished steps and checkpoints are kept."""

    exit_code = 3
