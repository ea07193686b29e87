"""The contracts as functions: hold a method of your own to them in one line.

    from frostglass.testing import check_attack
    check_attack(MyAttack(iterations=2))

Each function runs the method in a tiny world and raises AssertionError with the broken promise.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from frostglass.analyses._result import Analysis
from frostglass.analyses.base import AnalysisMethod, analyses, analyze, unfit
from frostglass.attacks.base import Attack, View, attacks, invert
from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import split_of
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.method import AuditSize, Method
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Reconstructions, Shape, Split, Target
from frostglass.core.views import FeatureView
from frostglass.data.base import Dataset, datasets
from frostglass.defenses.base import Defense, defenses
from frostglass.metrics.base import Evidence, Metric, measure, metrics
from frostglass.models.cut import cut
from frostglass.priors.base import PriorMethod, identity_hashes, priors
from frostglass.robustness.base import Threat, threats
from frostglass.robustness.measuring import measure as measure_threats
from frostglass.robustness.rates import Rate
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import weights_digest
from frostglass.store.files import Work
from frostglass.store.store import Store
from frostglass.training.loop import train_target
from frostglass.training.settings import Training

SHAPE: Shape = (3, 16, 16)
PEOPLE, IMAGES, LATENT = 4, 16, 6
# Configs of audits that take seconds: of a model, and of features.
TINY_FACES = {
    "name": "faces", "size": 16, "identities": PEOPLE, "images": 8, "public_identities": 12,
    "public_images": 3,
}  # fmt: skip
TINY_NETWORK = {"options": {"width": 4}, "epochs": 2, "batch": 16}
TINY_AUDITS: Mapping[str, Mapping[str, Any]] = {
    "model": {
        "data": TINY_FACES,
        "target": TINY_NETWORK,
        "perceptual": TINY_NETWORK,
        "evaluators": [{"model": "lenet", "epochs": 1}],
        "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8},
        "attack": {"name": "gmi", "steps": 2, "candidates": 2, "keep": 2, "batch": 4},
    },
    "features": {
        "data": TINY_FACES,
        "target": {**TINY_NETWORK, "attributes": ["all"], "cut": "stage1"},
        "embedder": TINY_NETWORK,
        "evaluators": [{"model": "lenet", "epochs": 1}],
        "attack": {"name": "decoder", "epochs": 1, "width": 4, "adapt": 4},
    },
}


class Killed(Exception):
    """Raised by `KilledWork` in place of a kill."""


class KilledWork(Work):
    """A work folder whose process dies after some checkpoints, and that can be used again."""

    def __init__(self, saves: int):
        scratch = Work.scratch()
        super().__init__(scratch.folder)
        self._scratch = scratch  # removes its folder when it is collected
        self.left: int | None = saves
        self.died = False

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        super().save(name, tensors, values)
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.left, self.died = None, True
                raise Killed


def tiny_split(people: int = PEOPLE, images: int = IMAGES, shape: Shape = SHAPE) -> Split:
    """Return a split of noisy colour patterns, one pattern per person."""

    def part(name: str, count: int, prefix: str) -> Images:
        rng = generator_for(0, "tiny", name)
        patterns = torch.rand(people, *shape, generator=generator_for(0, "tiny", prefix))
        labels = torch.arange(people).repeat_interleave(count)
        noise = torch.rand(len(labels), *shape, generator=rng)
        pixels = (0.7 * patterns[labels] + 0.3 * noise).mul(255).byte()
        names = tuple(f"{prefix} {number}" for number in range(people))
        attributes = torch.stack([labels % 2 == 0, torch.arange(len(labels)) % 3 == 0], 1)
        return Images(
            pixels, labels, names, ("tiny",) * len(labels), attributes, ("even", "third"), key=name
        )

    return Split(
        train=part("train", images, "private"),
        validation=part("validation", 4, "private"),
        test=part("test", 4, "private"),
        public=part("public", images, "public"),
        key="tiny split",
    )


def tiny_target(people: int = PEOPLE, shape: Shape = SHAPE, seed: int = 0) -> Target:
    """Return an untrained classifier with batch norm, cut after its first block."""
    with seeded(seed, "tiny target"):
        module = nn.Sequential(
            nn.Sequential(nn.Conv2d(shape[0], 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, people),
        )
    names = tuple(f"private {number}" for number in range(people))
    return Target(module.eval(), names, shape, head="3", taps=("0",), key="tiny target", cut="0")


def tiny_prior(shape: Shape = SHAPE, latent: int = LATENT) -> Prior:
    """Return an untrained generator with a critic and a student."""
    size = shape[0] * shape[1] * shape[2]
    with seeded(0, "tiny prior"):
        generator = nn.Sequential(
            nn.Linear(latent, size), nn.Sigmoid(), nn.Unflatten(1, shape)
        ).eval()
        critic = nn.Sequential(nn.Flatten(), nn.Linear(size, 1)).eval()
        student = nn.Sequential(nn.Flatten(), nn.Linear(size, PEOPLE)).eval()
    return Prior(
        generator,
        critic,
        latent,
        shape,
        identity_hashes([]),
        students=(student,),
        features=torch.stack([torch.zeros(128), torch.ones(128)]),
        key="tiny prior",
    )


def tiny_assets(split: Split, target: Target) -> Assets:
    """Return all that an attacker may have; the target's network stands for each other one."""
    recogniser = replace(target, classes=split.public.attribute_names, attributes=True)
    attribute = KnownAttribute("even", (True, False) * (PEOPLE // 2), recogniser)
    return Assets(
        split.public, tiny_prior(), embedder=target, perceptual=target, attribute=attribute
    )


def tiny_view(attack: Attack, target: Target, split: Split) -> View:
    """Return what an attack would face in the tiny world."""
    if attack.surface == "model":
        return target.view(attack.access)  # type: ignore[arg-type]
    halves = cut(target.module, target.cut, target.image_shape)
    with torch.no_grad():
        released = halves.encoder(split.test.floats())
    return FeatureView(halves, released, attack.access)  # type: ignore[arg-type]


def check_attack(attack: Attack, assets: Assets | None = None) -> Reconstructions:
    """Check shapes, range, repeatability, resuming, and that networks are left unchanged."""
    check_method(attack, attacks)
    split, target = tiny_split(), tiny_target()
    assets = assets or tiny_assets(split, target)
    people = range(PEOPLE)

    def run(work: Work) -> Reconstructions:
        return invert(attack, tiny_view(attack, target, split), assets, people=people, work=work)

    networks = [target.module, *assets.modules]
    before = [(weights_digest(network), network.training) for network in networks]
    first = run(Work.scratch())
    per_person = 1 if attack.surface == "model" else len(split.test) // PEOPLE
    shape = (PEOPLE, attack.kept * per_person)
    _check(first.images.shape[:2] == shape, f"expected images for {shape}, see attack.kept")
    _check(torch.equal(first.labels, torch.arange(PEOPLE)), "labels must be the attacked people")
    _check(first.confidence.shape == shape, f"expected confidence of shape {shape}")
    inside = bool(first.images[:].ge(0).all() and first.images[:].le(1).all())
    _check(inside, "images must lie in [0, 1]")
    after = [(weights_digest(network), network.training) for network in networks]
    _check(before == after, "networks must be left as they were")
    _check(
        torch.equal(first.images[:], run(Work.scratch()).images[:]), "a seed must repeat the result"
    )
    work = KilledWork(saves=1)
    try:
        resumed = run(work)
    except Killed:
        resumed = run(work)
    _check(
        torch.equal(first.images[:], resumed.images[:]),
        "a resumed run must end with the same images",
    )
    return first


def check_defense(defense: Defense, training: Training | None = None) -> Target:
    """Check that it trains, resumes, can be attacked, and does nothing when disabled."""
    check_method(defense, defenses)
    split = tiny_split()
    config = training or Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3)

    def train(*chosen: Defense, work: Work | None = None) -> Target:
        return train_target(config, split, chosen, work=work)

    plain = train()
    disabled = train(type(defense)(**defense.disabled))
    same = weights_digest(plain.module) == weights_digest(disabled.module)
    _check(same, "at its disabled parameters, training must equal the undefended run exactly")
    target = train(defense)
    work = KilledWork(saves=2)
    try:
        resumed = train(defense, work=work)
    except Killed:
        resumed = train(defense, work=work)
    same = weights_digest(target.module) == weights_digest(resumed.module)
    _check(same, "a resumed training must end with the same weights")
    images = torch.rand(3, *SHAPE, generator=generator_for(0, "tiny")).requires_grad_()
    target.view(["gradients"]).logits(images).square().sum().backward()
    finite = images.grad is not None and bool(images.grad.isfinite().all())
    _check(finite, "gradients of the defended model must be finite")
    return target


def check_prior(method: PriorMethod) -> Prior:
    """Check that it trains, repeats with a seed, and generates images in [0, 1]."""
    check_method(method, priors)
    split, target = tiny_split(), tiny_target()
    view = target.view([method.access]) if method.access else None
    _check(not method.problems(len(split.public)), "problems() must be empty in the tiny world")
    untrained = method.untrained(SHAPE, PEOPLE)
    first, second = (method.train(split.public, view, seed=0) for _ in range(2))
    digests = [weights_digest(prior.generator) for prior in (first, second)]
    _check(digests[0] == digests[1], "a seed must repeat the weights")
    _check(first.latent == untrained.latent, "untrained() must have the latent size of train()")
    labels = torch.zeros(2, dtype=torch.long)
    if first.condition != "hint":
        with torch.no_grad():
            images = first.images(first.draw(*[generator_for(0, "tiny")] * 2), labels)
        inside = images.shape[0] == 2 and bool(images.ge(0).all() and images.le(1).all())
        _check(inside, "images must lie in [0, 1]")
    return first


def check_metric(metric: Metric) -> Mapping[str, Tensor]:
    """Check that every column has one finite value per person and candidate."""
    check_method(metric, metrics)
    split, target = tiny_split(), tiny_target()
    images = split.test.floats().unflatten(0, (PEOPLE, -1))
    shape = images.shape[:2]
    labels = torch.arange(PEOPLE)
    result = Reconstructions(images, labels, torch.zeros(*shape, 0), torch.ones(shape), 0, 0.0)
    victims = images if "model" not in metric.surfaces else None
    evidence = Evidence(result, target, [target], split, victims=victims, embedder=target)
    rows = measure([metric], evidence)
    for name, values in rows.columns.items():
        _check(values.shape == shape, f"column {name}: expected shape {tuple(shape)}")
    return rows.columns


def check_threat(threat: Threat) -> Rate:
    """Check range and repeatability, and that model and images are left unchanged."""
    check_method(threat, threats)
    split, target = tiny_split(), tiny_target()
    before, pixels = weights_digest(target.module), split.test.pixels[:].clone()
    with torch.no_grad():  # labels that the untrained model gives: something to change
        labels = target.module(split.test.floats()).argmax(1)
    images = replace(split.test, labels=labels)
    rates = [measure_threats(target, images, [threat], seed=1).rates for _ in range(2)]
    first, again = (list(each.values())[1] for each in rates)
    _check(torch.equal(first.hits, again.hits), "the same seed must give the same result")
    _check(weights_digest(target.module) == before, "the model must be left unchanged")
    _check(torch.equal(split.test.pixels[:], pixels), "the images must be left unchanged")
    return first


def check_analysis(
    method: AnalysisMethod, settings: Mapping[str, Any] | None = None, store: Store | None = None
) -> Analysis:
    """Check that it repeats, names nobody, and returns plain numbers, on a tiny config.

    `settings` are added to the config, such as a grid for an analysis that compares models. Several
    checks are faster with one store.
    """
    check_method(method, analyses)
    if store is None:
        with TemporaryDirectory() as folder:
            return check_analysis(method, settings, Store(folder))
    config, names = None, set[str]()
    if method.surfaces:
        config = {**TINY_AUDITS[max(method.surfaces)], **(settings or {})}
        chosen = [experiment for _, experiment in experiments(config)]
        problems = unfit(method, chosen)
        _check(not problems, f"problems() must be empty for the tiny config, got {problems}")
        for split in (split_of(experiment, store) for experiment in chosen):
            names |= {*split.train.names, *split.public.names}
    first, again = (analyze(method, config, store) for _ in range(2))
    _check(first == again, "a seed must repeat the result")
    _check(bool(first.tables and first.figures), "expected at least one table and one figure")
    words = json.loads(json.dumps(asdict(first), allow_nan=False))
    named = names & set(_texts(words))
    _check(not named, f"the result must not name people, got {sorted(named)[:3]}")
    return first


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of nested JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def check_dataset(dataset: Dataset) -> tuple[Images, Images]:
    """Check that the two tables agree with the dataset's own description."""
    check_method(dataset, datasets)
    private, public = dataset.tables()
    for images in (private, public):
        _check(images.shape == tuple(dataset.image_shape), "images must have `image_shape`")
    people, count, others = dataset.counts()
    _check(people == len(private.names), "counts()[0] must be the number of private people")
    for estimate, images in ((count, private), (others, public)):
        near = len(images) / 2 <= estimate <= 2 * len(images)
        _check(near, f"counts() must estimate the number of images, {len(images)}")
    again = dataset.tables()
    same = all(
        torch.equal(one.pixels[:], two.pixels[:])
        for one, two in zip((private, public), again, strict=True)
    )
    _check(same, "tables() must return the same images at every call")
    return private, public


def check_method(method: Method, registry: Registry) -> None:
    """Check what every registered method promises: its contract, brief copy and budget."""
    registry.check(type(method))
    brief, size = method.brief(), AuditSize(PEOPLE, 2, PEOPLE * IMAGES, PEOPLE)
    _check(type(brief) is type(method), "brief() must return a copy of the same class")
    smaller = brief.budget(size).images <= method.budget(size).images
    _check(smaller, "the budget of brief() must not exceed that of the method itself")


def _check(holds: bool, promise: str) -> None:
    assert holds, promise
