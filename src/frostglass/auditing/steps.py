"""The steps of an audit: how each is computed, saved and loaded.

Raise a step's version when its result changes. Inputs are keywords, and their names are part of a
result's key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.attacks.base import Attack, invert, prior_only
from frostglass.auditing.fractions import Fractions
from frostglass.auditing.products import (
    Exposure,
    ImageBatch,
    PretrainedAttack,
    Released,
    blank_view,
)
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.display import image_grid
from frostglass.core.pixels import ByteImages, mapped
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Shape, Split, Target, match_shape
from frostglass.core.views import ModelView
from frostglass.data._gather import write_images
from frostglass.data._splits import PIXELS, load_split, make_split, save_split
from frostglass.data.base import Dataset
from frostglass.defenses.base import Defense
from frostglass.deploy.amortizer import TrainedAmortizer
from frostglass.evaluators.verifier import Verifier, enrol
from frostglass.metrics.base import Evidence, Metric, Rows, Score, measure
from frostglass.models.checkpoint import load_target, save_target
from frostglass.models.cut import cut, encoded, halves
from frostglass.networks.amortizer import Amortizer
from frostglass.priors._files import load_prior, save_prior
from frostglass.priors._gan import SHEET
from frostglass.priors.base import PriorMethod
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.runtime.tensors import under_prefix, with_prefix
from frostglass.store.files import Work, read_tensors, write_tensors
from frostglass.store.step import Step
from frostglass.store.timing import seconds_of
from frostglass.training.build import rebuild_network
from frostglass.training.loop import train_target
from frostglass.training.settings import Training, stage_split

IMAGES = "images.safetensors"  # of reconstructions
CHUNK = 128  # images encoded together
TIMES = ("seconds", "stage_seconds")  # of a target's info: not saved, they differ between runs


def _split(
    dataset: Dataset, *, fractions: Fractions, files: str, seed: int, work: Work, **_: Any
) -> Split:
    return make_split(
        dataset,
        test_fraction=fractions.test,
        validation_fraction=fractions.validation,
        evaluator_fraction=fractions.evaluators,
        secret_people=fractions.secret,
        seed=seed,
        file=work.file(PIXELS),
    )


def _train(
    config: Training,
    *,
    split: Split,
    defenses: Sequence[Defense],
    data: str,
    files: str,
    start: Target | None,
    perceptual: Target | None,
    seed: int,
    work: Work,
    device: torch.device,
    devices: int = 1,
) -> Target:
    target = train_target(
        config,
        stage_split(split, data, seed=seed),
        defenses,
        start=start,
        perceptual=perceptual,
        seed=seed,
        work=work,
        device=device,
        devices=devices,
    )
    changes = [{"name": defense.name, **asdict(defense)} for defense in defenses]  # type: ignore[call-overload]
    recipe = {"training": asdict(config), "defenses": changes, "seed": seed}
    return replace(target, info={**target.info, "build": recipe})


def _cut(layer: str, *, target: Target, seed: int, work: Work, device: torch.device) -> Target:
    """Return a trained target whose features leave the device after a layer."""
    recipe = target.info["build"]
    training = {**recipe["training"], "cut": layer}
    info = {name: value for name, value in target.info.items() if name not in TIMES}
    return replace(
        target,
        cut=cut(target.module, layer, target.image_shape).tap,
        info={**info, "build": {**recipe, "training": training}},
    )


def _load_target(folder: Path, device: torch.device) -> Target:
    target = load_target(folder, rebuild_network)
    target.module.to(device)
    return replace(target, info={**target.info, "seconds": seconds_of(folder)})


def _train_prior(
    method: PriorMethod,
    *,
    public: Images,
    view: ModelView | None,
    files: str,
    base: Prior | None,
    seed: int,
    work: Work,
    device: torch.device,
    devices: int = 1,
) -> Prior:
    options: Any = {"seed": seed, "work": work, "device": device, "devices": devices}
    return method.train(public, view, base=base, **options)


def _save_prior(prior: Prior, folder: Path) -> None:
    """Write a prior and a sheet of samples; one that completes hints has none to show."""
    save_prior(prior, folder)
    if prior.condition != "hint":
        image_grid(sample_sheet(prior)).save(folder / "samples.png")


def sample_sheet(prior: Prior) -> Tensor:
    """Draw the images of a prior's sample sheet."""
    latents = prior.draw(*(generator_for(0, "sheet", number) for number in range(SHEET)))
    labels = torch.arange(SHEET, device=latents.device) % prior.classes if prior.classes else None
    with frozen(*prior.modules), torch.no_grad():
        return prior.images(latents, labels)


