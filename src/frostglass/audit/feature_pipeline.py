"""The audit of a split model, step by step: what the device releases, what an attacker rebuilds of it, and what the server still learns."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from frostglass.attacks.base import prior_only
from frostglass.attacks.features.base import FeatureAttack, intercept, spread_evenly
from frostglass.audit.feature_controls import (
    FeatureControls,
    judge_features,
    separation,
    transport,
)
from frostglass.audit.features import FeatureExperiment
from frostglass.audit.pipeline import (
    SPLIT,
    classifier,
    fingerprint,
    load_found,
    load_rows,
    save_found,
    save_rows,
    trained_prior,
)
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Shape, Split, Target, match_shape
from frostglass.core.views import FeatureView
from frostglass.defenses.base import Defense, Release
from frostglass.deploy.client import TrainedAmortizer
from frostglass.metrics._utility import utility, varied
from frostglass.metrics.base import Evidence, Rows, measure
from frostglass.metrics.face import Face, feature_similarity, reference_similarities
from frostglass.metrics.likeness import Likeness
from frostglass.metrics.manifold import Manifold
from frostglass.metrics.recognition import Recognition
from frostglass.models.cut import halves
from frostglass.networks.amortizer import Amortizer
from frostglass.networks.embedding import embed, public_centre
from frostglass.priors.base import check_unseen
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seed_for
from frostglass.store.files import Work, read_json, read_tensors, write_tensors
from frostglass.store.store import Step, Store
from frostglass.training.settings import attributes_in, classes_of, targets_for

CHUNK = 128
METRICS: tuple[Any, ...] = (Recognition(), Face(), Likeness(), Manifold())


@dataclass(frozen=True)
class Pictures:
    """Pictures (N, C, H, W) in [0, 1] under a key made of their content, so that what a device releases for them can be kept."""

    images: Tensor
    key: str

    @classmethod
    def of(cls, images: Tensor, whose: str = "") -> "Pictures":
        """Pictures without content, with which a run is foreseen, are told apart by their number, their shape and whose they are."""
        content = (
            whose.encode()
            if images.is_meta
            else images.detach().cpu().contiguous().numpy().tobytes()
        )
        return cls(
            images, hashlib.sha256(f"{tuple(images.shape)}".encode() + content).hexdigest()[:24]
        )


@dataclass(frozen=True)
class Released:
    """What a device let out for pictures, and what its protection measured on the way."""

    features: Tensor
    facts: tuple[Mapping[str, Any], ...] = ()
    key: str = ""


@dataclass(frozen=True)
class Device:
    """A device in the field: its half of a target, and its protection. What it releases is kept in the store."""

    store: Store
    target: Target
    protection: Defense | None
    prior: Prior | None
    amortizer: TrainedAmortizer | None
    seed: int

    def release(self, pictures: Pictures, number: int = 0) -> Released:
        """What leaves for these pictures; releases of different numbers draw their random numbers apart."""
        number = number if self.protection else 0  # plain features are the same each time
        return self.store.step(
            RELEASE,
            self.protection,
            self.target,
            pictures,
            self.prior,
            self.amortizer,
            number,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Line:
    """The wire between a device and its server while victims' pictures are processed; its key is that of what was released."""

    device: Device
    victims: Pictures
    key: str


@dataclass(frozen=True)
class Lesson:
    """What an attack learned from plain features of public pictures: its checkpoints by their names, tensors and values."""

    kept: Mapping[str, tuple[dict[str, Tensor], dict[str, Any]]]
    seconds: float = 0.0
    key: str = ""


@dataclass(frozen=True)
class FeatureAudit:
    """What one experiment found: `utility` of the released features on the server and `plain` of unprotected ones, `facts` about what leaves."""

    experiment: FeatureExperiment
    split: Split
    victims: Images
    target: Target
    evaluators: tuple[Target, ...]
    embedder: Target
    released: Released
    found: Reconstructions
    rows: Rows
    prior_rows: Rows
    utility: Mapping[str, Any]
    plain: Mapping[str, Any]
    facts: Mapping[str, Any]
    controls: FeatureControls


