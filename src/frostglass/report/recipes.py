"""How the models of a study were trained: by one recipe or not, how long, and what their defenses tell of the result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frostglass.report.arrange import MOST_NAMED, Aim, Entry, Study, named, titled
from frostglass.report.charts import listed, number
from frostglass.report.runs import FirstStage, TrainingFacts

# Settings that say nothing unless another setting has this value, and values at which a setting does nothing.
DEPENDENT = {
    "momentum": ("optimizer", "sgd"),
    "nesterov": ("optimizer", "sgd"),
    "milestones": ("schedule", "milestones"),
    "decay": ("schedule", "milestones"),
}
IDLE = {"shift": 0, "crop": 1.0, "jitter": [0.0, 0.0, 0.0, 0.0], "cutout": 0.0}
PEOPLE = {"public": "{} public people", "private": "the {} private people"}


@dataclass(frozen=True)
class TrainingRow:
    """One trained model in the table; `own` are the settings in which it differs from others, `told` what each defense says of it."""

    entry: Entry
    label: str
    epoch: str
    stage: str
    own: str
    told: tuple[tuple[str, str], ...]

    @property
    def training(self) -> TrainingFacts:
        return self.entry.facts.training


def training_notes(study: Study) -> list[str]:
    """What a reader must know before comparing the models: where they were not trained alike, and who was trained twice."""
    aims = _trained(study)
    notes = []
    if found := _differences(aims):
        by_models: dict[
            str, list[str]
        ] = {}  # settings that separate the same models are said together
        for field, groups in found.items():
            by_models.setdefault(
                json.dumps([[aim.label for aim in members] for members in groups.values()]), []
            ).append(field)
        clauses = [_clause(fields, found) for fields in by_models.values()]
        notes.append(
            f"The models were not trained alike: {'; '.join(clauses)}; part of a difference may come from that."
        )
    stages: dict[str, list[Aim]] = {}
    for aim in aims:
        stage = aim.strongest.facts.training.first_stage
        stages.setdefault(_begun(stage) if stage else "", []).append(aim)
    if len(stages) > 1:
        notes += [
            f"{named(members)} began from a first training ({stage}) that the other models did not have: "
            "part of a difference may come from more training."
            for stage, members in stages.items()
            if stage
        ]
    given = [aim for aim in study.aims if aim.strongest.given]
    if given and len(study.aims) > 1:
        notes.append(
            f"How {named(given)} {'was' if len(given) == 1 else 'were'} trained is not known: the weights were brought."
        )
    return notes


def training_caption(study: Study) -> str:
    """The recipe all models share, as far as they share one."""
    aims = _trained(study)
    if not aims:
        return "The weights were brought, so how they were trained is not known."
    shared = _shared(aims)
    common = _spelled({key: value for key, value in aims[0].recipe.items() if key in shared})
    if _differences(aims):
        return f"The models were not trained alike; the last column shows where they differ. In common: {common}."
    if len(aims) == 1:
        return f"Recipe: {common}."
    whom = (
        "All models"
        if len(aims) == len(study.aims)
        else "All models but those whose weights were brought"
    )
    return f"{whom} were trained by one recipe: {common}."


def training_rows(study: Study) -> list[TrainingRow]:
    """A row for each trained model; models of one aim that differ in their seed are rows of their own."""
    shared = _shared(_trained(study))
    rows = []
    for aim in study.aims:
        by_seed = {entry.facts.seed: entry for entry in aim.entries}
        for seed, entry in by_seed.items():
            training = entry.facts.training
            label = f"{aim.label} · seed={seed}" if len(by_seed) > 1 else aim.label
            chosen = entry.facts.target.selected_epoch
            epoch = (
                "–"
                if chosen is None
                else f"{number(chosen + 1)} of {words(training.recipe.get('epochs'))}"
            )
            stage = training.first_stage
            right = (
                f", right on {number(stage.accuracy.test, 'percent')} of held-out pictures"
                if stage
                else ""
            )
            told = tuple(
                (titled(defense), fact_words(values)) for defense, values in training.facts.items()
            )
            own = (
                {}
                if entry.given
                else {key: value for key, value in _used(aim.recipe).items() if key not in shared}
            )
            rows.append(
                TrainingRow(
                    entry,
                    label,
                    epoch,
                    f"{_begun(stage)}{right}" if stage else "",
                    _spelled(own, idle=True),
                    told,
                )
            )
    return rows


def fact_words(values: Mapping[str, Any]) -> str:
    """What a defense tells of a model: "taps block1, block2", "ε = 4.2 at δ = 1e-05, noise 1.1"."""
    rest = dict(values)
    parts = []
    if "epsilon" in rest and "delta" in rest:
        epsilon, delta = rest.pop("epsilon"), rest.pop("delta")
        # Without noise there is no bound, and the defense's own note says so.
        parts += [] if epsilon is None else [f"ε = {words(epsilon)} at δ = {words(delta)}"]
    note = rest.pop("note", None)
    parts += [
        f"{key.replace('_', ' ')} {words(value)}"
        for key, value in rest.items()
        if value is not None
    ]
    return "; ".join(parts + ([str(note)] if note else []))


def words(value: Any, *, exact: bool = False) -> str:
    """A plain value as text; with `exact` a number keeps all its digits, so that two that differ look different."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return number(value, "count" if value >= 10_000 else "plain")
    if isinstance(value, float):
        return (
            str(value).replace("-", "−")
            if exact and float(f"{value:.3g}") != value
            else number(value)
        )
    if isinstance(value, list):
        return ("/" if exact else ", ").join(words(item, exact=exact) for item in value)
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {words(item, exact=exact)}' for key, item in value.items())})"
    return {"Infinity": "∞", "-Infinity": "−∞"}.get(value, str(value))