def _load_prior(folder: Path, device: torch.device) -> Prior:
    prior = load_prior(folder)
    for module in prior.modules:
        module.to(device)
    return prior


def _train_amortizer(
    config: Amortizer, *, target: Target, prior: Prior, seed: int, work: Work, device: torch.device
) -> TrainedAmortizer:
    both = halves(target)
    encoder = _AnySize(both.encoder, both.image_shape)
    network = config.train(encoder, prior, seed=seed, work=work)
    return TrainedAmortizer(network, config, both.feature_shape, prior.latent)


class _AnySize(nn.Module):
    """An encoder that takes images of any size."""

    def __init__(self, encoder: nn.Module, image_shape: Shape):
        super().__init__()
        self.encoder = encoder
        self.image_shape = image_shape

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(match_shape(images, self.image_shape))


def _release(
    protection: Defense | None,
    *,
    target: Target,
    images: ImageBatch,
    prior: Prior | None,
    amortizer: TrainedAmortizer | None,
    number: int,
    seed: int,
    work: Work,
    device: torch.device,
) -> Released:
    encoder = halves(target).encoder
    pixels = images.images.to(device_of(encoder))
    if protection is None:
        return Released(encoded(encoder, pixels).cpu())
    assets = Assets(prior=prior, amortizer=amortizer)
    seed = seed_for(seed, "release", number)
    release = protection.release(encoder, pixels, assets, seed=seed, work=work)
    ceiling = None if release.ceiling is None else release.ceiling.detach().cpu()
    return Released(release.features.detach().cpu(), release.facts, ceiling=ceiling)


def _save_released(released: Released, folder: Path) -> None:
    facts = [dict(row) for row in released.facts]
    tensors = {"features": released.features}
    if released.ceiling is not None:
        tensors["ceiling"] = released.ceiling
    write_tensors(folder / "released.safetensors", tensors, {"facts": facts})


def _load_released(folder: Path, device: torch.device) -> Released:
    tensors, values = read_tensors(folder / "released.safetensors")
    facts = tuple(values["facts"])
    return Released(tensors["features"], facts, ceiling=tensors.get("ceiling"))


def _pretrain(
    attack: Attack,
    *,
    target: Target,
    assets: Assets,
    seed: int,
    work: Work,
    device: torch.device,
) -> PretrainedAttack:
    """Let an attack learn what it can before it sees released features; zeros stand for them."""
    invert(attack, blank_view(target, attack), assets, people=range(2), seed=seed, work=work)
    names = attack.pretrained_checkpoints
    return PretrainedAttack({name: saved for name in names if (saved := work.load(name))})


def _save_pretrained(pretrained: PretrainedAttack, folder: Path) -> None:
    for name, (tensors, values) in pretrained.checkpoints.items():
        write_tensors(folder / f"{name}.safetensors", tensors, values)


def _load_pretrained(folder: Path, device: torch.device) -> PretrainedAttack:
    paths = sorted(folder.glob("*.safetensors"))
    checkpoints = {path.stem: read_tensors(path) for path in paths}
    return PretrainedAttack(checkpoints, seconds_of(folder))


def _attack(
    attack: Attack,
    *,
    exposure: Exposure,
    assets: Assets,
    people: Sequence[int],
    pretrained: PretrainedAttack | None,
    seed: int,
    work: Work,
    device: torch.device,
) -> Reconstructions:
    for name, checkpoint in pretrained.checkpoints.items() if pretrained else ():
        if work.load(name) is None:
            work.save(name, *checkpoint)
    return invert(attack, exposure.view(attack), assets, people=people, seed=seed, work=work)