class FeatureProducts(NamedTuple):
    """What the steps of one experiment made; `control` is (rows, prior-only rows) of the positive control, `draws` are two sets of blind draws."""

    split: Split
    evaluators: tuple[Target, ...]
    embedder: Target
    people: list[int]
    victims: Images
    device: Device
    prior: Prior | None
    released: Released
    found: Reconstructions
    rows: Rows
    prior_rows: Rows
    control: tuple[Rows, Rows] | None
    draws: tuple[Reconstructions, Reconstructions]


def run_features(exp: FeatureExperiment, store: Store) -> FeatureAudit:
    """Run one experiment, or what the store does not have of it yet, and weigh it against its controls."""
    made = produce_features(exp, store)
    partial, broken = (
        0 if column is None else int(column.sum())
        for column in (made.found.partial, made.found.broken)
    )
    controls = judge_features(
        made.rows, made.prior_rows, made.control, reference_similarities(made.embedder, made.split.train, made.split.public),
        margin=exp.judging.margin, evaluators=made.evaluators, partial=partial, broken=broken,
        strangers=made.prior is None or "seen_identities" not in made.prior.info,
    )  # fmt: skip
    useful, bare, facts = usefulness(made.device, made.victims, made.released)
    facts |= separation(made.embedder, made.split, made.found)
    facts |= transport(made.found, made.victims, made.draws, len(made.people), exp.judging.pictures)
    return FeatureAudit(
        exp, made.split, made.victims, made.device.target, made.evaluators, made.embedder, made.released, made.found, made.rows, made.prior_rows,
        useful, bare, facts, controls,
    )  # fmt: skip


def produce_features(exp: FeatureExperiment, store: Store) -> FeatureProducts:
    """All steps of an experiment, in order.

    Private pictures are reachable from the training, the device and the scores only: an attack gets a view of the wire and what it knows of the world.
    """
    seed = exp.seed
    split = store.step(SPLIT, exp.data, exp.split, fingerprint(exp.data), seed=seed)
    people, victims = victims_of_experiment(exp, split)
    evaluators = tuple(
        classifier(store, config, split, seed=seed_for(seed, "evaluator", number))
        for number, config in enumerate(exp.evaluators)
    )
    embedder = classifier(
        store, exp.embedder, split, seed=seed_for(seed, "embedder"), data="public"
    )
    device = device_of_experiment(exp, store, split)
    released, found, rows, prior_rows = _audit(
        exp, store, split, evaluators, embedder, device, people, victims
    )
    control = None
    if exp.judging.positive_control:
        plain = classifier(store, replace(exp.target, weights=None), split, seed=seed)
        control = _audit(
            exp,
            store,
            split,
            evaluators,
            embedder,
            Device(store, plain, None, None, None, seed),
            people,
            victims,
        )[2:]
    prior, candidates = attackers_prior(exp, store, split), exp.judging.pictures * exp.attack.tries
    draws, others = (
        store.step(BLIND, candidates, prior, split.public, people, seed=one)
        for one in (seed, seed_for(seed, "more draws"))
    )
    return FeatureProducts(
        split,
        evaluators,
        embedder,
        people,
        victims,
        device,
        prior,
        released,
        found,
        rows,
        prior_rows,
        control,
        (draws, others),
    )


