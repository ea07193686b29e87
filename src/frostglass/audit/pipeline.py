"""The whole program: data, target, prior, attack, scores, and the controls beside them."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frostglass.attacks.base import Attack, invert, prior_only
from frostglass.audit.config import Experiment, Fractions
from frostglass.audit.controls import Controls, judge
from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.core.views import ModelView
from frostglass.data._splits import load_split, make_split, save_split
from frostglass.data.base import Dataset
from frostglass.defenses.base import Defense, defenses
from frostglass.metrics.base import Evidence, Metric, Rows, measure
from frostglass.models.checkpoint import load_target, save_target
from frostglass.priors._files import load_prior, save_prior
from frostglass.priors._gan import SHEET
from frostglass.priors.base import PriorMethod, check_unseen
from frostglass.priors.context import hints_of
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.runtime.tensors import under_prefix, with_prefix
from frostglass.store.files import (
    Work,
    read_json,
    read_tensors,
    sheet_of,
    write_bytes,
    write_tensors,
)
from frostglass.store.store import Step, Store
from frostglass.training.build import untrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training, first_stage, stage_split

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Audit:
    """What one experiment found: the trained target, the reconstructions, their scores and the controls.

    `undefended` is the model of the positive control, trained by the same recipe.
    """

    experiment: Experiment
    split: Split
    target: Target
    evaluators: tuple[Target, ...]
    prior: Prior
    found: Reconstructions
    rows: Rows
    prior_rows: Rows
    controls: Controls
    undefended: Target | None = None


class Products(NamedTuple):
    """What the steps of one experiment made; `control` is (rows, prior-only rows) of the positive control, `undefended` its model."""

    split: Split
    evaluators: tuple[Target, ...]
    target: Target
    prior: Prior
    found: Reconstructions
    rows: Rows
    prior_rows: Rows
    control: tuple[Rows, Rows] | None
    undefended: Target | None


def run(experiment: Experiment, store: Store) -> Audit:
    """Run one experiment, or what the store does not have of it yet, and weigh it against its controls."""
    made = produce(experiment, store)
    partial, broken = (
        0 if column is None else int(column.sum())
        for column in (made.found.partial, made.found.broken)
    )
    controls = judge(
        made.rows, made.prior_rows, made.control, margin=experiment.judging.margin, target=made.target, evaluators=made.evaluators,
        partial=partial, broken=broken, strangers="seen_identities" not in made.prior.info,
    )  # fmt: skip
    return Audit(
        experiment,
        made.split,
        made.target,
        made.evaluators,
        made.prior,
        made.found,
        made.rows,
        made.prior_rows,
        controls,
        made.undefended,
    )


def produce(exp: Experiment, store: Store) -> Products:
    """All steps of an experiment, in order.

    Private pictures are reachable from `_train` and `_score` only: prior and attack get public images, a view and a prior. The one exception is said by the prior
    itself: one that completes hints is given a spoiled picture of each person.
    """
    seed = exp.seed
    split = store.step(SPLIT, exp.data, exp.split, fingerprint(exp.data), seed=seed)
    evaluators = tuple(
        classifier(store, config, split, (), seed=seed_for(seed, "evaluator", number))
        for number, config in enumerate(exp.evaluators)
    )
    target = classifier(store, exp.target, split, exp.defenses, seed=seed)
    prior, found, rows, prior_rows = _attack(exp, store, split, evaluators, target)
    control = undefended = None
    if exp.judging.positive_control:
        undefended = classifier(store, replace(exp.target, weights=None), split, (), seed=seed)
        control = _attack(exp, store, split, evaluators, undefended)[2:]
    return Products(split, evaluators, target, prior, found, rows, prior_rows, control, undefended)


def classifier(
    store: Store,
    config: Training,
    split: Split,
    defenses: Sequence[Defense] = (),
    perceptual: Target | None = None,
    *,
    seed: int,
    data: str = "private",
) -> Target:
    """A trained classifier, after the stages that come before it; grids share those they have in common."""
    start = None
    if first := first_stage(config, defenses):
        start = classifier(
            store,
            first.config,
            split,
            first.defenses,
            seed=seed_for(seed, "stage"),
            data=first.data,
        )
    judge = [] if perceptual is None else [perceptual]
    target = store.step(
        TARGET, config, split, defenses, data, fingerprint(config), start, *judge, seed=seed
    )
    if start is None:
        return target
    return replace(
        target,
        info={
            **target.info,
            "stage_seconds": start.info["seconds"] + start.info.get("stage_seconds", 0.0),
        },
    )


def _attack(
    exp: Experiment, store: Store, split: Split, evaluators: Sequence[Target], target: Target
) -> tuple[Prior, Reconstructions, Rows, Rows]:
    """Prior, attack and scores for one target, with the prior-only control scored the same way."""
    seed, people = exp.seed, exp.judging.identities
    view = target.view(exp.attack.access)
    prior = trained_prior(store, exp.prior, split, view.averaged(exp.attack.samples), seed=seed)
    check_unseen(prior, split.classes)
    if prior.condition == "hint":
        prior = replace(
            prior,
            hints=hints_of(prior.info, first_pictures(split.test)).to(device_of(prior.generator)),
        )
    found = store.step(ATTACK, exp.attack, view, prior, people, seed=seed)
    blind = store.step(PRIOR_ONLY, exp.attack.keep, view, prior, people, seed=seed)
    rows = store.step(SCORES, exp.metrics, target, found, split, evaluators, seed=seed)
    prior_rows = store.step(SCORES, exp.metrics, target, blind, split, evaluators, seed=seed)
    return prior, found, rows, prior_rows


def trained_prior(
    store: Store, method: PriorMethod, split: Split, view: ModelView | None, *, seed: int
) -> Prior:
    """A trained prior, after the one it adds to; one that is fitted to a target is made anew for every target."""
    base = getattr(method, "base_method", None)
    under = [] if base is None else [trained_prior(store, base, split, view, seed=seed)]
    return store.step(
        PRIOR,
        method,
        split.public,
        view if method.tied else None,
        fingerprint(method),
        *under,
        seed=seed,
    )


def first_pictures(images: Images) -> Tensor:
    """The first picture of each class, (K, C, H, W)."""
    return images.floats(
        torch.stack(
            [(images.labels == label).nonzero()[0, 0] for label in range(len(images.names))]
        )
    )


def fingerprint(method: Any) -> str:
    """A hash of the files a method reads, so that a result's key changes when they do; "" for methods that read none."""
    paths = method.files() if hasattr(method, "files") else []
    if not paths:
        return ""
    total = hashlib.sha256()
    for path in sorted(map(Path, paths)):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        # A file of the package itself is the same wherever it is installed.
        name = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
        total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()


