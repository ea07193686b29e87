"""The amortizer: published network, known inverse, both objectives, resuming, refusals."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, ModelError, RunError
from frostglass.core.method import AuditSize
from frostglass.core.prior import Prior
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.base import identity_hashes
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import SHAPE, KilledError, MemoryWork, NoWork, conditional_prior, prior, same_weights

SMALL = Amortizer(width=4, steps=6, batch=4, checkpoint_every=2)


def encoder():
    with seeded(0, "tests", "encoder"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )


class Spread(nn.Module):
    """z ↦ M z as an image."""

    def __init__(self, latent):
        super().__init__()
        self.register_buffer(
            "mixing", torch.randn(768, latent, generator=torch.Generator().manual_seed(0)) / 28
        )

    def forward(self, latents):
        return (latents @ self.mixing.T).view(-1, *SHAPE)


def linear_world(latent=4):
    """A linear generator and a linear encoder with an inverse."""
    made = Prior(
        generator=Spread(latent),
        critic=None,
        latent=latent,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
        key="linear",
    )
    reading = nn.Linear(768, 2 * latent, bias=False)
    reading.weight.data = (
        torch.randn(2 * latent, 768, generator=torch.Generator().manual_seed(1)) / 2
    )
    return made, nn.Sequential(nn.Flatten(), reading)


def test_published_network():
    network = Amortizer().network((64, 16, 16), 500)
    assert [tuple(p.shape) for p in network.parameters() if p.ndim == 4] == [
        (128, 64, 4, 4),
        (512, 128, 4, 4),
        (1024, 512, 4, 4),
        (512, 1024, 2, 2),
        (500, 512, 1, 1),
    ]
    assert [part.negative_slope for part in network if isinstance(part, nn.LeakyReLU)] == [0.2] * 4
    assert sum(isinstance(part, nn.BatchNorm2d) for part in network) == 4


@pytest.mark.parametrize(
    ("shape", "convolutions"),
    [
        (
            (5, 32, 32),
            [
                (4, 5, 4, 4),
                (16, 4, 4, 4),
                (32, 16, 4, 4),
                (32, 32, 4, 4),
                (16, 32, 2, 2),
                (7, 16, 1, 1),
            ],
        ),
        ((5, 12, 8), [(4, 5, 4, 4), (16, 4, 4, 4), (16, 16, 3, 2), (7, 16, 1, 1)]),
        ((5, 4, 4), [(4, 5, 4, 4), (16, 4, 2, 2), (7, 16, 1, 1)]),
        ((4, 4, 5), [(4, 5, 4, 4), (16, 4, 2, 2), (7, 16, 1, 1)]),
        ((5, 3, 9), [(16, 5, 3, 9), (7, 16, 1, 1)]),
        ((5, 2, 2), [(16, 5, 2, 2), (7, 16, 1, 1)]),
        ((5, 1, 1), []),
        ((5,), []),
        ((3, 5), []),
    ],
)
def test_features_of_any_shape(shape, convolutions):
    network = Amortizer(width=4).network(shape, 7)
    assert [tuple(p.shape) for p in network.parameters() if p.ndim == 4] == convolutions
    assert network(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("objective", ["latent", "features"])
def test_it_finds_the_inverse_of_a_linear_world(objective):
    made, network = linear_world()
    latents = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        features = network(made.images(latents))
        errors = []
        for steps in (1, 250):
            with torch.enable_grad():
                amortizer_ = Amortizer(
                    width=8, steps=steps, batch=32, lr=1e-2, objective=objective
                ).train(network, made, seed=0, work=NoWork())
            errors.append((amortizer_(features) - latents).square().mean().item())
    assert errors[0] > 0.5
    assert errors[1] < 0.05


def test_the_objectives_by_hand():
    made, network = prior(), encoder()
    with frozen(network, *made.modules):
        for objective in ("latent", "features"):
            config = Amortizer(width=4, batch=3, objective=objective)
            with seeded(3):
                amortizer_ = config.network((6, 4, 4), 6).eval()
            latents = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
            features = network(made.images(latents))
            predicted = amortizer_(features)
            slow = {
                "latent": sum((predicted[i] - latents[i]).norm() ** 2 / 6 for i in range(3)) / 3,
                "features": sum(
                    (network(made.images(predicted))[i] - features[i]).norm() ** 2 / (6 * 4 * 4)
                    for i in range(3)
                )
                / 3,
            }
            fast = config._loss(amortizer_, network, made, torch.Generator().manual_seed(2))
            assert fast.item() == pytest.approx(slow[objective].item(), rel=1e-4)


@pytest.mark.parametrize("died_after", [1, 2])
def test_resumes_to_the_same_bytes(died_after):
    whole = SMALL.train(encoder(), prior(), seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        SMALL.train(encoder(), prior(), seed=0, work=work)
    work.left = None
    assert same_weights(whole, SMALL.train(encoder(), prior(), seed=0, work=work))
    assert not same_weights(whole, SMALL.train(encoder(), prior(), seed=1, work=NoWork()))
    assert not whole.training


def test_networks_and_global_draws_are_left_as_they_were():
    network, made = encoder(), prior()
    before = [{k: t.clone() for k, t in m.state_dict().items()} for m in (network, *made.modules)]
    state = torch.random.get_rng_state()
    SMALL.train(network, made, seed=0, work=NoWork())
    assert torch.equal(torch.random.get_rng_state(), state)
    for module, values in zip((network, *made.modules), before, strict=True):
        assert module.training
        assert all(p.requires_grad and p.grad is None for p in module.parameters())
        assert all(torch.equal(t, values[k]) for k, t in module.state_dict().items())


def test_latents_are_fresh_at_every_step():
    made, seen = prior(), []

    class Watching(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, latents):
            seen.append(latents.clone())
            return self.inner(latents)

    watched = Prior(
        generator=Watching(made.generator),
        critic=None,
        latent=6,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
    )
    SMALL.train(encoder(), watched, seed=0, work=NoWork())
    rows = torch.cat([latents for latents in seen if len(latents) == SMALL.batch])
    assert len(rows.unique(dim=0)) == SMALL.steps * SMALL.batch


def test_brief_and_budget():
    assert SMALL.brief() == Amortizer(width=4, steps=1, batch=4, checkpoint_every=2)
    assert SMALL.budget(AuditSize(people=3)).trained == 6 * 4
    assert SMALL.files() == []


def test_refusals():
    with pytest.raises(
        ConfigError,
        match="the amortizer needs an unconditional prior, got one conditioned on a label",
    ):
        SMALL.train(encoder(), conditional_prior("label"), seed=0, work=NoWork())
    with pytest.raises(ModelError, match="Linear cannot take 3x16x16 images"):
        SMALL.train(nn.Linear(5, 2), prior(), seed=0, work=NoWork())
    with pytest.raises(
        RunError, match=r"amortizer: the loss is not finite at step \d+: lower amortizer.lr"
    ):
        Amortizer(width=4, steps=9, batch=4, lr=1e30, objective="features").train(
            Unbounded(), linear_world()[0], seed=0, work=NoWork()
        )
    with pytest.raises(ConfigError, match="width: expected at least 4"):
        Amortizer(width=1)


class Unbounded(nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :8] ** 3
