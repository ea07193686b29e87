"""How the models of a study were trained: by one recipe or not, how long, and with what result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frostglass.defenses.base import defenses
from frostglass.report.entry import Entry
from frostglass.report.labels import titled
from frostglass.report.networks import FirstStage, TrainingFacts
from frostglass.report.study import MAX_NAMED, Study, Subject, named
from frostglass.report.text import listed, number

# Settings that have an effect only if another setting has this value.
DEPENDENT = {
    "momentum": ("optimizer", "sgd"),
    "nesterov": ("optimizer", "sgd"),
    "milestones": ("schedule", "milestones"),
    "decay": ("schedule", "milestones"),
}
GIVEN = ("trust", "endpoint")  # how a given network is read: nothing about a training
DISABLED = {"shift": 0, "crop": 1.0, "jitter": [0.0, 0.0, 0.0, 0.0], "cutout": 0.0}
PEOPLE = {"public": "{} public people", "private": "the {} private people"}
MORE = "part of a difference may come from"


@dataclass(frozen=True)
class TrainingRow:
    """One model in the table: `own` settings differ from others, `facts` are by defense."""

    entry: Entry
    label: str
    epoch: str
    stage: str
    own: str
    facts: tuple[tuple[str, str], ...]

    @property
    def training(self) -> TrainingFacts:
        return self.entry.facts.training


def training_notes(study: Study) -> list[str]:
    """Say where models were trained differently, and which were trained twice."""
    models = _trained(study)
    notes = []
    if differences := _differences(models):
        by_models: dict[str, list[str]] = {}  # settings that separate the same models
        for field, groups in differences.items():
            key = json.dumps([[model.label for model in some] for some in groups.values()])
            by_models.setdefault(key, []).append(field)
        clauses = [_clause(fields, differences) for fields in by_models.values()]
        notes.append(f"The models were trained differently: {'; '.join(clauses)}; {MORE} that.")
    stages: dict[str, list[Subject]] = {}
    for model in models:
        stage = model.strongest.facts.training.first_stage
        stages.setdefault(_described(stage) if stage else "", []).append(model)
    if len(stages) > 1:
        notes += [
            f"{named(members)} started from a first training stage ({stage}) that the other "
            f"models did not have: {MORE} more training."
            for stage, members in stages.items()
            if stage
        ]
    given = [subject for subject in study.subjects if subject.strongest.given]
    if given and len(study.subjects) > 1:
        verb = "was" if len(given) == 1 else "were"
        notes.append(f"How {named(given)} {verb} trained is unknown: the weights were given.")
    return notes


def training_caption(study: Study) -> str:
    """Say which recipe the models share, as far as they share one."""
    models = _trained(study)
    if not models:
        return "The weights were given, so how they were trained is unknown."
    shared = _shared(models)
    common = _settings({key: value for key, value in models[0].recipe.items() if key in shared})
    if _differences(models):
        return (
            "The models were trained differently; the last column shows where they differ. "
            f"In common: {common}."
        )
    if len(models) == 1:
        return f"Recipe: {common}."
    every = len(models) == len(study.subjects)
    which = "All models" if every else "All models but those given as weights"
    return f"{which} were trained with one recipe: {common}."


def training_rows(study: Study) -> list[TrainingRow]:
    """Return a row for each model; models that differ in their seed have rows of their own."""
    shared = _shared(_trained(study))
    rows = []
    for subject in study.subjects:
        by_seed = {entry.facts.seed: entry for entry in subject.entries}
        used = {k: v for k, v in _used(subject.recipe).items() if k not in shared}
        for seed, entry in by_seed.items():
            training, kept = entry.facts.training, entry.facts.target.selected_epoch
            label = f"{subject.label} · seed={seed}" if len(by_seed) > 1 else subject.label
            epoch, stage = "–", training.first_stage
            if kept is not None:
                epoch = f"{number(kept + 1)} of {words(training.recipe.get('epochs'))}"
            text = ""
            if stage:
                right = number(stage.accuracy.test, "percent")
                text = f"{_described(stage)}, accuracy {right} on held-out images"
            facts = tuple(
                (titled(defenses, {"name": name}), fact_words(values))
                for name, values in training.facts.items()
            )
            own = _settings({} if entry.given else used, disabled=True)
            rows.append(TrainingRow(entry, label, epoch, text, own, facts))
    return rows


def fact_words(values: Mapping[str, Any]) -> str:
    """Format what a defense reports: "taps block1, block2", "ε = 4.2 at δ = 1e-05; noise 1.1"."""
    rest = dict(values)
    parts = []
    if "epsilon" in rest and "delta" in rest:
        epsilon, delta = rest.pop("epsilon"), rest.pop("delta")
        # Without noise there is no bound, and the defense's own note says so.
        parts += [] if epsilon is None else [f"ε = {words(epsilon)} at δ = {words(delta)}"]
    if "k" in rest and "expected_first_guess" in rest:
        k, expected = rest.pop("k"), rest.pop("expected_first_guess")
        parts.append(f"one of {k} people; expected of a first guess {number(expected, 'percent')}")
    note = rest.pop("note", None)
    shown = {key: value for key, value in rest.items() if value is not None}
    parts += [f"{key.replace('_', ' ')} {words(value)}" for key, value in shown.items()]
    return "; ".join(parts + ([str(note)] if note else []))


def words(value: Any, *, exact: bool = False) -> str:
    """Format a plain value; with `exact` a number keeps all its digits."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number(value, "count" if value >= 10_000 else "plain")
    if isinstance(value, float):
        rounded = float(f"{value:.3g}") != value
        return str(value).replace("-", "−") if exact and rounded else number(value)
    if isinstance(value, list):
        return ("/" if exact else ", ").join(words(item, exact=exact) for item in value)
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {words(item, exact=exact)}' for key, item in value.items())})"
    return {"Infinity": "∞", "-Infinity": "−∞"}.get(value, str(value))