def _split(dataset: Dataset, fractions: Fractions, _: str, *, seed: int, work: Work) -> Split:
    return make_split(
        dataset, test_fraction=fractions.test, validation_fraction=fractions.validation, seed=seed
    )


def _train(
    config: Training, split: Split, chosen: Sequence[Defense], data: str, _: str, start: Target | None, perceptual: Target | None = None,
    *, seed: int, work: Work,
) -> Target:  # fmt: skip
    target = train_target(
        config,
        stage_split(split, data, seed=seed),
        chosen,
        start=start,
        perceptual=perceptual,
        seed=seed,
        work=work,
    )
    changes = [{"name": defense.name, **asdict(defense)} for defense in chosen]  # type: ignore[call-overload]
    recipe = {"training": asdict(config), "defenses": changes, "seed": seed}  # type: ignore[call-overload]
    return replace(target, info={**target.info, "build": recipe})


def rebuild(recipe: dict[str, Any]) -> torch.nn.Module:
    """The network of a stored target, before its weights are loaded."""
    chosen = [
        defenses.get(values["name"])(**{k: v for k, v in values.items() if k != "name"})
        for values in recipe["defenses"]
    ]
    names = tuple(map(str, range(recipe["classes"])))
    return untrained(
        Training(**recipe["training"]), names, recipe["image_shape"], chosen, seed=recipe["seed"]
    ).module


