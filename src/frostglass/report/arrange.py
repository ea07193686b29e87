"""Audits arranged for comparison: an entry is one audit, an aim one model with every attack on it, a study all that may be compared."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from frostglass.attacks.base import attacks
from frostglass.audit.controls import LOW_TARGET_SUCCESS
from frostglass.core.views import CAPABILITIES
from frostglass.report.charts import Mark, listed
from frostglass.report.runs import AuditFacts, LoadedRun, Measured, RunFacts

AimKind = Literal["undefended", "given", "defended"]
Tried = Literal["tried", "vacuous", "missing", "needless"]

TITLES = {
    "adv_learn": "AdvLearn", "bido": "BiDO", "calor": "CALoR", "crafter": "Crafter", "crafter_z": "Crafter-z", "disco": "Disco",
    "dpsgd": "DP-SGD", "label_smoothing": "LS", "mid": "MID", "tiprdc": "TIPRDC", "transfer": "TL",
}  # fmt: skip
LOSS_TYPES = {"CE": ("ce",), "margin or logit": ("margin", "logit"), "Poincaré": ("poincare",)}
ATTACK_TITLES = {
    "gmi": "GMI",
    "kedmi": "KED-MI",
    "lomma": "LOMMA",
    "plgmi": "PLG-MI",
    "brepmi": "BREP-MI",
    "vmi": "VMI",
}
LABEL_ONLY, ADAPTIVE = "label-only", "adaptive"
MOST_NAMED = 4  # models that a sentence names one by one
MOST_SHOWN = 12  # audits that are all shown in pictures and listed one by one
NAMES_ITSELF = ("case", "title")  # settings whose value says enough without the setting's name


@dataclass(frozen=True)
class Entry:
    """One audit as the page shows it."""

    label: str
    run: LoadedRun
    number: int

    @property
    def facts(self) -> AuditFacts:
        return self.run.facts.audits[self.number]

    @property
    def given(self) -> bool:
        """Was the model brought as weights? Then nothing is known of how it was trained."""
        return bool(self.facts.training.recipe.get("weights"))

    @property
    def kind(self) -> AimKind:
        return "defended" if self.facts.defenses else "given" if self.given else "undefended"

    @property
    def defense(self) -> str:
        """The defenses by name; two targets may share it."""
        names = [str(defense.get("name")) for defense in self.facts.defenses]
        return " + ".join(map(titled, names)) or ("given model" if self.given else "undefended")

    @property
    def name(self) -> str:
        return self.label.split(" · ")[0]

    @property
    def details(self) -> list[str]:
        return self.label.split(" · ")[1:]

    @property
    def access(self) -> str:
        """The most the attack touches of the model; "" for an attack this version does not know."""
        name = self.facts.attack.get("name")
        granted = attacks.get(name).access if name in attacks.names() else ()
        return next((level for level in reversed(CAPABILITIES) if level in granted), "")

    @property
    def title(self) -> str:
        """The attack as the papers write it."""
        name = str(self.facts.attack.get("name"))
        return ATTACK_TITLES.get(name, name)

    @property
    def method(self) -> str:
        """The attack as the config calls it, else as the papers do; two audits of one model may share it."""
        return self.facts.case or self.title

    @property
    def adaptive(self) -> bool:
        """Does the attack know of a defense: look through noise, past saturated layers, or aim where CALoR's training does?"""
        attack = self.facts.attack
        samples = attack.get("samples")
        return (
            (isinstance(samples, int) and samples > 1)
            or attack.get("straight_through") is True
            or attack.get("loss") == "aim"
        )

    @property
    def attack_kinds(self) -> list[str]:
        kinds = [
            kind for kind, losses in LOSS_TYPES.items() if self.facts.attack.get("loss") in losses
        ]
        return kinds + [LABEL_ONLY] * (self.access == "labels") + [ADAPTIVE] * self.adaptive

    @property
    def judges(self) -> list[str]:
        return [f"top1_{place}" for place in range(1, len(self.run.facts.evaluators) + 1)]

    @property
    def strictest(self) -> str:
        return min(self.judges, key=lambda judge: self.facts.scores[judge].value)

    @property
    def leak(self) -> Measured:
        return self.facts.scores[self.strictest]

    @property
    def rebuilt(self) -> Tensor:
        return self.run.pictures[f"audit.{self.number}"]

    @property
    def marks(self) -> list[Mark]:
        scores, guesses = self.facts.scores, self.facts.prior_only
        return [
            Mark(scores[j].value, scores[j].low, scores[j].high, guesses[j].value)
            for j in self.judges
        ]