def _prior_only(
    candidates: int,
    *,
    prior: Prior | None,
    public: Images | None,
    people: Sequence[int],
    known: KnownAttribute | None = None,
    seed: int,
    work: Work,
    **_: Any,
) -> Reconstructions:
    return prior_only(prior, people, candidates, public=public, known=known, seed=seed, work=work)


def _save_reconstructions(result: Reconstructions, folder: Path) -> None:
    optional = {
        "draws": result.draws,
        "steps": result.steps,
        "broken": result.broken,
        "partial": result.partial,
        "trace": result.trace,
    }
    tensors = {
        "labels": result.labels,
        "latents": result.latents,
        "confidence": result.confidence,
        **{name: column for name, column in optional.items() if column is not None},
    }
    write_tensors(folder / "reconstructions.safetensors", tensors, {"queries": result.queries})
    write_images(result.images, folder / IMAGES)


def _load_reconstructions(folder: Path, device: torch.device) -> Reconstructions:
    tensors, values = read_tensors(folder / "reconstructions.safetensors")
    values |= {**tensors, "seconds": seconds_of(folder)}
    return Reconstructions(ByteImages(mapped(folder / IMAGES), folder / IMAGES), **values)


def _score(
    metrics: Sequence[Metric],
    *,
    reconstructions: Reconstructions,
    victims: ImageBatch | None,
    split: Split,
    evaluators: Sequence[Target],
    verifiers: Sequence[Verifier],
    embedder: Target | None,
    target: Target,
    embeds: bool,
    draws: tuple[Reconstructions, Reconstructions] | None = None,
    **_: Any,
) -> Rows:
    people = len(reconstructions.labels)
    evidence = Evidence(
        reconstructions,
        target,
        evaluators,
        split,
        victims=None if victims is None else victims.images.unflatten(0, (people, -1)),
        embedder=embedder,
        embeds=embeds,
        verifiers=verifiers,
        draws=None if draws is None else (draws[0].images, draws[1].images),
    )
    return measure(metrics, evidence)


def _enrol(_: None, *, evaluator: Target, split: Split, **__: Any) -> Verifier:
    return enrol(evaluator, split)


def _save_rows(rows: Rows, folder: Path) -> None:
    tensors = {"labels": rows.labels, **with_prefix("column", dict(rows.columns))}
    if rows.draws is not None:
        tensors["draws"] = rows.draws
    summaries = {name: asdict(score) for name, score in rows.summaries.items()}
    write_tensors(folder / "rows.safetensors", tensors, {"summaries": summaries})


def _load_rows(folder: Path, device: torch.device) -> Rows:
    tensors, values = read_tensors(folder / "rows.safetensors")
    return Rows(
        labels=tensors["labels"],
        columns=under_prefix("column", tensors),
        draws=tensors.get("draws"),
        summaries={
            name: Score(**score | {"values": tuple(score["values"])})
            for name, score in values["summaries"].items()
        },
    )


def _target_facts(target: Target) -> Mapping[str, Any]:
    return target.info.get("facts", {})


SPLIT = Step("split", 3, _split, save_split, lambda folder, _: load_split(folder))
TARGET = Step("target", 9, _train, save_target, _load_target, facts=_target_facts, trains=True)
# A target too, and kept with the others.
CUT = Step("target", 1, _cut, save_target, _load_target, facts=_target_facts)
PRIOR = Step("prior", 5, _train_prior, _save_prior, _load_prior, trains=True)
AMORTIZER = Step("amortizer", 3, _train_amortizer, TrainedAmortizer.save, TrainedAmortizer.load)
RELEASE = Step("release", 2, _release, _save_released, _load_released)
PRETRAIN = Step("pretrain", 2, _pretrain, _save_pretrained, _load_pretrained)
ATTACK = Step("attack", 8, _attack, _save_reconstructions, _load_reconstructions)
PRIOR_ONLY = Step("prior_only", 4, _prior_only, _save_reconstructions, _load_reconstructions)
VERIFIER = Step("verifier", 1, _enrol, Verifier.save, Verifier.load)
SCORES = Step("scores", 6, _score, _save_rows, _load_rows)

# What shows private people: their images, the features of these, and their reconstructions.
PRIVATE = (SPLIT, RELEASE, ATTACK)
