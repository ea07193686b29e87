"""Tiny networks and data for tests, and linear ones whose answers are known."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from frostglass.attacks.base import invert
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.priors.base import identity_hashes
from frostglass.priors.stylegan2 import Stylegan2
from frostglass.runtime.seeding import seeded
from frostglass.store.files import Work

SHAPE = (3, 16, 16)
SMALL_GAN = {
    "latent": 5, "width": 4, "steps": 6, "critic_steps": 2, "batch": 8, "checkpoint_every": 2,
    "average": 0.5,
}  # fmt: skip


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def target(classes: int = 4, shape=SHAPE, seed: int = 0) -> Target:
    """A small classifier with batch norm and dropout, confident on images of `prior`."""
    with seeded(seed, "tests", "target"):
        module = nn.Sequential(
            nn.Conv2d(shape[0], 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, classes),
        )
    with torch.no_grad():
        generator = prior(shape).generator.eval()
        logits = module.eval()(generator(torch.randn(200, 6, generator=rng())))
        module[6].weight *= 4 / logits.std(0)[:, None]
        module[6].bias.copy_((module[6].bias - logits.mean(0)) * 4 / logits.std(0))
    module.train()
    return Target(
        module=module,
        classes=tuple(f"person {i}" for i in range(classes)),
        image_shape=shape,
        head="6",
        key="target",
    )


def prior(shape=SHAPE, latent: int = 6, seed: int = 0, critic: bool = True) -> Prior:
    """An untrained small generator with batch norm, and a critic."""
    with seeded(seed, "tests", "prior"):
        generator = nn.Sequential(
            nn.Linear(latent, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, shape[0] * shape[1] * shape[2]),
            nn.Sigmoid(),
            nn.Unflatten(1, shape),
        )
        critic_network = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 1))
        student = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 4))
    return Prior(
        generator=generator,
        critic=critic_network if critic else None,
        latent=latent,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        students=(student,),
        features=torch.stack([torch.zeros(128), torch.ones(128)]),
        key="prior",
    )


def styled_prior(shape=SHAPE, seed: int = 0) -> Prior:
    """An untrained small StyleGAN2 of three blocks, whose styles have a mean that is not zero."""
    with seeded(seed, "tests", "styled"):
        generator = (
            Stylegan2(latent=8, style=8, channel_base=128, channel_max=8, resolution=16)
            .networks(shape)[0]
            .eval()
        )
    generator.network.mapping.w_avg.copy_(torch.linspace(-0.3, 0.4, 8))
    taught = prior(shape)
    return Prior(
        generator=generator,
        critic=None,
        latent=8,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        students=taught.students,
        features=taught.features,
        key="styled",
    )


def conditional_prior(condition: str) -> Prior:
    """A prior whose generator marks a corner of each image with an eighth of its label or hint."""

    class Marked(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, latents, given):
            corner = torch.zeros(SHAPE)
            corner[0, 0, 0] = 1
            mark = given.reshape(len(latents), 1, 1, 1) / 8 if condition == "label" else given
            return self.inner(latents) * (1 - corner) + mark * corner

    plain = prior()
    hints = (torch.arange(4) / 8).reshape(4, 1, 1, 1) if condition == "hint" else None
    return replace(
        plain,
        generator=Marked(plain.generator),
        condition=condition,
        hints=hints,
        classes=4,
        tied_to="target",
    )


def linear_world(classes: int = 3, latent: int = 5) -> tuple[Target, Prior]:
    """A linear generator and a linear classifier: class y is brightest along its logit row."""
    shape = (1, 1, latent)

    class Centre(nn.Module):
        def forward(self, z):
            return z.view(-1, 1, 1, latent)

    with seeded(0, "tests", "linear"):
        module = nn.Sequential(nn.Flatten(), nn.Linear(latent, classes)).double()
    made = Target(
        module=module,
        classes=tuple(map(str, range(classes))),
        image_shape=shape,
        head="1",
        key="linear",
    )
    generator = nn.Sequential(Centre())
    generator.register_buffer("none", torch.zeros(1))
    return made, Prior(
        generator=generator,
        critic=None,
        latent=latent,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        key="identity",
    )


def images(count: int, classes: int, shape=SHAPE, seed: int = 0, names: str = "person") -> Images:
    """Random images whose class shows as a bright band."""
    labels = torch.arange(count) % classes
    pixels = torch.randint(0, 120, (count, *shape), generator=rng(seed), dtype=torch.uint8)
    band = shape[1] // classes
    for row, label in enumerate(labels.tolist()):
        pixels[row, :, label * band : (label + 1) * band] += 120
    return Images(
        pixels=pixels,
        labels=labels,
        names=tuple(f"{names} {i}" for i in range(classes)),
        sources=tuple(f"{names}/{i}" for i in range(count)),
        key=f"{names}{seed}",
    )


PUBLIC = images(40, 5, names="stranger")


def colour_images() -> Tensor:
    """Noise, with the corners of the colour cube, grey pixels and two channels alike among it."""
    noise = torch.rand(6, 3, 12, 12, generator=rng(7))
    noise[:, :, 0, :8] = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).T
    noise[:, :, 1, :4] = torch.tensor([0.0, 0.25, 0.5, 1.0])
    noise[:, 1, 2] = noise[:, 2, 2]
    return noise


def split(classes: int = 4, count: int = 48) -> Split:
    train, validation, test = (images(count // part, classes, seed=part) for part in (1, 2, 3))
    return Split(
        train=train,
        validation=validation,
        test=test,
        public=images(40, 5, seed=9, names="stranger"),
        secret=images(32, 8, seed=11, names="secret"),
        key="split",
    )


class NoWork:
    """A step's work folder that keeps nothing."""

    sheets = ""
    maps_results = False

    def __init__(self):
        self.kept = {}

    def sheet(self, name, images):
        pass

    def save(self, name, tensors, values=None):
        pass

    def load(self, name):
        return None

    def progress(self, done, total, note=""):
        pass

    def record(self, step, values):
        pass

    share = Work.share


class MemoryWork(NoWork):
    """Keeps checkpoints in memory, and raises KilledError after a number of saves."""

    def __init__(self, saves_before_death: int | None = None):
        super().__init__()
        self.left = saves_before_death

    def save(self, name, tensors, values=None):
        self.kept[name] = ({key: t.clone() for key, t in tensors.items()}, dict(values or {}))
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise KilledError

    def load(self, name):
        return self.kept.get(name)


class KilledError(Exception):
    pass


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close_images(one: Reconstructions, other: Reconstructions, atol: float = 1e-3) -> bool:
    """Whether two results agree up to the rounding of kernels for other batch shapes."""
    return torch.equal(one.labels, other.labels) and torch.allclose(
        one.images, other.images, rtol=0, atol=atol
    )


def of_people(result: Reconstructions, rows: list[int]) -> Reconstructions:
    """The results of some people, by their place."""
    columns = ("images", "labels", "latents", "confidence", "draws", "steps", "broken", "partial")
    return replace(result, **{name: getattr(result, name)[rows] for name in columns})


def run_attack(attack, known=None, labels=(2,), seed=0) -> Reconstructions:
    """Run an attack on the model of `target` with gradients."""
    view, assets = target().view(["gradients"]), Assets(prior=known or prior())
    return invert(attack, view, assets, people=labels, seed=seed, work=NoWork())