def _load_target(folder: Path) -> Target:
    target = load_target(folder, rebuild)
    target.module.to(default_device())
    return replace(
        target, info={**target.info, "seconds": read_json(folder / "timing.json")["seconds"]}
    )


def _save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior, and a sheet of its samples for people to look at; of one that completes hints there is nothing to show without any."""
    save_prior(prior, folder)
    if prior.condition != "hint":
        latents = prior.draw(*(generator_for(0, "sheet", number) for number in range(SHEET)))
        labels = (
            torch.arange(SHEET, device=latents.device) % prior.classes if prior.classes else None
        )
        with frozen(*prior.modules), torch.no_grad():
            write_bytes(folder / "samples.png", sheet_of(prior.images(latents, labels)))


def _load_prior(folder: Path) -> Prior:
    prior = load_prior(folder)
    for module in prior.modules:
        module.to(default_device())
    return prior


def _make_prior(
    method: PriorMethod,
    public: Images,
    view: ModelView | None,
    _: str,
    *base: Prior,
    seed: int,
    work: Work,
) -> Prior:
    return method.train(public, view, seed=seed, work=work, **({"base": base[0]} if base else {}))


def _attacked(view: ModelView, people: int | None) -> range:
    return range(min(people or view.classes, view.classes))


def _invert(
    attack: Attack, view: ModelView, prior: Prior, people: int | None, *, seed: int, work: Work
) -> Reconstructions:
    return invert(attack, view, prior, labels=_attacked(view, people), seed=seed, work=work)


def _prior_only(
    candidates: int, view: ModelView, prior: Prior, people: int | None, *, seed: int, work: Work
) -> Reconstructions:
    return prior_only(prior, _attacked(view, people), candidates, seed=seed)


def _score(
    chosen: Sequence[Metric],
    target: Target,
    found: Reconstructions,
    split: Split,
    evaluators: Sequence[Target],
    *,
    seed: int,
    work: Work,
) -> Rows:
    return measure(chosen, Evidence(found, target, evaluators, split))


def save_found(found: Reconstructions, folder: Path) -> None:
    tensors = {
        "images": found.images,
        "labels": found.labels,
        "latents": found.latents,
        "confidence": found.confidence,
    }
    tensors |= {
        name: column
        for name in ("draws", "steps", "broken", "partial")
        if (column := getattr(found, name)) is not None
    }
    write_tensors(folder / "found.safetensors", tensors, {"queries": found.queries})


def load_found(folder: Path) -> Reconstructions:
    tensors, values = read_tensors(folder / "found.safetensors")
    return Reconstructions(
        **tensors, queries=values["queries"], seconds=read_json(folder / "timing.json")["seconds"]
    )  # type: ignore[arg-type]


def save_rows(rows: Rows, folder: Path) -> None:
    draws = {} if rows.draws is None else {"draws": rows.draws}
    write_tensors(
        folder / "rows.safetensors",
        {"labels": rows.labels, **draws, **with_prefix("column", dict(rows.columns))},
    )


def load_rows(folder: Path) -> Rows:
    tensors, _ = read_tensors(folder / "rows.safetensors")
    return Rows(
        labels=tensors["labels"],
        columns=under_prefix("column", tensors),
        draws=tensors.get("draws"),
    )


SPLIT = Step("split", 1, _split, save_split, load_split)
TARGET = Step(
    "target",
    2,
    _train,
    save_target,
    _load_target,
    facts=lambda target: target.info.get("facts", {}),
)
PRIOR = Step("prior", 2, _make_prior, _save_prior, _load_prior)
ATTACK = Step("attack", 4, _invert, save_found, load_found)
PRIOR_ONLY = Step("prior_only", 2, _prior_only, save_found, load_found)
SCORES = Step("scores", 2, _score, save_rows, load_rows)
