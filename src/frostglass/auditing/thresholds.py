"""What the owner of a model accepts, fixed before the run; a report answers against it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from frostglass.attacks.base import Surface
from frostglass.core.errors import StoreError
from frostglass.core.parameters import parameters
from frostglass.store.files import read_json, write_json
from frostglass.store.step import Step
from frostglass.store.store import Store
from frostglass.store.timing import finished_at

Share = Annotated[float, Field(ge=0, le=1)]
Correlation = Annotated[float, Field(ge=-1, le=1)]
LEAKS = ("max_first", "max_any", "max_recognised", "max_similarity")
OF_MODELS = ("max_first", "max_any", "min_accuracy")
OF_FEATURES = ("max_similarity", "min_utility")


@parameters
class Thresholds:
    """What is accepted of a model, or of features; a report says pass, fail or inconclusive.

    Args:
        max_first: of a model: the largest share of people recognised by the first guess.
        max_any: of a model: the largest share recognised by any of the guesses that are kept.
        max_recognised: the largest share of reconstructions that are recognised, on both surfaces.
        max_similarity: of features: the largest mean similarity of reconstructions.
        min_accuracy: of a model: the least accuracy on held-out images.
        min_utility: of features: the least mean MCC of the server's answers.
    """

    max_first: Share | None = None
    max_any: Share | None = None
    max_recognised: Share | None = None
    max_similarity: Correlation | None = None
    min_accuracy: Share | None = None
    min_utility: Correlation | None = None

    def __post_init__(self) -> None:
        if not any(getattr(self, name) is not None for name in LEAKS):
            raise ValueError(
                f"max_first: expected it or another limit of the leak ({', '.join(LEAKS[1:])}), "
                "got none: add one, or remove [thresholds]"
            )
        for name in ("max_first", "max_recognised"):
            value = getattr(self, name)
            if value is not None and self.max_any is not None and value > self.max_any:
                raise ValueError(
                    f"{name} ({value}) exceeds max_any ({self.max_any}), and who is recognised by "
                    "one guess is recognised by any: raise max_any, or lower the other"
                )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def problems(self, surface: Surface) -> list[str]:
        """List limits that cannot be measured on a surface."""
        others = OF_FEATURES if surface == "model" else OF_MODELS
        about = "features" if surface == "model" else "models"
        return [
            f"thresholds.{name}: a limit for audits of {about}, and this config exposes "
            f"{'a model' if surface == 'model' else 'features'}: remove it"
            for name in others
            if getattr(self, name) is not None
        ]


def _make(limits: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    return dict(limits)


def _save(limits: Mapping[str, Any], folder: Path) -> None:
    write_json(folder / "thresholds.json", limits)


def _load(folder: Path, device: torch.device) -> Any:
    return read_json(folder / "thresholds.json")


THRESHOLDS = Step("thresholds", 1, _make, _save, _load)


@dataclass(frozen=True)
class Fixed:
    """Thresholds of a run, when they were recorded, and whether that was before its results.

    `others`: how many other thresholds the store has for runs of this name.
    """

    limits: Mapping[str, float]
    recorded: str
    before_results: bool
    others: int = 0


def record_thresholds(store: Path, name: str, thresholds: Thresholds | None) -> str:
    """Record the thresholds of a run in its store before it computes; return when that was.

    The same thresholds of the same run keep their first time. "" if there are none, or if the store
    cannot be written and has no record.
    """
    if thresholds is None:
        return ""
    # A store of its own: the caller's may hand its steps to other processes.
    records, config = Store(store), {"run": name, **thresholds.limits}
    try:
        records.step(THRESHOLDS, config, seed=0)
    except StoreError:
        return ""
    return finished_at(Path(store) / THRESHOLDS.name / records.key(THRESHOLDS, config, seed=0))


def other_thresholds(store: Path, name: str, thresholds: Thresholds) -> int:
    """Count other thresholds in a store for runs of a name: who records many can choose later."""
    records = [read_json(each) for each in (store / THRESHOLDS.name).glob("*/thresholds.json")]
    own = {"run": name, **thresholds.limits}
    return sum(isinstance(r, dict) and r.get("run") == name and r != own for r in records)


def fixed_before(recorded: str, attacks: Sequence[Path]) -> bool:
    """Return whether thresholds were recorded before any attack, a step of the store, finished."""
    times = [finished_at(folder) for folder in attacks]
    # Times of one format in UTC: their order is that of the texts.
    return bool(recorded) and all(time and recorded <= time for time in times)
