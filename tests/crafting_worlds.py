"""Encoders, priors and fast methods for tests of Crafter and Crafter-z."""

import torch
from torch import nn

from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.defenses.release._inversion import Inversion
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.crafter_z import CrafterZ
from frostglass.priors.base import identity_hashes
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, NoWork, prior

TINY = {
    "steps": 4,
    "critic_steps": 2,
    "critic_batch": 8,
    "critic_width": 4,
    "index_steps": 2,
    "first_steps": 4,
    "pool": 4,
}
OWN = {Crafter: {"inner_steps": 2, "terms": 3}, CrafterZ: {}}
METHODS = tuple(OWN)


def tiny(method, **more):
    return method(**TINY | OWN[method] | more)


def encoder(seed=0):
    with seeded(seed, "tests", "encoder"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )


def drawn(count=6, world=None, latent=6, seed=0):
    """Return draws of the prior, which an inversion can find."""
    world = world or prior()
    latents = torch.randn(count, latent, generator=torch.Generator().manual_seed(seed))
    with frozen(world.generator), torch.no_grad():
        return world.images(latents)


def release(method, images, *, network=None, world=None, seed=0, work=None, amortizer=None):
    assets = Assets(prior=world or prior(), amortizer=amortizer)
    return method.release(network or encoder(), images, assets, seed=seed, work=work or NoWork())


class Spread(nn.Module):
    """Generates ½ + M z as an image of 3×16×16: linear, without clipping."""

    def __init__(self, latent, seed=0):
        super().__init__()
        self.register_buffer(
            "mixing", torch.randn(768, latent, generator=torch.Generator().manual_seed(seed)) / 10
        )

    def forward(self, latents):
        return 0.5 + (latents @ self.mixing.T).view(-1, *SHAPE)


class Reading(nn.Module):
    """Encodes x as R (x - ½), with more values than the latent."""

    def __init__(self, features, seed=1):
        super().__init__()
        self.register_buffer(
            "rows", torch.randn(features, 768, generator=torch.Generator().manual_seed(seed)) / 28
        )

    def forward(self, images):
        return (images - 0.5).flatten(1) @ self.rows.T


def linear_world(latent=4, features=7):
    """Return prior, encoder and the matrix K = Enc∘G: the inversion of F is K⁺F."""
    generator, network = Spread(latent), Reading(features)
    linear = Prior(
        generator=generator,
        critic=None,
        latent=latent,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
        key="linear",
    )
    return linear, network, network.rows @ generator.mixing


def first_state(method, linear, network, plain, seed=0):
    """Return the state of a batch after its first inversion."""
    inversion = Inversion(network, linear, method.scale, method.realism)
    state = method._new_state(inversion, Assets(), plain, seed)
    method._first_inversion(state, seed)
    return state