@dataclass(frozen=True)
class Aim:
    """A model under audit with every attack tried on it; the strongest one counts."""

    label: str
    kind: AimKind
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        return spoken(self.label)

    @property
    def strongest(self) -> Entry:
        return max(self.entries, key=lambda entry: entry.leak.value)

    @property
    def vacuous(self) -> bool:
        return all(entry.facts.controls.vacuous for entry in self.entries)

    @property
    def accuracy(self) -> float:
        return self.strongest.facts.target.accuracy.test

    @property
    def recipe(self) -> dict[str, Any]:
        """How it was trained, but for the seed; of a model that was brought as weights this says nothing."""
        return {
            key: value
            for key, value in self.strongest.facts.training.recipe.items()
            if key not in ("seed", "weights")
        }

    @property
    def stalled(self) -> bool:
        """Did the strongest attack fail to convince even the attacked model? Then a low score says little."""
        return self.strongest.facts.scores["target_top1"].value < LOW_TARGET_SUCCESS

    @property
    def attack_kinds(self) -> dict[str, Tried]:
        """Which kinds of attack were tried: a defense that hides gradients from one kind may not hide them from another."""
        return {kind: self._tried(kind) for kind in (*LOSS_TYPES, LABEL_ONLY, ADAPTIVE)}

    def _tried(self, kind: str) -> Tried:
        reasons = [
            entry.facts.controls.vacuous for entry in self.entries if kind in entry.attack_kinds
        ]
        if not reasons:  # without a defense there is nothing to adapt to
            return "needless" if kind == ADAPTIVE and self.kind == "undefended" else "missing"
        return "vacuous" if all(reasons) else "tried"

    @property
    def untried(self) -> list[str]:
        return [
            kind for kind, tried in self.attack_kinds.items() if tried in ("vacuous", "missing")
        ]


@dataclass(frozen=True)
class Study:
    """Audits that may be compared: the same people, the same pictures, the same judges."""

    runs: tuple[LoadedRun, ...]
    entries: tuple[Entry, ...]
    aims: tuple[Aim, ...]

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(run.facts.name for run in self.runs))

    @property
    def first(self) -> RunFacts:
        return self.runs[0].facts

    @property
    def vacuous(self) -> bool:
        return all(aim.vacuous for aim in self.aims)

    @property
    def candidates(self) -> int:
        """Pictures kept of each person, at most."""
        return max(entry.rebuilt.shape[1] for entry in self.entries)

    @property
    def many(self) -> bool:
        """Too many audits to show each of them everywhere?"""
        return len(self.entries) > MOST_SHOWN

    @property
    def shown(self) -> tuple[Entry, ...]:
        """The audits shown in pictures: all, or of many the strongest on each model and each attack on the first one, which is the undefended if there is any."""
        if not self.many:
            return self.entries
        wanted = {aim.strongest.label for aim in self.aims}
        by_method: dict[str, list[Entry]] = {}
        for entry in self.aims[0].entries:
            by_method.setdefault(entry.method, []).append(entry)
        wanted |= {
            max(entries, key=lambda entry: entry.leak.value).label for entries in by_method.values()
        }
        return tuple(entry for entry in self.entries if entry.label in wanted)

    @property
    def hollow(self) -> dict[str, str]:
        """Why audits are vacuous: each reason once, with the audits it holds for."""
        return self._by_text(
            (entry.facts.controls.vacuous, entry)
            for entry in self.entries
            if entry.facts.controls.vacuous
        )

    @property
    def warnings(self) -> dict[str, str]:
        """Each warning once, with the audits it is about."""
        return self._by_text(
            (warning, entry) for entry in self.entries for warning in entry.facts.controls.warnings
        )

    @property
    def untried(self) -> dict[str, str]:
        """Kinds of attack that are missing, with the models that were not put to them."""
        found: dict[str, list[Aim]] = {}
        for aim in self.aims:
            if aim.kind != "undefended" and aim.untried:
                found.setdefault(listed(aim.untried), []).append(aim)
        return {kinds: named(aims) for kinds, aims in found.items()}

    def _by_text(self, pairs: Iterable[tuple[str, Entry]]) -> dict[str, str]:
        """Each text once, with all audits that came with it."""
        found: dict[str, list[Entry]] = {}
        for text, entry in pairs:
            found.setdefault(text, []).append(entry)
        return {text: self._about(entries) for text, entries in found.items()}

    def _about(self, entries: Sequence[Entry]) -> str:
        """Audits by their labels; of many, models by their names where all of their audits are meant."""
        labels = [entry.label for entry in entries]
        if len(labels) <= MOST_SHOWN:
            return listed(labels)
        if len(labels) == len(self.entries):
            return f"all {len(labels)} audits"
        parts = []
        for aim in self.aims:
            mine = [entry.label for entry in aim.entries if entry.label in labels]
            parts += (
                [f"all {len(mine)} of {aim.name}"] if 1 < len(mine) == len(aim.entries) else mine
            )
        return listed(parts)


