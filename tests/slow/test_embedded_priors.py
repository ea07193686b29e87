"""The embedded priors of faces: how near their pictures as a whole are to photos of people they never saw, by the features of a network trained on others still."""

import pytest
import torch
from torch import Tensor

from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.metrics._frechet import frechet_distance
from frostglass.priors.pretrained import Pretrained
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork

pytestmark = pytest.mark.slow
PICTURES = 4000


@pytest.fixture(scope="module")
def world():
    """Features of photos of strangers (split in two halves), and what makes them."""
    # Public people are numbered: those beyond 20,000 are new to the priors.
    split = make_split(
        Faces(size=32, identities=100, images=40, public_identities=24_000, public_images=1),
        seed=77,
    )
    judge = train_target(
        Training(model="resnet", options={"width": 16}, epochs=8, batch=32, lr=3e-3),
        split,
        seed=5,
        work=NoWork(),
    )

    def features(pictures: Tensor) -> Tensor:
        with frozen(judge.module), torch.no_grad():
            return torch.cat([judge.outputs(part)[1] for part in pictures.split(250)])

    strangers = split.public.floats(torch.arange(24_000 - PICTURES, 24_000))
    return features, features(strangers)


def distances(world, weights: str) -> list[float]:
    """Of three sets of draws."""
    features, strangers = world
    prior, found = Pretrained(weights=weights).read((3, 32, 32)), []
    for number in range(3):
        latents = torch.randn(PICTURES, prior.latent, generator=generator_for(number, "tests"))
        with frozen(*prior.modules), torch.no_grad():
            pictures = torch.cat([prior.images(part) for part in latents.split(250)])
        found.append(frechet_distance(features(pictures), strangers))
    return found


def test_every_set_of_draws_of_the_stylegan_is_nearer_to_photos_than_any_of_the_wgan(
    world, record_testsuite_property
):
    _, strangers = world
    wgan, styles = distances(world, "faces32"), distances(world, "styles32")
    floor = frechet_distance(strangers[::2], strangers[1::2])
    record_testsuite_property("distances", {"faces32": wgan, "styles32": styles, "photos": floor})
    assert floor < min(styles)
    assert max(styles) < min(wgan)
