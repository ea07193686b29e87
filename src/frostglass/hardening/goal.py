"""What a hardening is for: the least utility, and how a surface measures utility and leak."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from frostglass.attacks.base import Surface
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.feature_facts import released_facts
from frostglass.auditing.pipeline import expose, split_of
from frostglass.auditing.products import Exposure, FeatureExposure
from frostglass.auditing.results import Audit
from frostglass.auditing.ship import ship
from frostglass.auditing.victims import victims_of
from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.defenses.base import defenses
from frostglass.hardening.cases import Case, feature_cases, model_cases
from frostglass.metrics.base import Score
from frostglass.models.checkpoint import save_target
from frostglass.report.seeds import Share
from frostglass.store.store import Store

Measure = Literal["mcc", "auc"]  # of a server's answers, as the mean over attributes


@dataclass(frozen=True)
class Column:
    """A value of the final table: its name in tables of seeds, and in result.json."""

    title: str
    key: str


@dataclass(frozen=True)
class Goal(ABC):
    """The least utility that the user accepts of models with one surface.

    `key` names the utility in files and errors, `form` is how it is printed, `quality` an adjective
    for much of it. `leak` is what is minimised; `widest` stands beside it in the final table. A
    case of the final table may hold the attacker's own prior in the section `prior`.
    """

    least: float

    surface: ClassVar[Surface]
    key: ClassVar[str]
    form: ClassVar[str]
    quality: ClassVar[str]
    prior: ClassVar[str]
    leak: ClassVar[Column]
    widest: ClassVar[Column]

    def __post_init__(self) -> None:
        if not 0 < self.least < 1:
            raise ConfigError(f"{self.key}: expected a {self.limits}, got {self.least}")

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the utility, as in tables of seeds."""

    @property
    @abstractmethod
    def limits(self) -> str:
        """What the least utility must be."""

    def text(self, value: float) -> str:
        return format(value, self.form)

    def asked(self) -> dict[str, Any]:
        """Return what the user asks for, as plain values."""
        return {self.key: self.least}

    @abstractmethod
    def check(self, exp: Experiment) -> None:
        """Refuse an experiment with another surface."""

    @abstractmethod
    def preferred(self, exp: Experiment) -> tuple[str, ...]:
        """Return the defenses to tune unless the user names others."""

    @abstractmethod
    def cases(self, exp: Experiment, names: Sequence[str]) -> list[Case]:
        """Return the attacks of a final table with these defenses."""

    @abstractmethod
    def utility(self, exp: Experiment, store: Store) -> float:
        """Return the utility of an experiment's model, trained now or earlier, without attack."""

    @abstractmethod
    def leaked(self, result: Audit) -> Score:
        """Return the share that the deciding evaluator verifies."""

    def similarity(self, result: Audit) -> float | None:
        """Return what decides between equal leaks, if anything does."""
        return None

    def unproven(self, result: Audit) -> str:
        """Return why the leak of an audit proves nothing, or ""."""
        return result.controls.vacuous

    @abstractmethod
    def strength(self, shares: Mapping[str, Share]) -> tuple[float, ...]:
        """Return what makes one attack stronger than another."""

    @abstractmethod
    def deliver(self, exp: Experiment, store: Store, folder: Path) -> Target:
        """Write what is shipped into a folder, and return the model."""


@dataclass(frozen=True)
class ModelGoal(Goal):
    """The least accuracy of a released model on held-out images; its first guesses are the leak."""

    surface = "model"
    key = "accuracy"
    form = ".1%"
    quality = "accurate"
    prior = "prior"
    leak = Column("verified, first", "verified_first")
    widest = Column("verified, any", "verified_any")

    @property
    def title(self) -> str:
        return "accuracy"

    @property
    def limits(self) -> str:
        return "share between 0 and 1"

    def check(self, exp: Experiment) -> None:
        if exp.surface != self.surface:
            raise ConfigError(
                "target.cut: hardening tunes defenses of whole models: remove target.cut, or tune "
                "protections of its features (--protect --utility)"
            )

    def preferred(self, exp: Experiment) -> tuple[str, ...]:
        return ("decoys", "calor", "bido")

    def cases(self, exp: Experiment, names: Sequence[str]) -> list[Case]:
        return model_cases(exp, names)

    def utility(self, exp: Experiment, store: Store) -> float:
        return float(exposed(exp, store).target.info["accuracy"]["test"])

    def leaked(self, result: Audit) -> Score:
        name = result.controls.deciding
        return Score.of(name, result.rows.columns[name][:, 0])

    def strength(self, shares: Mapping[str, Share]) -> tuple[float, ...]:
        return (shares[self.leak.title].value,)

    def deliver(self, exp: Experiment, store: Store, folder: Path) -> Target:
        target = exposed(exp, store).target
        save_target(target, folder)
        return target


