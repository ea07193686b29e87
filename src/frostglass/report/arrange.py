"""Group the audits of several runs into studies, subjects and entries."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from frostglass.attacks.base import attacks
from frostglass.report.entry import Entry
from frostglass.report.labels import distinct, titled
from frostglass.report.load import Run
from frostglass.report.study import Study, Subject
from frostglass.report.text import spoken


def group(runs: Sequence[Run]) -> list[Study]:
    """Put runs on the same images with the same evaluators into one study, others apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        facts = run.facts
        images = getattr(facts.audits[0], "images_per_person", None)
        people = [facts.surface, facts.data.get("split"), facts.identities, images]
        deciding = facts.audits[0].controls.deciding
        key = json.dumps([people, deciding, [network.key for network in facts.networks]])
        groups.setdefault(key, []).append(run)
    return [_study(members) for members in groups.values()]


def _study(runs: Sequence[Run]) -> Study:
    entries = [Entry("", "", run, place) for run in runs for place in range(len(run.facts.audits))]
    # Runs may share an audit, which is shown once.
    by_result = {
        json.dumps([entry.facts.keys, entry.facts.controls.model_dump()]): entry
        for entry in reversed(entries)
    }
    entries = list(by_result.values())[::-1]
    entries.sort(key=lambda entry: ("undefended", "given", "defended").index(entry.kind))
    arrange = _models if entries[0].surface == "model" else _protections
    return Study(tuple(runs), tuple(arrange(entries)))


def _grouped(entries: Iterable[Entry], key: Callable[[Entry], Any]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(json.dumps(key(entry)), []).append(entry)
    return list(groups.values())


def _models(entries: Sequence[Entry]) -> list[Subject]:
    """Group by model; an audit is labelled by the settings in which it differs from others."""

    def audit(entry: Entry) -> dict[str, Any]:
        facts = entry.facts
        attack = {"case": entry.method, "title": entry.title, "attack": facts.attack}
        more = {"seed": facts.seed, "prior": facts.prior, "label": facts.label}
        return _model(entry) | attack | more | {"run": entry.run.facts.name}

    entries = [replace(entry, method=entry.facts.case or entry.title) for entry in entries]
    labels = distinct([entry.defense for entry in entries], [audit(entry) for entry in entries])
    entries = [replace(entry, label=label) for entry, label in zip(entries, labels, strict=True)]
    groups = _grouped(entries, lambda entry: [entry.kind, _model(entry)])
    names = distinct([g[0].defense for g in groups], [_model(g[0]) for g in groups])
    return [Subject(name, tuple(members)) for name, members in zip(names, groups, strict=True)]


def _model(entry: Entry) -> dict[str, Any]:
    """Return what makes a model another model."""
    recipe = {key: value for key, value in entry.facts.training.recipe.items() if key != "seed"}
    return {"defense": entry.facts.defenses, "model": entry.facts.target.model, "recipe": recipe}


def _protections(entries: Sequence[Entry]) -> list[Subject]:
    """Group by what was released; an audit is labelled by its protection and its attack."""
    groups = _grouped(entries, lambda entry: entry.facts.keys["exposure"])
    names = distinct([g[0].defense for g in groups], [_protection(g[0]) for g in groups])
    subjects = []
    for name, members, methods in zip(names, groups, _methods(groups), strict=True):
        facts = [{"label": e.facts.label, "run": e.run.facts.name} for e in members]
        labels = distinct([f"{name} · {method}" for method in methods], facts)
        subjects.append(Subject(name, tuple(map(_relabelled, members, labels, methods))))
    return subjects


def _relabelled(entry: Entry, label: str, method: str) -> Entry:
    return replace(entry, label=label, method=method)


def _protection(entry: Entry) -> dict[str, Any]:
    """Return what makes a protection another one."""
    facts = entry.facts
    # The case names the attack.
    label = f", {facts.label}, ".replace(f", {facts.case}, ", ", ", 1).strip(", ")
    place = {"cut": facts.cut, "model": facts.target.model, "attributes": facts.attributes}
    more = {"seed": facts.seed, "label": label, "run": entry.run.facts.name}
    return {"defense": facts.defenses} | place | more


def _methods(groups: Sequence[Sequence[Entry]]) -> list[list[str]]:
    """Name attacks: by the config's case, unless cases name the protections, else by title."""
    cases = [{entry.facts.case for entry in members} for members in groups]
    of_protections = all(len(some) == 1 for some in cases) and len(set.union(*cases)) > 1
    keys = [
        [json.dumps(["" if of_protections else e.facts.case, e.facts.attack]) for e in members]
        for members in groups
    ]
    unique = {key: json.loads(key) for some in keys for key in some}
    titles = [titled(attacks, attack) for _, attack in unique.values()]
    names = distinct(
        [case or title for (case, _), title in zip(unique.values(), titles, strict=True)],
        [{"title": t, "attack": a} for (_, a), t in zip(unique.values(), titles, strict=True)],
    )
    called = dict(zip(unique, map(spoken, names), strict=True))
    return [[called[key] for key in some] for some in keys]
