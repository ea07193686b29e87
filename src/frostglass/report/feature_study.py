"""Audits of split models arranged for comparison: an attempt is one attack on what one protection released, a study all that may be compared."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from frostglass.attacks.features.base import feature_attacks
from frostglass.audit.feature_controls import BLIND_EMBEDDER
from frostglass.defenses.base import defenses
from frostglass.report.arrange import MOST_NAMED, distinct, spoken, titled
from frostglass.report.charts import listed
from frostglass.report.feature_runs import (
    FeatureAuditFacts,
    FeatureRunFacts,
    FeatureRunFiles,
    Usefulness,
    judges_of,
)
from frostglass.report.runs import Measured

UNPROTECTED = "unprotected"
BLACK, WHITE, ADAPTIVE = "black box", "white box", "adaptive"
KINDS = {
    BLACK: "asks the device for plain features of its own pictures",
    WHITE: "has the device's half of the network",
    ADAPTIVE: "sees what the protection makes of its own pictures, or of the victims again",
}
MOST_EXPOSED = 5
Tried = Literal["tried", "vacuous", "missing", "needless"]


@dataclass(frozen=True)
class Attempt:
    """One attack, `method` by name, on what one protection released; `label` names both."""

    label: str
    method: str
    run: FeatureRunFiles
    number: int

    @property
    def facts(self) -> FeatureAuditFacts:
        return self.run.facts.audits[self.number]

    @property
    def vacuous(self) -> str:
        return self.facts.controls.vacuous

    @property
    def similarity(self) -> Measured:
        return self.facts.scores["similarity"]

    @property
    def blind(self) -> float:
        """What draws without any feature reach."""
        return self.facts.prior_only["similarity"].value

    @property
    def by_person(self) -> Tensor:
        """Similarity of what was rebuilt of each person, (I,)."""
        return self.run.rows[self.number]["similarity"].mean(1)

    @property
    def rebuilt(self) -> Tensor:
        return self.run.pictures[f"audit.{self.number}"]

    @property
    def tries(self) -> int:
        return self.rebuilt.shape[1] // self.run.facts.pictures

    @property
    def strictest(self) -> str:
        return min(judges_of(self.run.facts), key=lambda judge: self.facts.scores[judge].value)

    @property
    def embeds(self) -> bool:
        """Does it guess who is shown, without making a picture?"""
        name = str(self.facts.attack.get("name"))
        return name in feature_attacks.names() and feature_attacks.get(name).embeds

    @property
    def kinds(self) -> list[str]:
        granted = self.facts.granted
        return [
            WHITE if "encoder" in granted else BLACK,
            *([ADAPTIVE] if "protection" in granted else []),
        ]

    @property
    def exposed(self) -> list[tuple[str, float]]:
        """Those of whom most came back."""
        ranked = sorted(
            zip(self.run.facts.identities, self.by_person.tolist(), strict=True),
            key=lambda person: -person[1],
        )
        return ranked[:MOST_EXPOSED]


@dataclass(frozen=True)
class Protection:
    """What leaves the device, with every attack tried on it; the strongest sound one counts."""

    label: str
    attempts: tuple[Attempt, ...]

    @property
    def name(self) -> str:
        return spoken(self.label)

    @property
    def facts(self) -> FeatureAuditFacts:
        """Of any attempt, for what the attack has no part in."""
        return self.attempts[0].facts

    @property
    def plain(self) -> bool:
        return not self.facts.defenses

    @property
    def vacuous(self) -> bool:
        return all(attempt.vacuous for attempt in self.attempts)

    @property
    def strongest(self) -> Attempt:
        sound = [attempt for attempt in self.attempts if not attempt.vacuous]
        return max(sound or self.attempts, key=lambda attempt: attempt.similarity.value)

    @property
    def utility(self) -> Usefulness:
        return self.facts.utility

    @property
    def measured(self) -> dict[str, float]:
        """Means of the numbers that the protection noted for its batches, each picture counting once; `pictures` is how many there were."""
        rows = self.facts.released
        weights = [row.get("pictures", 1) for row in rows]
        names = [
            name
            for name in dict.fromkeys(key for row in rows for key in row)
            if all(_is_number(row.get(name)) for row in rows)
        ]
        means = {
            name: sum(w * row[name] for w, row in zip(weights, rows, strict=True)) / sum(weights)
            for name in names
        }
        return means | ({"pictures": sum(weights)} if "pictures" in means else {})

    @property
    def acts_at_release(self) -> bool:
        """Does something happen to the feature after the network has made it? Only then is there more to know than the network."""
        names = [str(defense.get("name")) for defense in self.facts.defenses]
        return any(name not in defenses.names() or defenses.get(name).releases for name in names)

    def tried(self, kind: str) -> Tried:
        reasons = [attempt.vacuous for attempt in self.attempts if kind in attempt.kinds]
        if not reasons:
            return "needless" if kind == ADAPTIVE and not self.acts_at_release else "missing"
        return "vacuous" if all(reasons) else "tried"

    @property
    def untried(self) -> list[str]:
        return [kind for kind in KINDS if self.tried(kind) in ("vacuous", "missing")]


@dataclass(frozen=True)
class FeatureStudy:
    """Audits that may be compared: the same pictures of the same people, the same judges, the same embedder; unprotected features come first."""

    runs: tuple[FeatureRunFiles, ...]
    protections: tuple[Protection, ...]

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(run.facts.name for run in self.runs))

    @property
    def first(self) -> FeatureRunFacts:
        return self.runs[0].facts

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(attempt for protection in self.protections for attempt in protection.attempts)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(attempt.method for attempt in self.attempts))

    @property
    def vacuous(self) -> bool:
        return all(protection.vacuous for protection in self.protections)

    @property
    def blind_embedder(self) -> bool:
        """Does the network that compares faces hardly tell people apart? Then no similarity means anything."""
        return (
            self.first.references.same_person - self.first.references.different_people
            < BLIND_EMBEDDER
        )

    @property
    def pictured(self) -> list[Attempt]:
        """The attempts shown in pictures: every attack on the first features, which are the unprotected ones if there are any, and the strongest on each other."""
        head, *others = self.protections
        best = [
            max((a for a in head.attempts if a.method == method), key=_strength)
            for method in dict.fromkeys(a.method for a in head.attempts)
        ]
        return (
            [*best, *(protection.strongest for protection in others)]
            if head.plain
            else [p.strongest for p in self.protections]
        )

    @property
    def hollow(self) -> dict[str, str]:
        """Why audits are vacuous: each reason once, with the audits it holds for."""
        return self._by_text(
            (attempt.vacuous, attempt) for attempt in self.attempts if attempt.vacuous
        )

    @property
    def warnings(self) -> dict[str, str]:
        """Each warning once, with the audits it is about."""
        return self._by_text(
            (warning, attempt)
            for attempt in self.attempts
            for warning in attempt.facts.controls.warnings
        )

    @property
    def failed(self) -> list[str]:
        """Audits that are missing, and why."""
        return list(dict.fromkeys(reason for run in self.runs for reason in run.facts.failed))

    @property
    def untried(self) -> dict[str, str]:
        """Kinds of attack that are missing, with the protections that were not put to them."""
        found: dict[str, list[str]] = {}
        for protection in self.protections:
            if protection.untried and not protection.plain:
                found.setdefault(listed(protection.untried), []).append(protection.name)
        return {kinds: listed(names) for kinds, names in found.items()}

    def _by_text(self, pairs: Iterable[tuple[str, Attempt]]) -> dict[str, str]:
        """Each text once, with all audits that came with it."""
        found: dict[str, list[Attempt]] = {}
        for text, attempt in pairs:
            found.setdefault(text, []).append(attempt)
        return {text: self._about(attempts) for text, attempts in found.items()}

    def _about(self, attempts: Sequence[Attempt]) -> str:
        """Audits by their labels; of many, attacks by their names where all of their audits are meant."""
        if len(attempts) <= MOST_NAMED:
            return listed([attempt.label for attempt in attempts])
        if len(attempts) == len(self.attempts):
            return f"all {len(attempts)} audits"
        parts = []
        for method in self.methods:
            mine = [attempt.label for attempt in attempts if attempt.method == method]
            parts += (
                [f"all {len(mine)} audits by {method}"]
                if 1 < len(mine) == [a.method for a in self.attempts].count(method)
                else mine
            )
        return listed(parts)


def group(runs: Sequence[FeatureRunFiles]) -> list[FeatureStudy]:
    """Runs on the same pictures with the same judges side by side, others apart."""
    groups: dict[str, list[FeatureRunFiles]] = {}
    for run in runs:
        facts = run.facts
        judges = [network.key for network in (*facts.evaluators, facts.embedder)]
        groups.setdefault(
            json.dumps([facts.data.get("split"), facts.identities, facts.pictures, judges]), []
        ).append(run)
    return [_study(members) for members in groups.values()]


def _study(runs: Sequence[FeatureRunFiles]) -> FeatureStudy:
    found = [Attempt("", "", run, place) for run in runs for place in range(len(run.facts.audits))]
    # Runs may share an audit; it is shown once.
    found = list(
        {
            json.dumps([a.facts.keys, a.facts.controls.model_dump()]): a for a in reversed(found)
        }.values()
    )[::-1]
    found.sort(key=lambda attempt: bool(attempt.facts.defenses))
    groups: dict[str, list[Attempt]] = {}
    for attempt in found:
        groups.setdefault(attempt.facts.keys["released"], []).append(attempt)
    heads = [members[0] for members in groups.values()]
    names = distinct([_titles(head.facts) for head in heads], [_choices(head) for head in heads])
    made = []
    for name, members, called in zip(
        names, groups.values(), _methods(list(groups.values())), strict=True
    ):
        labels = distinct(
            [f"{name} · {method}" for method in called],
            [{"label": a.facts.label, "run": a.run.facts.name} for a in members],
        )
        attempts = [
            Attempt(label, method, a.run, a.number)
            for label, method, a in zip(labels, called, members, strict=True)
        ]
        made.append(Protection(name, tuple(attempts)))
    return FeatureStudy(tuple(runs), tuple(made))


def _methods(groups: Sequence[Sequence[Attempt]]) -> list[list[str]]:
    """A name for each attempt's attack: what the config calls its case, unless cases name the protections; else the attack's own."""
    cases = [{attempt.facts.case for attempt in members} for members in groups]
    of_protections = all(len(some) == 1 for some in cases) and len(set.union(*cases)) > 1
    keys = [
        [json.dumps(["" if of_protections else a.facts.case, a.facts.attack]) for a in members]
        for members in groups
    ]
    unique = list(dict.fromkeys(key for some in keys for key in some))
    attacks = [
        (case, titled(str(attack.get("name"))), attack) for case, attack in map(json.loads, unique)
    ]
    names = distinct(
        [case or title for case, title, _ in attacks],
        [{"title": title, "attack": attack} for _, title, attack in attacks],
    )
    called = {key: spoken(name) for key, name in zip(unique, names, strict=True)}
    return [[called[key] for key in some] for some in keys]


def _titles(facts: FeatureAuditFacts) -> str:
    return " + ".join(titled(str(defense.get("name"))) for defense in facts.defenses) or UNPROTECTED


def _choices(attempt: Attempt) -> dict[str, Any]:
    """What makes a protection another one."""
    facts = attempt.facts
    label = f", {facts.label}, ".replace(f", {facts.case}, ", ", ", 1).strip(
        ", "
    )  # the case names the attack
    return {
        "defense": facts.defenses, "cut": facts.cut, "model": facts.target.model, "attributes": facts.attributes, "seed": facts.seed,
        "label": label, "run": attempt.run.facts.name,
    }  # fmt: skip


def named(protections: Sequence[Protection]) -> str:
    """Protections as part of a sentence: by their names, or if they are many, how many."""
    if len(protections) <= MOST_NAMED:
        return listed([protection.name for protection in protections])
    return f"{len(protections)} of the protections"


def _strength(attempt: Attempt) -> float:
    return attempt.similarity.value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
