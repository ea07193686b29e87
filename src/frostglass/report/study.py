"""Audits arranged for comparison.

An entry is one audit. A subject is what was attacked, one model or what one protection releases,
with every attack on it. A study holds all audits that may be compared.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from frostglass.attacks.base import Surface
from frostglass.auditing.controls import LOW_TARGET_SUCCESS, WEAK_EMBEDDER
from frostglass.defenses.base import defenses
from frostglass.report.entry import (
    ADAPTIVE,
    BLACK_BOX,
    LABEL_ONLY,
    LOSS_TYPES,
    WHITE_BOX,
    Entry,
    SubjectKind,
    rank,
    strongest,
)
from frostglass.report.facts import RunFacts, Utility
from frostglass.report.labels import accuracy_images, known
from frostglass.report.load import Run
from frostglass.report.text import Kind, listed, spoken

Tried = Literal["tried", "vacuous", "missing", "needless"]

ATTACK_KINDS: dict[Surface, tuple[str, ...]] = {
    "model": (*LOSS_TYPES, LABEL_ONLY, ADAPTIVE),
    "features": (BLACK_BOX, WHITE_BOX, ADAPTIVE),
}
MAX_NAMED = 4  # subjects that a sentence names one by one
MAX_SHOWN = 12  # audits that all have images and are listed one by one


@dataclass(frozen=True)
class Subject:
    """One model, or what one protection releases, with every attack on it."""

    label: str
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        return spoken(self.label)

    @property
    def facts(self) -> Any:
        """The facts of any audit, for what the attack has no part in."""
        return self.entries[0].facts

    @property
    def kind(self) -> SubjectKind:
        return self.entries[0].kind

    @property
    def plain(self) -> bool:
        return self.kind == "undefended"

    @property
    def vacuous(self) -> bool:
        return all(entry.vacuous for entry in self.entries)

    @cached_property
    def strongest(self) -> Entry:
        return strongest(self.entries)

    @property
    def accuracy(self) -> float:
        return self.strongest.facts.target.accuracy.test

    @property
    def recipe(self) -> dict[str, Any]:
        """How the model was trained, but for the seed; means nothing for given weights."""
        recipe = self.strongest.facts.training.recipe
        return {key: value for key, value in recipe.items() if key not in ("seed", "weights")}

    @property
    def stalled(self) -> bool:
        """Did the strongest attack fail on the attacked model itself? A low score says little."""
        scores = self.strongest.facts.scores
        return "target_top1" in scores and scores["target_top1"].value < LOW_TARGET_SUCCESS

    @property
    def utility(self) -> Utility:
        return self.facts.utility

    @property
    def noted(self) -> dict[str, float]:
        """Means of the numbers that the protection noted by batch, weighted by its images."""
        rows = self.facts.released
        weights = [row.get("images", 1) for row in rows]
        names = dict.fromkeys(key for row in rows for key in row)
        means = {
            name: sum(w * row[name] for w, row in zip(weights, rows, strict=True)) / sum(weights)
            for name in names
            if all(_is_number(row.get(name)) for row in rows)
        }
        return means | ({"images": sum(weights)} if "images" in means else {})

    @property
    def acts_at_release(self) -> bool:
        """Does a protection change features after the network has computed them?"""
        methods = [known(defenses, defense) for defense in self.facts.defenses]
        return any(method is None or method.releases for method in methods)

    @property
    def attack_kinds(self) -> dict[str, Tried]:
        """Which kinds of attack were tried: a defense may stop one kind and not another."""
        return {kind: self._tried(kind) for kind in ATTACK_KINDS[self.entries[0].surface]}

    def _tried(self, kind: str) -> Tried:
        reasons = [entry.vacuous for entry in self.entries if kind in entry.attack_kinds]
        if reasons:
            return "vacuous" if all(reasons) else "tried"
        features = self.entries[0].surface == "features"
        adaptable = self.acts_at_release if features else not self.plain
        return "needless" if kind == ADAPTIVE and not adaptable else "missing"

    @property
    def untried(self) -> list[str]:
        return [
            kind for kind, state in self.attack_kinds.items() if state in ("vacuous", "missing")
        ]


@dataclass(frozen=True)
class Study:
    """Audits of the same people, images and evaluators; undefended subjects come first."""

    runs: tuple[Run, ...]
    subjects: tuple[Subject, ...]

    @property
    def surface(self) -> Surface:
        return self.first.surface

    @property
    def unit(self) -> Kind:
        return self.subjects[0].entries[0].unit

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(run.facts.name for run in self.runs))

    @property
    def first(self) -> RunFacts:
        return self.runs[0].facts

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for subject in self.subjects for entry in subject.entries)

    @property
    def verifiers(self) -> list[int]:
        """The numbers of the evaluators that decide; audits of other data may lack an embedder."""
        return list(dict.fromkeys(entry.verifier for entry in self.entries))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(entry.method for entry in self.entries))

    @property
    def tested_on(self) -> str:
        """The images that accuracy is measured on; a given model may have been trained on them."""
        return accuracy_images(given=any(subject.kind == "given" for subject in self.subjects))

    @property
    def vacuous(self) -> bool:
        return all(subject.vacuous for subject in self.subjects)

    @property
    def redacted(self) -> bool:
        return any(run.redacted for run in self.runs)

    @property
    def shows_images(self) -> bool:
        return all(run.shown for run in self.runs)

    @property
    def weak_embedder(self) -> bool:
        """Does the embedder hardly tell people apart? Then no similarity means anything."""
        if self.surface == "model":
            return False
        references = self.subjects[0].facts.controls.references
        return references.same_person - references.different_people < WEAK_EMBEDDER

    @property
    def candidates(self) -> int:
        """Reconstructions kept per person, at most."""
        return max(entry.reconstructions.shape[1] for entry in self.entries)

    @property
    def many(self) -> bool:
        """Are there too many audits to show each of them everywhere?"""
        return len(self.entries) > MAX_SHOWN

    @property
    def shown_each(self) -> int:
        """How many attacks on each subject have images, where there are too many for all."""
        return max(1, MAX_SHOWN // len(self.subjects))

    @property
    def shown(self) -> tuple[Entry, ...]:
        """Audits with images: all, or those of the strongest attacks on each subject."""
        if not self.many:
            return self.entries
        labels: set[str] = set()
        for subject in self.subjects:
            by_method = [
                strongest(entry for entry in subject.entries if entry.method == method)
                for method in dict.fromkeys(entry.method for entry in subject.entries)
            ]
            best = sorted(by_method, key=rank, reverse=True)[: self.shown_each]
            labels |= {entry.label for entry in best}
        return tuple(entry for entry in self.entries if entry.label in labels)

    @property
    def vacuous_reasons(self) -> dict[str, str]:
        """Why audits are vacuous: each reason with the audits it holds for."""
        return self.by_text((entry.vacuous, entry) for entry in self.entries if entry.vacuous)

    @property
    def warnings(self) -> dict[str, str]:
        """Each warning with the audits it is about."""
        return self.by_text(
            (warning, entry) for entry in self.entries for warning in entry.facts.controls.warnings
        )

    @property
    def not_run(self) -> list[str]:
        """Audits that a time budget left out."""
        return list(dict.fromkeys(reason for run in self.runs for reason in run.facts.not_run))

    @property
    def failed(self) -> list[str]:
        """Audits that are missing, and why."""
        return list(dict.fromkeys(reason for run in self.runs for reason in run.facts.failed))

    @property
    def partial(self) -> bool:
        """Is an audit of these runs missing?"""
        return bool(self.failed or self.not_run)

    @property
    def untried(self) -> dict[str, str]:
        """Missing kinds of attack, with the subjects they were not tried on."""
        groups: dict[str, list[Subject]] = {}
        for subject in self.subjects:
            if subject.untried and not subject.plain:
                groups.setdefault(listed(subject.untried), []).append(subject)
        return {kinds: named(subjects) for kinds, subjects in groups.items()}

    def by_text(self, pairs: Iterable[tuple[str, Entry]]) -> dict[str, str]:
        """Name the audits that share a text."""
        groups: dict[str, list[Entry]] = {}
        for text, entry in pairs:
            groups.setdefault(text, []).append(entry)
        return {text: self._about(entries) for text, entries in groups.items()}

    def _about(self, entries: Sequence[Entry]) -> str:
        """Name audits by labels; many by subject or by attack, whichever is shorter."""
        labels = {entry.label for entry in entries}
        if len(labels) == len(self.entries) > MAX_NAMED:
            return f"all {len(labels)} audits"
        if len(labels) <= MAX_NAMED:
            return listed([entry.label for entry in entries])
        groups: tuple[list[tuple[str, list[Entry]]], ...] = (
            [(f"of {subject.name}", list(subject.entries)) for subject in self.subjects],
            [(f"by {m}", [e for e in self.entries if e.method == m]) for m in self.methods],
        )
        choices = []
        for group in groups:
            parts: list[str] = []
            for name, members in group:
                own = [entry.label for entry in members if entry.label in labels]
                whole = 1 < len(own) == len(members)
                parts += [f"all {len(own)} {name}"] if whole else own
            choices.append(parts)
        return listed(min(choices, key=len))


def named(subjects: Sequence[Subject]) -> str:
    """Name subjects in a sentence: one by one, or if they are many, how many of each defense."""
    if len(subjects) <= MAX_NAMED:
        return listed([subject.name for subject in subjects])
    counts = Counter(subject.strongest.defense for subject in subjects)
    noun = "models" if subjects[0].entries[0].surface == "model" else "protections"
    return f"{listed([f'{count} {defense}' for defense, count in counts.items()])} {noun}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