@dataclass(frozen=True)
class FeatureGoal(Goal):
    """The least utility of a server's answers to released features; verified images are the leak.

    Utility is measured on the attacked people's held-out images, as in an audit.
    """

    measure: Measure = "mcc"

    surface = "features"
    key = "utility"
    form = ".3f"
    quality = "useful"
    prior = "attacker_prior"
    leak = Column("verified", "verified")
    widest = Column("similarity", "similarity")

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            known = " or ".join(get_args(Measure))
            raise ConfigError(f"measure: expected {known}, got {self.measure!r}")
        super().__post_init__()

    @property
    def title(self) -> str:
        return self.measure.upper()

    @property
    def limits(self) -> str:
        return f"mean {self.title} between 0 and 1"

    def asked(self) -> dict[str, Any]:
        return {**super().asked(), "measure": self.measure}

    def check(self, exp: Experiment) -> None:
        if exp.surface != self.surface:
            raise ConfigError(
                "target.cut: required to tune protections of features (--protect): set target.cut "
                "and target.attributes, or harden the whole model (--accuracy)"
            )

    def preferred(self, exp: Experiment) -> tuple[str, ...]:
        names = ("adv_learn", "crafter", "crafter_z")
        return tuple(name for name in names if exp.prior or not defenses.get(name)().needs)

    def cases(self, exp: Experiment, names: Sequence[str]) -> list[Case]:
        return feature_cases(exp, names)

    def utility(self, exp: Experiment, store: Store) -> float:
        exposure = exposed(exp, store)
        assert isinstance(exposure, FeatureExposure)  # checked by check()
        return float(released_facts(exposure)["utility"][f"mean_{self.measure}"])

    def leaked(self, result: Audit) -> Score:
        return result.rows.score(result.verified)

    def similarity(self, result: Audit) -> float | None:
        return result.rows.score("similarity").value

    def unproven(self, result: Audit) -> str:
        """Also ask whether verification sees the leak: the controls look at similarity alone."""
        if result.controls.vacuous:
            return result.controls.vacuous
        lifts = {score.name: score.value for score in result.controls.control_lift}
        margin = result.controls.margin
        if lifts[result.verified] >= margin:
            return ""
        return (
            f"evaluator {result.verified.rpartition('_')[2]} recognises people in images from "
            f"unprotected features {lifts[result.verified]:.2f} more often than in prior-only "
            f"draws, required {margin:.2f} (judging.margin): it cannot show that a protection works"
        )

    def strength(self, shares: Mapping[str, Share]) -> tuple[float, ...]:
        return shares[self.leak.title].value, shares[self.widest.title].value

    def deliver(self, exp: Experiment, store: Store, folder: Path) -> Target:
        for half in ("client", "server"):  # of an earlier call, perhaps with other settings
            shutil.rmtree(folder / half, ignore_errors=True)
        ship(exp, store, folder)
        return exposed(exp, store).target


def goal_of(accuracy: float | None, utility: float | None, measure: str) -> Goal:
    """Return the goal that a user names by the least accuracy or the least utility."""
    if (accuracy is None) == (utility is None):
        got = "neither" if accuracy is None else "both"
        raise ConfigError(f"expected accuracy (of a model) or utility (of features), got {got}")
    if accuracy is not None:
        return ModelGoal(accuracy)
    return FeatureGoal(utility, measure)  # type: ignore[arg-type]


def exposed(exp: Experiment, store: Store) -> Exposure:
    """Return what an experiment exposes, made now or earlier, without attacking it."""
    split = split_of(exp, store)
    victims = victims_of(exp, split) if exp.surface == "features" else None
    return expose(exp, store, split, victims)
