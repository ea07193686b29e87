"""The embedded priors: the Fréchet distance of their images to photos of people unknown to them.

The features are those of a network trained on other people still.
"""

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
IMAGES = 4000


@pytest.fixture(scope="module")
def world():
    """A function from images to features, and the features of photos of strangers."""
    # Public people are numbered: those from 20,000 on are new to the priors.
    split = make_split(
        Faces(size=32, identities=100, images=40, public_identities=24_000, public_images=1),
        seed=77,
    )
    config = Training(model="resnet", options={"width": 16}, epochs=8, batch=32, lr=3e-3)
    network = train_target(config, split, seed=5, work=NoWork())

    def features(images: Tensor) -> Tensor:
        with frozen(network.module), torch.no_grad():
            return torch.cat([network.outputs(part)[1] for part in images.split(250)])

    strangers = split.public.floats(torch.arange(24_000 - IMAGES, 24_000))
    return features, features(strangers)


def distances(world, weights: str) -> list[float]:
    """Return the distances of three sets of draws."""
    features, strangers = world
    prior = Pretrained(weights=weights).read((3, 32, 32))
    values = []
    for number in range(3):
        latents = torch.randn(IMAGES, prior.latent, generator=generator_for(number, "tests"))
        with frozen(*prior.modules), torch.no_grad():
            images = torch.cat([prior.images(part) for part in latents.split(250)])
        values.append(frechet_distance(features(images), strangers))
    return values


def test_the_stylegan_is_closer_to_photos_than_the_wgan(world, record_testsuite_property):
    _, strangers = world
    wgan, styles = distances(world, "faces32"), distances(world, "styles32")
    floor = frechet_distance(strangers[::2], strangers[1::2])
    record_testsuite_property("distances", {"faces32": wgan, "styles32": styles, "photos": floor})
    assert floor < min(styles)
    assert max(styles) < min(wgan)