def group(runs: Sequence[LoadedRun]) -> list[Study]:
    """Runs on the same people with the same judges side by side, others apart."""
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        facts = run.facts
        groups.setdefault(
            json.dumps(
                [facts.data.get("split"), facts.identities, [e.key for e in facts.evaluators]]
            ),
            [],
        ).append(run)
    return [_study(members) for members in groups.values()]


def _study(runs: Sequence[LoadedRun]) -> Study:
    entries = [Entry("", run, place) for run in runs for place in range(len(run.facts.audits))]
    # Runs may share an audit; it is shown once.
    entries = list(
        {
            json.dumps([e.facts.keys, e.facts.controls.model_dump()]): e for e in reversed(entries)
        }.values()
    )[::-1]
    entries.sort(key=lambda entry: ("undefended", "given", "defended").index(entry.kind))
    labels = distinct(
        [entry.defense for entry in entries],
        [_choices(entry) | _more_choices(entry) for entry in entries],
    )
    entries = [replace(entry, label=label) for entry, label in zip(entries, labels, strict=True)]
    aims: dict[str, list[Entry]] = {}
    for entry in entries:
        aims.setdefault(json.dumps([entry.kind, _choices(entry)]), []).append(entry)
    heads = [members[0] for members in aims.values()]
    names = distinct([head.defense for head in heads], [_choices(head) for head in heads])
    made = [
        Aim(name, members[0].kind, tuple(members))
        for name, members in zip(names, aims.values(), strict=True)
    ]
    return Study(tuple(runs), tuple(entries), tuple(made))


def _choices(entry: Entry) -> dict[str, Any]:
    """What makes a model another model."""
    recipe = {key: value for key, value in entry.facts.training.recipe.items() if key != "seed"}
    return {"defense": entry.facts.defenses, "model": entry.facts.target.model, "recipe": recipe}


def _more_choices(entry: Entry) -> dict[str, Any]:
    """What makes an audit of a model another audit."""
    facts = entry.facts
    return {
        "case": entry.method, "title": entry.title, "attack": facts.attack, "seed": facts.seed, "prior": facts.prior,
        "label": facts.label, "run": entry.run.facts.name,
    }  # fmt: skip


def distinct(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that differ: equal ones get the first setting in which they differ, and so on until none are equal."""
    labels, settings = list(names), [_flat(values) for values in facts]
    while repeated := [label for label, times in Counter(labels).items() if times > 1]:
        for label in repeated:
            members = [place for place, other in enumerate(labels) if other == label]
            known = dict.fromkeys(key for place in members for key in settings[place])
            key = next(
                (
                    key
                    for key in known
                    if len({json.dumps(settings[place].get(key)) for place in members}) > 1
                ),
                None,
            )
            for count, place in enumerate(members, 1):
                prefix = "" if key is None or key in NAMES_ITSELF else f"{key.rsplit('.', 1)[-1]}="
                labels[place] += (
                    f" · {prefix}{_short(settings[place].get(key))}" if key else f" · {count}"
                )
    return labels


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested values by their dotted path; a list of plain values is one value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = enumerate(value)
    else:
        return {path: value}
    inner = [_flat(item, f"{path}.{key}" if path else str(key)) for key, item in items]
    return {key: item for part in inner for key, item in part.items()}


def _short(value: Any) -> str:
    return (
        "none"
        if value is None or value == []
        else "/".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def named(aims: Sequence[Aim]) -> str:
    """Models as part of a sentence: by their names, or if they are many, how many of each defense."""
    if len(aims) <= MOST_NAMED:
        return listed([aim.name for aim in aims])
    return f"{listed([f'{count} {defense}' for defense, count in Counter(aim.strongest.defense for aim in aims).items()])} models"


def titled(name: str) -> str:
    """A defense as the papers write it."""
    return TITLES.get(name, name.replace("_", " "))


def spoken(label: str) -> str:
    """A label as part of a sentence: "CALoR · rank=3 · a=1" becomes "CALoR (rank=3, a=1)"."""
    name, *details = label.split(" · ")
    return f"{name} ({', '.join(details)})" if details else name