def device_of_experiment(exp: FeatureExperiment, store: Store, split: Split) -> Device:
    """The trained split model with its protection, and what that needs."""
    needed = exp.protection.needs if exp.protection else frozenset()
    defended = exp.training_defenses
    judge = (
        perceptual_of(exp, store, split)
        if any("perceptual" in defense.needs for defense in defended)
        else None
    )
    target = classifier(store, exp.target, split, defended, judge, seed=exp.seed)
    prior = (
        trained_prior(store, exp.prior, split, None, seed=exp.seed)
        if exp.prior and "prior" in needed
        else None
    )
    amortizer_ = (
        store.step(AMORTIZER, exp.amortizer, target, prior, seed=exp.seed)
        if "amortizer" in needed
        else None
    )
    return Device(store, target, exp.protection, prior, amortizer_, exp.seed)


def victims_of_experiment(exp: FeatureExperiment, split: Split) -> tuple[list[int], Images]:
    """The attacked people and their pictures, refused now and not after hours of work if they are all alike: what features are good for could not be told."""
    people, victims = victims_of(split, exp.judging.identities, exp.judging.pictures)
    varied(attributes_in(victims, classes_of(exp.target, split)))
    return people, victims


def perceptual_of(exp: FeatureExperiment, store: Store, split: Split) -> Target:
    return classifier(
        store, exp.perceptual, split, seed=seed_for(exp.seed, "perceptual"), data="public"
    )


def victims_of(split: Split, identities: int | None, pictures: int) -> tuple[list[int], Images]:
    """The attacked people, and the first held-out pictures of each, person by person."""
    people = list(range(min(identities or len(split.classes), len(split.classes))))
    rows = [(split.test.labels == label).nonzero().flatten()[:pictures] for label in people]
    if few := [
        split.classes[label]
        for label, index in zip(people, rows, strict=True)
        if len(index) < pictures
    ]:
        raise ConfigError(
            f"judging.pictures: {pictures} held-out pictures of each person are wanted, and {few[0]!r} has fewer: lower it, or raise split.test"
        )
    return people, split.test.at(torch.cat(rows))


def _audit(
    exp: FeatureExperiment, store: Store, split: Split, evaluators: tuple[Target, ...], embedder: Target, device: Device,
    people: list[int], victims: Images,
) -> tuple[Released, Reconstructions, Rows, Rows]:  # fmt: skip
    """What one device releases for the victims, what the attack rebuilds of it, and the scores of that and of blind draws."""
    pictures = Pictures.of(victims.floats())
    released = device.release(pictures)
    needed = exp.attack.needs
    prior = attackers_prior(exp, store, split)
    amortizer_ = (
        store.step(AMORTIZER, exp.amortizer, device.target, prior, seed=exp.seed)
        if "amortizer" in needed
        else None
    )
    line = Line(device, pictures, released.key)
    judge = perceptual_of(exp, store, split) if "perceptual" in needed else None
    known = embedder if "embedder" in needed else None
    lesson = (
        store.step(
            LESSON, exp.attack.lesson, device.target, split.public, known, judge, seed=exp.seed
        )
        if exp.attack.lesson
        else None
    )
    found = store.step(
        INTERCEPT,
        exp.attack,
        line,
        split.public,
        prior if "prior" in needed else None,
        amortizer_,
        known,
        judge,
        people,
        lesson,
        seed=exp.seed,
    )
    if lesson:
        found = replace(found, seconds=found.seconds + lesson.seconds)
    blind = store.step(
        BLIND, exp.judging.pictures * exp.attack.tries, prior, split.public, people, seed=exp.seed
    )
    scored = (
        store.step(
            FEATURE_SCORES,
            exp.attack.embeds and one is not blind,
            one,
            pictures,
            split,
            evaluators,
            embedder,
            device.target,
            seed=exp.seed,
        )
        for one in (found, blind)
    )
    return released, found, *scored  # type: ignore[return-value]


def attackers_prior(exp: FeatureExperiment, store: Store, split: Split) -> Prior | None:
    """The prior that the attacker has, made of other people than the victims."""
    if (method := exp.attacker_prior or exp.prior) is None:
        return None
    prior = trained_prior(store, method, split, None, seed=exp.seed)
    check_unseen(prior, split.classes)
    return prior


