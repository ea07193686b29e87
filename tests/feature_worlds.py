"""Encoders, priors and images for tests of feature attacks whose right answers are known."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.attacks.base import invert
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Halves, Images, Reconstructions
from frostglass.core.views import FeatureView
from frostglass.priors.base import identity_hashes
from frostglass.runtime.seeding import seeded

FLAT = (1, 4, 4)
LATENT = 5


class Affine(nn.Module):
    """Generates images that are linear in the latent, with pixels around 0.5."""

    def __init__(self, shape=FLAT, latent=LATENT):
        super().__init__()
        self.shape = shape
        with seeded(0, "tests", "affine"):
            self.weight = nn.Parameter(torch.randn(latent, shape[0] * shape[1] * shape[2]) * 0.05)

    def forward(self, latents):
        return (0.5 + latents @ self.weight).unflatten(1, self.shape)


class Constant(nn.Module):
    """An encoder that releases the same feature for every image."""

    def forward(self, images):
        return torch.ones(len(images), 4, 4, 4) + 0 * images.mean()


def affine_prior(critic=None) -> Prior:
    return Prior(
        generator=Affine(),
        critic=critic,
        latent=LATENT,
        image_shape=FLAT,
        seen_identities=identity_hashes([]),
    )


def mixing(channels=3) -> nn.Conv2d:
    """Return an invertible linear encoder that mixes and shifts colours."""
    layer = nn.Conv2d(channels, channels, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(draws(channels, channels)).Q[:, :, None, None])
        layer.bias.copy_(torch.linspace(3, 9, channels))
    return layer.requires_grad_(False)


def view_of(encoder, images, access, **more) -> FeatureView:
    """Return a view of a device that has released the plain features of images."""
    with torch.no_grad():
        released = encoder.eval()(images)
    halves = Halves(encoder, nn.Identity(), tuple(images.shape[1:]), tuple(released.shape[1:]), "x")
    return FeatureView(halves, released, access, **more)


def draws(*shape, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def public_images(images) -> Images:
    """Return floats as public images, each of another person."""
    names = tuple(map(str, range(len(images))))
    return Images((images * 255).round().byte(), torch.arange(len(images)), names, names)


def blobs(count, seed, shape=(3, 8, 8)) -> Tensor:
    """Return smooth random images."""
    coarse = draws(count, shape[0], 3, 3, seed=seed)
    return torch.sigmoid(
        2 * F.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=True)
    )


def run(attack, view, assets=None, people=None, **more) -> Reconstructions:
    people = range(people or len(view.released))
    return invert(attack, view, assets or Assets(), people=people, **more)


def mean_error(result, images) -> float:
    """Return the mean squared error of all candidates, each against its image."""
    people, candidates = result.images.shape[:2]
    each = candidates * people // len(images)
    truth = images.unflatten(0, (people, -1)).repeat_interleave(each, 1)
    return (result.images - truth).square().mean().item()