def _trained(study: Study) -> list[Subject]:
    return [subject for subject in study.subjects if not subject.strongest.given]


def _used(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have an effect."""
    return {
        key: value
        for key, value in recipe.items()
        if key not in GIVEN
        and (key not in DEPENDENT or recipe.get(DEPENDENT[key][0]) == DEPENDENT[key][1])
    }


def _differences(models: Sequence[Subject]) -> dict[str, dict[str, list[Subject]]]:
    """Return the settings that differ between models: each value with its models."""
    used = [_used(model.recipe) for model in models]
    result: dict[str, dict[str, list[Subject]]] = {}
    for field in dict.fromkeys(key for recipe in used for key in recipe):
        groups: dict[str, list[Subject]] = {}
        for model, recipe in zip(models, used, strict=True):
            if field in recipe:
                groups.setdefault(words(recipe[field], exact=True), []).append(model)
        if len(groups) > 1:
            result[field] = groups
    return result


def _shared(models: Sequence[Subject]) -> set[str]:
    """Return the settings that all models use with one value."""
    used = [set(_used(model.recipe)) for model in models]
    return set.intersection(*used) - set(_differences(models)) if used else set()


def _clause(fields: Sequence[str], differences: Mapping[str, Mapping[str, list[Subject]]]) -> str:
    """Return "lr is 0.01 for undefended and 0.001 for BiDO", or the like for several settings."""
    members = list(differences[fields[0]].values())
    most = max(members, key=len)
    many = len(most) > MAX_NAMED  # the largest group is then counted, and comes last
    order = sorted(range(len(members)), key=lambda place: many and members[place] is most)
    whom = [
        f"{len(most)} other models" if many and members[place] is most else named(members[place])
        for place in order
    ]
    values = [[list(differences[field])[place] for field in fields] for place in order]
    shown = [field.replace("_", " ") for field in fields]
    if len(fields) == 1:
        pairs = [f"{value} for {who}" for (value,), who in zip(values, whom, strict=True)]
        return f"{shown[0]} is {listed(pairs)}"
    settings = [
        listed([f"{field} {value}" for field, value in zip(shown, chosen, strict=True)])
        for chosen in values
    ]
    return ", but ".join(f"{text} for {who}" for text, who in zip(settings, whom, strict=True))


def _described(stage: FirstStage) -> str:
    people = PEOPLE.get(stage.data, "{} people").format(number(stage.classes, "count"))
    own = f"{number(stage.epochs)} epochs on {people}"
    return f"{_described(stage.before)}, then {own}" if stage.before else own


def _settings(settings: Mapping[str, Any], *, disabled: bool = False) -> str:
    """Format settings as "epochs 20, lr 0.001"; disabled ones only on request."""
    shown = {k: v for k, v in settings.items() if disabled or not _is_disabled(k, v)}
    return ", ".join(f"{k.replace('_', ' ')} {words(v, exact=True)}" for k, v in shown.items())


def _is_disabled(key: str, value: Any) -> bool:
    nothing = value is None or value is False or value in ([], {})
    return nothing or (key in DISABLED and value == DISABLED[key])