def release(
    protection: Defense | None, target: Target, pictures: Pictures, prior: Prior | None, amortizer_: TrainedAmortizer | None, number: int,
    *, seed: int, work: Work,
) -> Released:  # fmt: skip
    encoder = halves(target).encoder
    images = pictures.images.to(device_of(encoder))
    if protection is None:
        with frozen(encoder), torch.no_grad():
            return Released(torch.cat([encoder(part) for part in images.split(CHUNK)]).cpu())
    assets = Assets(prior=prior, amortizer=amortizer_.network if amortizer_ else None)
    made: Release = protection.release(
        encoder, images, assets, seed=seed_for(seed, "release", number), work=work
    )
    return Released(made.features.detach().cpu(), made.facts)


def _learn(
    attack: FeatureAttack,
    target: Target,
    public: Images,
    embedder: Target | None,
    perceptual: Target | None,
    *,
    seed: int,
    work: Work,
) -> Lesson:
    """Let an attack learn what it can before it sees what is released; a blank feature stands for that."""
    both = halves(target)
    view = FeatureView(
        both, torch.zeros(2, *both.feature_shape, device=device_of(both.encoder)), attack.granted
    )
    intercept(
        attack,
        view,
        Assets(public, embedder=embedder, perceptual=perceptual),
        torch.arange(2),
        seed=seed,
        work=work,
    )
    return Lesson({name: saved for name in attack.learned if (saved := work.load(name))})


def ask_device(attack: FeatureAttack, line: Line, public: Images) -> None:
    """Let the device release everything that an attack will ask it for, the victims' first features apart."""
    for number in range(1, attack.averaged):
        line.device.release(line.victims, number)
    if attack.protects:
        line.device.release(
            Pictures.of(public.floats(spread_evenly(len(public), attack.protects)), "public")
        )


def _intercept(
    attack: FeatureAttack, line: Line, public: Images, prior: Prior | None, amortizer_: TrainedAmortizer | None, embedder: Target | None,
    perceptual: Target | None, people: list[int], lesson: Lesson | None = None, *, seed: int, work: Work,
) -> Reconstructions:  # fmt: skip
    for name, (tensors, values) in lesson.kept.items() if lesson else ():
        if work.load(name) is None:
            work.save(name, tensors, values)
    device = line.device
    both = halves(device.target)
    where = device_of(both.encoder)
    view = FeatureView(
        both,
        device.release(line.victims).features.to(where),
        attack.granted,
        protect=lambda images, number: device.release(Pictures.of(images), number).features.to(
            where
        ),
        again=lambda number: device.release(line.victims, number).features.to(where),
    )
    assets = Assets(public, prior, amortizer_.network if amortizer_ else None, embedder, perceptual)
    return intercept(attack, view, assets, torch.tensor(people), seed=seed, work=work)


def blind_draws(
    candidates: int,
    prior: Prior | None,
    public: Images,
    people: list[int],
    *,
    seed: int,
    work: Work,
) -> Reconstructions:
    """What an attacker could show without any feature: draws of the prior, or where there is none pictures of other people."""
    if prior is not None:
        draws = prior_only(prior, people, candidates, seed=seed)
        return replace(draws, images=_fit(draws.images, public.shape))
    chosen = torch.randint(
        len(public), (len(people), candidates), generator=generator_for(seed, "blind")
    )
    images = public.floats(chosen.flatten()).unflatten(0, chosen.shape)
    nothing = torch.zeros(*chosen.shape, 0)
    return Reconstructions(
        images, torch.tensor(people), nothing, torch.zeros(chosen.shape), queries=0, seconds=0.0
    )


