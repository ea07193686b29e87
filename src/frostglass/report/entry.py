"""One audit as a page shows it, and which of several is the strongest."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from frostglass.attacks.base import Surface, attacks
from frostglass.core.errors import ConfigError
from frostglass.core.types import CAPABILITIES
from frostglass.defenses.base import defenses
from frostglass.report.charts import Mark
from frostglass.report.facts import Measured
from frostglass.report.labels import known, model_name, titled
from frostglass.report.load import Run
from frostglass.report.networks import EvaluatorFacts
from frostglass.report.text import Kind

SubjectKind = Literal["undefended", "given", "defended"]

UNPROTECTED, ADAPTIVE, LABEL_ONLY = "unprotected", "adaptive", "label-only"
LOSS_TYPES = {"CE": ("ce",), "margin or logit": ("margin", "logit"), "Poincaré": ("poincare",)}
BLACK_BOX, WHITE_BOX = "black box", "white box"


def _adapts(attack: Mapping[str, Any]) -> bool:
    """Does it work around what a defense does to gradients, answers, images or crowds?"""
    samples, subtract = attack.get("samples"), attack.get("subtract")
    own = {name for each in defenses.names() for name in defenses.get(each).adaptive}
    return (
        (isinstance(samples, int) and samples > 1)
        or (isinstance(subtract, float) and subtract > 0)
        or attack.get("straight_through") is True
        or attack.get("alone") is True
        or bool(attack.get("erase"))
        or attack.get("loss") == "aim"
        or attack.get("gap") == "channels"
        or attack.get("unit_channels") is True
        or (attack.get("name") in own and known(attacks, attack) is not None)
    )


@dataclass(frozen=True)
class Entry:
    """One audit as the page shows it; `method` names its attack, `label` also its subject."""

    label: str
    method: str
    run: Run
    number: int

    @property
    def facts(self) -> Any:
        """The ModelAudit or FeatureAudit."""
        return self.run.facts.audits[self.number]

    @property
    def surface(self) -> Surface:
        return self.run.facts.surface

    @property
    def unit(self) -> Kind:
        """How the score that counts is written."""
        return "decimal" if self.surface == "features" else "percent"

    @property
    def vacuous(self) -> str:
        return self.facts.controls.vacuous

    @property
    def reconstructions(self) -> Tensor:
        return self.run.images[f"audit.{self.number}"]

    @property
    def evaluators(self) -> list[EvaluatorFacts]:
        return self.facts.evaluators

    @property
    def top1(self) -> list[str]:
        """The scores of classifiers: is the person ranked first?"""
        return self.run.facts.top1

    @property
    def verifier(self) -> int:
        """The number of the evaluator whose verification decides, counted from 1."""
        return 1 + next(n for n, each in enumerate(self.evaluators) if each.decides)

    @property
    def verified(self) -> str:
        """The score that says whether a person would be recognised."""
        return f"verified_{self.verifier}"

    @property
    def threshold(self) -> float:
        """The match above which the deciding evaluator accepts an image."""
        return self.evaluators[self.verifier - 1].verifier.thresholds[0]

    @property
    def match(self) -> Tensor:
        """How well each reconstruction matches its person, (I, K)."""
        return self.run.rows[self.number].columns[f"match_{self.verifier}"]

    @property
    def measure(self) -> str:
        """The score that counts."""
        return self.facts.controls.deciding

    @property
    def score(self) -> Measured:
        return self.facts.scores[self.measure]

    @property
    def baseline(self) -> float:
        """The same score of the prior-only baseline."""
        return self.facts.prior_only[self.measure].value

    @property
    def title(self) -> str:
        return titled(attacks, self.facts.attack)

    @property
    def defense(self) -> str:
        """The defenses by name; several subjects may share it."""
        titles = [titled(defenses, defense) for defense in self.facts.defenses]
        if self.surface == "features":
            return " + ".join(titles) or UNPROTECTED
        return model_name(titles, given=self.given)

    @property
    def given(self) -> bool:
        """Was the model given as weights? Then nothing is known about its training."""
        return self.surface == "model" and bool(self.facts.training.recipe.get("weights"))

    @property
    def kind(self) -> SubjectKind:
        return "defended" if self.facts.defenses else "given" if self.given else "undefended"

    @property
    def adaptive(self) -> bool:
        """Does the attack know a defense, and work around it?"""
        asks = self.surface == "features" and "protection" in self.facts.access
        return asks or any(map(_adapts, self._searches))

    @property
    def _searches(self) -> list[Mapping[str, Any]]:
        """The attack, and the one that it wraps or starts from, with all their parameters."""
        attack = self.facts.attack
        base, starter = attack.get("base"), attack.get("starter")
        if isinstance(base, Mapping):
            with suppress(ConfigError):  # of another version
                base = asdict(attacks.build(base)) if known(attacks, base) else base
        return [attack, *(each for each in (base, starter) if isinstance(each, Mapping))]

    @property
    def access(self) -> str:
        """The most the attack may use of a model; "" if unknown."""
        granted = self.facts.access
        return next((level for level in reversed(CAPABILITIES) if level in granted), "")

    @property
    def attack_kinds(self) -> list[str]:
        adaptive = [ADAPTIVE] * self.adaptive
        if self.surface == "features":
            return [WHITE_BOX if "encoder" in self.facts.access else BLACK_BOX, *adaptive]
        used = {each.get("loss") for each in self._searches if each.get("alone") is not True}
        kinds = [kind for kind, losses in LOSS_TYPES.items() if used.intersection(losses)]
        return [*kinds, *[LABEL_ONLY] * (self.access == "labels"), *adaptive]

    @property
    def marks(self) -> list[Mark]:
        """The share recognised, and below it top-1 of each classifier."""
        names = [self.verified, *self.top1]
        numbers = [int(name.rpartition("_")[2]) for name in names]
        titles = ["recognised", *(f"top-1 of evaluator {number}" for number in numbers[1:])]
        scores, baseline = self.facts.scores, self.facts.prior_only
        return [
            Mark(title, number - 1, scores[name], baseline[name].value, hollow=name in self.top1)
            for name, number, title in zip(names, numbers, titles, strict=True)
        ]

    @property
    def embeds(self) -> bool:
        """Does the attack predict an embedding instead of an image?"""
        return bool(getattr(known(attacks, self.facts.attack), "embeds", False))

    @property
    def by_person(self) -> Tensor:
        """Mean similarity of the reconstructions of each person, (I,)."""
        return self.run.rows[self.number].columns["similarity"].mean(1)

    @property
    def exposed(self) -> list[tuple[str, float]]:
        """The most exposed people: with recognised shares, or mean similarities."""
        worst = [(person.identity, person.value) for person in self.facts.worst]
        return [each for each in worst if each[1] or self.surface == "features"]


def rank(entry: Entry) -> tuple[bool, float, float]:
    """Return what orders attacks by strength; on features, a sound one is before a vacuous one."""
    sound = entry.surface == "features" and not entry.vacuous
    return sound, entry.score.value, entry.match.mean().item()


def strongest(entries: Iterable[Entry]) -> Entry:
    """Return the entry with the highest score.

    Of several that recognise as many people, the one whose reconstructions match best.
    """
    return max(entries, key=rank)
