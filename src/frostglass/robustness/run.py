"""The robustness of every model of a config: train or find it, measure, join seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frostglass.auditing.expand import GIVEN, NO_GRID, UNDEFENDED
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.auditing.pipeline import expose, split_of
from frostglass.auditing.run_folder import described
from frostglass.auditing.victims import attacked_people
from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.core.types import Images, Split, Target
from frostglass.data._splits import held_out_share
from frostglass.robustness.base import Backdoor, Threat
from frostglass.robustness.measuring import ACCURACY, Table, accuracy, check, labels_of, success
from frostglass.robustness.poisoning import impossible_rate, poison
from frostglass.robustness.rates import Rate
from frostglass.store.files import read_tensors, write_tensors
from frostglass.store.step import Step
from frostglass.store.store import Store

# Beside the success of a backdoor: its trigger on a model that was not poisoned, and the accuracy
# of the one that was.
CONTROL, POISONED = "not poisoned", "accuracy when poisoned"


def _measure(
    threat: Threat | None, *, target: Target, split: Split, people: int, images: int, seed: int,
    **_: Any,
) -> Rate:  # fmt: skip
    """Measure a threat on held-out images; None stands for the accuracy."""
    if threat is None:
        return accuracy(target, split.test)
    held_out = split.test
    if not isinstance(threat, Backdoor):
        held_out = first_images(held_out, people, images)
    return success(target, held_out, threat, seed=seed)


def _save(rate: Rate, folder: Path) -> None:
    tensors = {"hits": rate.hits, "tried": rate.tried}
    write_tensors(folder / "rate.safetensors", tensors, {"queries": rate.queries})


def _load(folder: Path, device: torch.device) -> Rate:
    tensors, values = read_tensors(folder / "rate.safetensors")
    return Rate(tensors["hits"], tensors["tried"], values["queries"])


ROBUSTNESS = Step("robustness", 1, _measure, _save, _load)


def first_images(images: Images, people: int, count: int) -> Images:
    """Return the first images of the first people, so many of each."""
    rows = [(images.labels == who).nonzero().flatten()[:count] for who in range(people)]
    return images.at(torch.cat(rows))


@dataclass(frozen=True)
class ModelTable:
    """The rates of one model, over the seeds of a config."""

    title: str
    defenses: tuple[Mapping[str, Any], ...]
    seeds: tuple[int, ...]
    table: Table


@dataclass(frozen=True)
class Measured:
    """The models of one config; `failed` says which are missing, and why."""

    name: str
    settings: Mapping[str, Any]
    people: tuple[str, ...]
    threats: Mapping[str, Threat]
    models: tuple[ModelTable, ...]
    failed: tuple[str, ...] = ()


def measure_all(settings: Mapping[str, Any], store: Store) -> Measured:
    """Measure every model of a config; shared steps run once, a failure leaves the others."""
    chosen = experiments(settings)
    if lines := problems(chosen):
        raise ConfigError(lines)
    tables: dict[str, dict[int, tuple[str, Experiment, Table]]] = {}
    failed: list[str] = []
    for label, exp in chosen:
        seeds = tables.setdefault(_model_key(exp), {})
        if exp.seed in seeds:  # of another inversion attack in the grid
            continue
        try:
            seeds[exp.seed] = (label, exp, measure_experiment(exp, store))
        except (RunError, DataError) as error:
            if len(chosen) == 1:
                raise
            failed.append(f"{label}: {error}")
    tables = {key: seeds for key, seeds in tables.items() if seeds}
    if not tables:
        raise RunError("; ".join(failed))
    first = chosen[0][1]
    return Measured(
        name=first.name,
        settings=settings,
        people=split_of(first, store).classes,
        threats=labels_of(first.threats),
        models=tuple(_over_seeds(list(seeds.values())) for seeds in tables.values()),
        failed=tuple(failed),
    )


def _model_key(exp: Experiment) -> str:
    """Return what makes a model, but for the seed."""
    parts = (exp.data, exp.split, exp.target, exp.defenses, exp.perceptual, exp.judging)
    return repr(parts)


def measure_experiment(exp: Experiment, store: Store) -> Table:
    """Measure the accuracy of one model and each threat; a backdoor poisons a training of its own.

    Adversarial examples are made of `judging.images` held-out images of `judging.identities`
    people, triggers are tried on all held-out images.
    """
    split = split_of(exp, store)
    target = expose(exp, store, split, None).target
    check(target, exp.threats)

    def rate(threat: Threat | None, model: Target) -> Rate:
        return store.step(
            ROBUSTNESS,
            threat,
            target=model,
            split=split,
            people=len(attacked_people(exp, len(split.classes))),
            images=exp.judging.images,
            seed=exp.seed,
        )

    rates = {ACCURACY: rate(None, target)}
    for name, threat in labels_of(exp.threats).items():
        if isinstance(threat, Backdoor):
            bad = poison(split, threat, seed=exp.seed)
            poisoned = expose(exp, store, bad, None).target
            rates[name] = rate(threat, poisoned)
            rates[f"{name}, {CONTROL}"] = rate(threat, target)
            rates[f"{name}, {POISONED}"] = rate(None, poisoned)
        else:
            rates[name] = rate(threat, target)
    return Table(rates)


def problems(chosen: Sequence[tuple[str, Experiment]]) -> list[str]:
    """List what keeps threats from the models of these experiments, without computing."""
    lines = [line for _, exp in chosen for line in _problems(exp)]
    if len({repr(exp.threats) for _, exp in chosen}) > 1:
        lines.append("grid: threats must be the same in all experiments: use several configs")
    return list(dict.fromkeys(lines))


def _problems(exp: Experiment) -> list[str]:
    if exp.surface == "features" or exp.target.attributes:
        return [
            "target: robustness is measured on classifiers of people, and this one predicts "
            "attributes: remove target.attributes and target.cut"
        ]
    people, images, _ = exp.data.counts()
    held_out = (
        held_out_share(exp.data, exp.split.test) + exp.split.validation + exp.split.evaluators
    )
    train = round(images * (1 - held_out))
    lines = []
    for number, threat in enumerate(exp.threats):
        found = [f".{line}" for line in threat.problems(exp.data.image_shape, people)]
        if isinstance(threat, Backdoor):
            if exp.target.weights:
                found.append(
                    ": backdoors poison training, and target.weights are loaded without training: "
                    "remove one of the two"
                )
            elif rate := impossible_rate(threat, train, train - train // people):
                found.append(f".{rate}")
        lines += [f"threats[{number}]{line}" for line in found]
    try:
        labels_of(exp.threats)
    except ConfigError as error:
        lines += error.problems
    return lines


def _over_seeds(rows: Sequence[tuple[str, Experiment, Table]]) -> ModelTable:
    """Join the tables of one model, trained with several seeds."""
    label, exp, first = rows[0]
    tables = [table for _, _, table in rows]
    rates = {name: Rate.joined([table[name] for table in tables]) for name in first.rates}
    methods = tuple(described(defense) for defense in exp.defenses)
    seeds = tuple(one.seed for _, one, _ in rows)
    return ModelTable(_title(label, exp), methods, seeds, Table(rates))


def _title(label: str, exp: Experiment) -> str:
    """Return what a model is called: its label in the grid, without case and seed."""
    words = label.replace(exp.case, "", 1).split(", ")
    parts = [word for word in words if word not in ("", NO_GRID, f"seed={exp.seed}")]
    names = ", ".join(parts) or " + ".join(defense.name for defense in exp.defenses)
    return names or (GIVEN if exp.target.weights else UNDEFENDED)
