"""People of a generator that the owner keeps secret."""

from pathlib import Path

import torch
from torch import Tensor

from frostglass.core.errors import FrostglassError
from frostglass.core.types import Shape, match_shape
from frostglass.priors.pretrained import Pretrained, embedded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for

CHUNK = 256


def check_secret(path: Path | None, image_shape: Shape) -> list[str]:
    """List what keeps a generator from making secret people."""
    if str(path) in embedded():
        return [
            f"the generator {path} ships with Frostglass and is no secret: give the file of a "
            "prior that only you have"
        ]
    try:
        Pretrained(weights=str(path), resize=True).read(image_shape)
    except FrostglassError as error:
        return [f"generator: {error}"]
    return []


def drawn_people(
    path: Path, people: int, images: int, spread: float | None, shape: Shape, *, seed: int
) -> Tensor:
    """Return uint8 images (people · images, C, H, W), person by person.

    With a spread s, an image of a person is G(√(1 - s²) z + s ε) for the person's z; without, it is
    G(cos(a) z + sin(a) z') for an angle a in the middle half of the arc from z to z'. All latents
    are standard normal.
    """
    prior = Pretrained(weights=str(path), resize=True).read(shape)
    latents = []
    for person in range(people):
        rng = generator_for(seed, "decoys", "draws", person)
        first, second = torch.randn(2, prior.latent, generator=rng)
        if spread is not None:
            noise = torch.randn(images, prior.latent, generator=rng)
            latents.append((1 - spread**2) ** 0.5 * first + spread * noise)
        else:
            angle = (0.25 + 0.5 * torch.rand(images, 1, generator=rng)) * torch.pi / 2
            latents.append(angle.cos() * first + angle.sin() * second)
    with frozen(*prior.modules), torch.no_grad():
        drawn = [
            match_shape(prior.images(part), shape).clamp(0, 1).mul(255).round().to(torch.uint8)
            for part in torch.cat(latents).split(CHUNK)
        ]
    return torch.cat(drawn)