def _trained(study: Study) -> list[Aim]:
    return [aim for aim in study.aims if not aim.strongest.given]


def _used(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that have an effect."""
    return {
        key: value
        for key, value in recipe.items()
        if key not in DEPENDENT or recipe.get(DEPENDENT[key][0]) == DEPENDENT[key][1]
    }


def _differences(aims: Sequence[Aim]) -> dict[str, dict[str, list[Aim]]]:
    """Settings that are not the same for all models that use them: for each, its values with the models."""
    used = [_used(aim.recipe) for aim in aims]
    found: dict[str, dict[str, list[Aim]]] = {}
    for field in dict.fromkeys(key for recipe in used for key in recipe):
        groups: dict[str, list[Aim]] = {}
        for aim, recipe in zip(aims, used, strict=True):
            if field in recipe:
                groups.setdefault(words(recipe[field], exact=True), []).append(aim)
        if len(groups) > 1:
            found[field] = groups
    return found


def _shared(aims: Sequence[Aim]) -> set[str]:
    """Settings that all models use, with one value."""
    return (
        set.intersection(*(set(_used(aim.recipe)) for aim in aims)) - set(_differences(aims))
        if aims
        else set()
    )


def _clause(fields: Sequence[str], found: Mapping[str, Mapping[str, list[Aim]]]) -> str:
    """ "lr is 0.01 for undefended and 0.001 for BiDO", or, of several settings, "lr 0.01 and epochs 20 for …, but …"."""
    members = list(found[fields[0]].values())
    most = max(members, key=len)
    many = len(most) > MOST_NAMED  # that agree: said last, and only counted
    order = sorted(range(len(members)), key=lambda place: many and members[place] is most)
    whom = [
        f"{len(most)} other models" if many and members[place] is most else named(members[place])
        for place in order
    ]
    values = [[list(found[field])[place] for field in fields] for place in order]
    shown = [field.replace("_", " ") for field in fields]
    if len(fields) == 1:
        return f"{shown[0]} is {listed([f'{value} for {who}' for (value,), who in zip(values, whom, strict=True)])}"
    pairs = [
        [f"{field} {value}" for field, value in zip(shown, chosen, strict=True)]
        for chosen in values
    ]
    return ", but ".join(
        f"{listed(settings)} for {who}" for settings, who in zip(pairs, whom, strict=True)
    )


def _begun(stage: FirstStage) -> str:
    own = f"{number(stage.epochs)} epochs on {PEOPLE.get(stage.data, '{} people').format(number(stage.classes, 'count'))}"
    return f"{_begun(stage.before)}, then {own}" if stage.before else own


def _spelled(settings: Mapping[str, Any], *, idle: bool = False) -> str:
    """Settings as "epochs 20, lr 0.001"; those that do nothing are left out unless they are wanted."""
    shown = {key: value for key, value in settings.items() if idle or not _idle(key, value)}
    return ", ".join(
        f"{key.replace('_', ' ')} {words(value, exact=True)}" for key, value in shown.items()
    )


def _idle(key: str, value: Any) -> bool:
    return (
        value is None or value is False or value in ([], {}) or (key in IDLE and value == IDLE[key])
    )