def _score(
    embeds: bool, found: Reconstructions, victims: Pictures, split: Split, evaluators: tuple[Target, ...], embedder: Target, target: Target,
    *, seed: int, work: Work,
) -> Rows:  # fmt: skip
    """The columns of all measures, and `similarity`: how near what was found comes to the victim's embedding, by whatever way the attack goes."""
    people = len(found.labels)
    pictures = victims.images.unflatten(0, (people, -1))
    rows = measure(
        METRICS, Evidence(found, target, evaluators, split, victims=pictures, embedder=embedder)
    )
    similarity = rows.columns["face_similarity"]
    if embeds:
        centre = public_centre(embedder, split.public)
        truth = (
            embed(embedder, pictures.flatten(0, 1), centre).cpu().unflatten(0, pictures.shape[:2])
        )
        similarity = feature_similarity(found.latents, truth)
    return Rows(
        labels=rows.labels, columns={**rows.columns, "similarity": similarity}, draws=rows.draws
    )


def usefulness(
    device: Device, victims: Images, released: Released
) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
    """What the server makes of released features, what it would make of plain ones, and how far the one are from the other."""
    both = halves(device.target)
    where = device_of(both.encoder)
    with frozen(both.encoder, both.rest), torch.no_grad():
        plain = torch.cat([both.encoder(part.to(where)) for part in victims.floats().split(CHUNK)])
        answers = [
            torch.cat([both.rest(part.to(where)).cpu() for part in feature.split(CHUNK)])
            for feature in (released.features, plain)
        ]
    truth = targets_for(device.target, victims)
    useful, bare = (utility(logits, truth, victims.labels) for logits in answers)
    deviation = (released.features - plain.cpu()).square().flatten(1).mean(1).mean().item()
    scale = plain.square().mean().item()
    return (
        useful,
        bare,
        {
            "deviation": deviation,
            "relative_deviation": deviation / max(scale, 1e-12),
            "feature_shape": list(both.feature_shape),
        },
    )


def _fit(images: Tensor, shape: Shape) -> Tensor:
    """Pictures (I, K, C, H, W) in the size and colours of the data: a prior may make them otherwise."""
    return match_shape(images.flatten(0, 1), shape).unflatten(0, images.shape[:2])


class Fitting(nn.Module):
    """An encoder that takes pictures of any size."""

    def __init__(self, encoder: nn.Module, shape: Shape):
        super().__init__()
        self.encoder = encoder
        self.shape = shape

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(match_shape(images, self.shape))


def amortize(
    config: Amortizer, target: Target, prior: Prior, *, seed: int, work: Work
) -> TrainedAmortizer:
    both = halves(target)
    network = config.train(Fitting(both.encoder, both.image_shape), prior, seed=seed, work=work)
    return TrainedAmortizer(network, config, both.feature_shape, prior.latent)


def _save_lesson(lesson: Lesson, folder: Path) -> None:
    for name, (tensors, values) in lesson.kept.items():
        write_tensors(folder / f"{name}.safetensors", tensors, values)


def _load_lesson(folder: Path) -> Lesson:
    kept = {path.stem: read_tensors(path) for path in sorted(folder.glob("*.safetensors"))}
    return Lesson(kept, read_json(folder / "timing.json")["seconds"])


def _save_released(released: Released, folder: Path) -> None:
    write_tensors(
        folder / "released.safetensors",
        {"features": released.features},
        {"facts": [dict(row) for row in released.facts]},
    )


def _load_released(folder: Path) -> Released:
    tensors, values = read_tensors(folder / "released.safetensors")
    return Released(tensors["features"], tuple(values["facts"]))


AMORTIZER = Step("amortizer", 2, amortize, TrainedAmortizer.save, TrainedAmortizer.load)
RELEASE = Step("release", 1, release, _save_released, _load_released)
LESSON = Step("lesson", 2, _learn, _save_lesson, _load_lesson)
INTERCEPT = Step("intercept", 1, _intercept, save_found, load_found)
BLIND = Step("blind", 1, blind_draws, save_found, load_found)
FEATURE_SCORES = Step("feature_scores", 1, _score, save_rows, load_rows)
