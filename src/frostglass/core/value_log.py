"""Sends values of trainings and audits to TensorBoard, MLflow or Weights & Biases.

None of these is required, and none changes a result: a log only receives numbers.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frostglass.core.errors import ConfigError, RunError

VARIABLE = "FROSTGLASS_LOG"


class ValueLog(ABC):
    """Receives named numbers; `what` is a training or an audit, `step` its epoch."""

    @abstractmethod
    def record(self, what: str, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending."""


class TensorBoardLog(ValueLog):
    """Event files in a folder, by torch's writer, which needs the package tensorboard."""

    def __init__(self, place: str, name: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._writer = SummaryWriter(_folder("tensorboard", place) / name)

    def record(self, what: str, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{what}/{key}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowLog(ValueLog):
    """A run of MLflow in a tracking folder or server."""

    def __init__(self, place: str, name: str) -> None:
        try:
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise _missing("mlflow", error) from error
        self._error = MlflowException
        # A bare folder would be a file store, which newer versions of MLflow refuse.
        uri = place if "://" in place else f"sqlite:///{_folder('mlflow', place) / 'mlflow.db'}"
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name("frostglass")
            key = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment("frostglass")
            )
            self._run = self._client.create_run(key, run_name=name).info.run_id
        except ImportError as error:  # mlflow-skinny imports its database only when it is used
            raise _missing("mlflow", error) from error
        except MlflowException as error:
            raise _unusable("mlflow", place, error) from error

    def record(self, what: str, step: int, values: Mapping[str, float]) -> None:
        with self._answering():
            for key, value in values.items():
                self._client.log_metric(self._run, _plain(f"{what}/{key}"), value, step=step)

    def close(self) -> None:
        with self._answering():
            self._client.set_terminated(self._run)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn the error of a server that is lost during a run into one line."""
        try:
            yield
        except self._error as error:
            raise RunError(
                f"--log mlflow: values were lost ({_line(error)}): run the same command again, "
                "which resumes, with another --log or none"
            ) from error


class WandbLog(ValueLog):
    """A run of Weights & Biases, kept in a folder: `wandb sync` uploads it if you want that.

    By default W&B also keeps what the program prints, its arguments, the host and the git remote:
    names of people and paths of private images may be among them, so all of it is turned off.
    """

    def __init__(self, place: str, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from error
        folder = _folder("wandb", place)
        try:
            self._run: Any = wandb.init(
                project="frostglass",
                name=name,
                dir=folder,
                mode=os.environ.get("WANDB_MODE", "offline"),
                settings=wandb.Settings(
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    host="",
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                ),
            )
        except wandb.Error as error:
            raise _unusable("wandb", place, error) from error

    def record(self, what: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{what}/{key}": value for key, value in values.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()


KINDS: Mapping[str, Callable[[str, str], ValueLog]] = {
    "tensorboard": TensorBoardLog,
    "mlflow": MlflowLog,
    "wandb": WandbLog,
}


def open_log(target: str | None, name: str) -> ValueLog | None:
    """Open the log that `KIND:PLACE` names, such as tensorboard:logs; None if there is none.

    Args:
        target: by default the environment variable FROSTGLASS_LOG.
        name: of the run, as the log shows it.
    """
    target = target or os.environ.get(VARIABLE)
    if not target:
        return None
    kind, _, place = target.partition(":")
    if kind not in KINDS or not place:
        known = ", ".join(f"{each}:PLACE" for each in KINDS)
        raise ConfigError(f"--log: expected {known}, got {target!r}")
    return KINDS[kind](place, name)


def _plain(name: str) -> str:
    """Return a name without what MLflow refuses in one."""
    return re.sub(r"[^\w\-. :/]", "-", name)


def _folder(kind: str, place: str) -> Path:
    folder = Path(place).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--log {kind}: expected a folder that can be written, got {place} "
            f"({error.strerror}): give another place"
        ) from error
    return folder


def _missing(package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"--log {package}: the package {package} is not installed ({error}): install it with "
        f"`pip install {package}`, or leave --log out"
    )


def _unusable(kind: str, place: str, error: Exception) -> ConfigError:
    return ConfigError(f"--log {kind}: cannot use {place} ({_line(error)}): give another place")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
