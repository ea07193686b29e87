"""Errors say what was expected, what came and what to do, in one line.

`exit_code` is what the command line returns: 2 for something the user can mend in the call, config or files, 1 for a run that failed.
"""

from collections.abc import Sequence


class FrostglassError(ValueError):
    """Base of every error this package raises on purpose."""

    exit_code = 2


class ConfigError(FrostglassError):
    """A config, parameter or name that cannot be used; `problems` lists every one found."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self.problems))


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
