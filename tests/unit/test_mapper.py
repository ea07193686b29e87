"""The mapper: from a feature to a face embedding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feature_worlds import blobs, draws, public_images, run, view_of
from frostglass.attacks.features.mapper import Mapper, build_mapper
from frostglass.core.assets import Assets
from frostglass.networks.embedding import embed, public_centre
from frostglass.runtime.seeding import seeded
from worlds import target


def test_the_embedding_is_that_of_the_person_and_the_image_shows_a_stranger():
    private, public = blobs(10, 1, (3, 16, 16)), public_images(blobs(400, 2, (3, 16, 16)))
    embedder = target()
    with seeded(0, "tests", "encoder"):
        encoder = nn.Conv2d(3, 4, 3, 2, 1).requires_grad_(False)
    view = view_of(encoder, private, ["encode"])
    attack = Mapper(epochs=12, batch=16, width=8, hidden=128, lr=3e-3)
    result = run(attack, view, Assets(public, embedder=embedder))
    centre = public_centre(embedder, public)
    truth, others = embed(embedder, private, centre), embed(embedder, public.floats(), centre)
    cosine = F.cosine_similarity(result.latents[:, 0], truth)
    assert cosine.mean() > 0.75
    assert cosine.mean() > F.cosine_similarity(others[:10], truth).mean() + 0.5
    assert torch.allclose(result.latents.norm(dim=2), torch.ones(10, 1), atol=1e-5)
    nearest = (result.latents[:, 0] @ others.T).argmax(1)
    assert torch.equal(result.images[:, 0], public.floats(nearest))
    assert result.queries == 2 * 400


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 3, 3), (2, 16, 16), (3, 9, 5)])
def test_features_of_any_shape_are_mapped(shape):
    with seeded(0, "tests"):
        network = build_mapper(shape, 11, width=4, hidden=8)
    assert network(draws(3, *shape)).shape == (3, 11)


def test_maps_with_channels_last_are_read_like_maps_with_channels_first():
    networks = []
    for shape in ((8, 8, 5), (5, 8, 8)):
        with seeded(0, "tests"):
            networks.append(build_mapper(shape, 11, width=4, hidden=8).eval())
    features = draws(3, 8, 8, 5)
    last, first = networks[0](features), networks[1](features.permute(0, 3, 1, 2))
    assert torch.allclose(last, first, atol=1e-6)
