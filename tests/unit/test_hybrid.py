"""The hybrid attack: pixels optimised from the reconstructions of another attack."""

import pytest
import torch
from torch import nn

from feature_worlds import blobs, mean_error, mixing, public_images, run, view_of
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid, total_variation
from frostglass.attacks.features.latent import Latent
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize
from worlds import prior


def test_an_invertible_encoder_reveals_the_image_from_noise():
    private = blobs(3, 1)
    result = run(Hybrid(start="noise", steps=300, lr=0.02), view_of(mixing(), private, ["encoder"]))
    assert mean_error(result, private) < 1e-5
    assert result.queries == 3 * 300
    assert result.confidence.min() > 0.999


def test_pixels_stay_in_range():
    image = torch.tensor([-0.7, 0.3, 1.9, 1.0]).reshape(1, 1, 2, 2)
    view = view_of(nn.Flatten(), image, ["encoder"])
    result = run(Hybrid(start="noise", steps=200, lr=0.05), view)
    assert torch.allclose(result.images.flatten(), torch.tensor([0, 0.3, 1, 1]), atol=1e-3)


@pytest.mark.parametrize(
    ("start", "starter"),
    [("decoder", {"epochs": 2, "width": 4, "batch": 8}), ("latent", {"steps": 3, "tries": 2})],
)
def test_the_search_starts_where_the_other_attack_ended(start, starter):
    private = blobs(3, 1, (3, 16, 16))
    assets = Assets(public_images(blobs(20, 2, (3, 16, 16))), prior())
    view = view_of(mixing(), private, ["encoder"])
    other = {"decoder": Decoder, "latent": Latent}[start](**starter)
    hybrid = Hybrid(start=start, starter=starter, steps=40, lr=0.02)
    first = run(other, view, assets)
    unmoved = run(Hybrid(start=start, starter=starter, steps=0), view, assets)
    assert torch.equal(first.images, unmoved.images)
    assert torch.equal(first.latents, unmoved.latents)
    assert first.queries == unmoved.queries
    moved = run(hybrid, view, assets)
    assert mean_error(moved, private) < 0.7 * mean_error(first, private)
    assert moved.queries == first.queries + 3 * other.kept * 40
    assert hybrid.kept == other.kept
    assert hybrid.needs == other.needs
    assert hybrid.pretraining == other.pretraining
    assert hybrid.pretrained_checkpoints == other.pretrained_checkpoints
    assert hybrid.access == ("encoder",)
    adapting = Hybrid(start=start, starter={**starter, "adapt": 8})
    assert adapting.access == ("encoder", "protection")
    assert adapting.protected_images == 8


def test_the_budget_is_that_of_both_attacks():
    size = AuditSize(5)
    starter = {"steps": 3, "tries": 2}
    budget = Hybrid(start="latent", starter=starter, steps=10).budget(size)
    assert budget.evaluations == Latent(**starter).budget(size).evaluations + 10 * 16
    assert Hybrid(start="noise", steps=10).budget(size).evaluations == 5 + 10 * 16
    brief = Hybrid(start="latent", starter={"tries": 2, "adapt": 8}).brief()
    assert (brief.steps, brief.starter["steps"], brief.starter["adapt_rounds"]) == (2, 2, 1)
    assert (brief.starter["tries"], brief.starter["adapt"]) == (2, 8)


def test_total_variation_equals_a_slow_computation():
    images = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    slow = [
        sum(
            (abs(x[c, i, j] - x[c, i - 1, j]).item() if i else 0)
            + (abs(x[c, i, j] - x[c, i, j - 1]).item() if j else 0)
            for c in range(3)
            for i in range(4)
            for j in range(5)
        )
        / 60
        for x in images
    ]
    assert total_variation(images).tolist() == pytest.approx(slow)
    assert total_variation(torch.rand(2, 1, 1, 1)).tolist() == [0, 0]
    assert torch.autograd.gradcheck(total_variation, images.requires_grad_())


def test_smoothness_is_relative_to_the_size_of_the_feature():
    class Faint(nn.Module):
        def forward(self, images):
            return mixing()(images) / 2**10

    rough, smooth, faint = (
        run(
            Hybrid(start="noise", steps=100, lr=0.02, smooth=weight),
            view_of(encoder, blobs(2, 1), ["encoder"]),
        ).images[:, 0]
        for encoder, weight in ((mixing(), 0.0), (mixing(), 0.1), (Faint(), 0.1))
    )
    assert (total_variation(smooth) < 0.5 * total_variation(rough)).all()
    assert torch.allclose(smooth, faint, atol=0.05)  # Adam's epsilon is not scaled


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="starter must be empty for start 'noise'"):
        Hybrid(start="noise", starter={"epochs": 3})
    with pytest.raises(ConfigError, match=r"Decoder: epoch: .*'epochs'"):
        Hybrid(starter={"epoch": 3})
    with pytest.raises(ConfigError, match=r"starter\.averaged must be 1, got 3"):
        Hybrid(starter={"averaged": 3})
    with pytest.raises(ConfigError, match=r"latent needs assets\.prior"):
        run(Hybrid(start="latent"), view_of(mixing(), blobs(2, 1), ["encoder"]))
    view = view_of(mixing(), blobs(2, 1), ["encode"])
    with pytest.raises(ConfigError, match="hybrid needs access to encoder, got encode"):
        run(Hybrid(), view, Assets(public_images(blobs(20, 2))))


def test_published_parameters():
    assert (Hybrid().steps, Hybrid().lr) == (150, 0.005)
