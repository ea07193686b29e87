"""Attacks run on folded networks, and end with the same results."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from counting import Counted
from feature_worlds import blobs, run, view_of
from frostglass.attacks._search import layout, runner
from frostglass.attacks._search.shards import people_per_shard
from frostglass.attacks.base import invert
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.types import Target
from frostglass.runtime.folding import folded
from worlds import NoWork, prior, target


def attack(attacked: Target, known, **options):
    settings = {"steps": 6, "lr": 0.1, "coupling": 1} | options
    view = attacked.view(["gradients"])
    return invert(Gmi(**settings), view, Assets(prior=known), seed=0, work=NoWork())


def test_folding_leaves_the_results_of_an_attack(monkeypatch):
    attacked, known = target(), prior()
    rng = torch.Generator().manual_seed(3)
    for norm in (attacked.module[1], known.generator[1]):
        norm.running_mean.copy_(torch.rand(norm.num_features, generator=rng) / 4)
        norm.running_var.copy_(torch.rand(norm.num_features, generator=rng) + 0.5)
    norms = Counted(monkeypatch)
    quick = attack(attacked, known)
    assert norms.calls == 4  # the two trials without folding, on two networks; none in the search
    monkeypatch.setattr(layout, "unchanged_when_folded", lambda view, prior: [])
    slow = attack(attacked, known)
    # A trial of layouts, one of batches with and without padding, six steps and the read-out.
    assert norms.calls == 4 + 2 + 2 * 2 + 2 * 7
    assert torch.allclose(quick.latents, slow.latents, atol=1e-4)
    assert torch.allclose(quick.confidence, slow.confidence, atol=1e-4)
    assert quick.queries == slow.queries


def test_folding_leaves_the_results_of_an_attack_on_features(monkeypatch):
    encoder, known = target().module[:3].eval(), prior()
    encoder[1].running_mean.fill_(0.2)
    encoder[1].running_var.fill_(0.6)
    view = view_of(encoder, blobs(3, 1, (3, 16, 16)), ["encoder"])
    latent = Latent(steps=6, tries=1)
    norms = Counted(monkeypatch)
    quick = run(latent, view, Assets(prior=known))
    folded_calls, norms.calls = norms.calls, 0
    monkeypatch.setattr(layout, "unchanged_when_folded", lambda view, prior: [])
    slow = run(latent, view, Assets(prior=known))
    # Both networks in six steps, which the search on folded ones does not count; the trial of
    # folding, which the other search does not have, counts both once.
    assert norms.calls - folded_calls == 2 * 6 - 2
    assert torch.allclose(quick.latents, slow.latents, atol=1e-4)
    assert quick.queries == slow.queries


class Indexing(nn.Module):
    """Indexes into a Sequential, and ignores the batch norm after its first layer."""

    def __init__(self, inner: nn.Sequential):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        maps = self.inner[0](images)
        return self.inner[2:](maps) + 0 * self.inner[1](maps).mean()


def test_a_network_that_indexes_into_a_sequential_is_attacked_unfolded(monkeypatch):
    attacked = target()
    attacked.module[1].running_var.fill_(9.0)
    indexing = replace(attacked, module=Indexing(attacked.module), head="inner.6")
    counts = []

    def counted(*networks):
        counts.append(len(networks))
        return folded(*networks)

    monkeypatch.setattr(layout, "folded", counted)
    result = attack(indexing, prior())
    assert counts == [4, 0]
    monkeypatch.setattr(layout, "unchanged_when_folded", lambda view, prior: [])
    assert torch.equal(result.latents, attack(indexing, prior()).latents)


@pytest.mark.parametrize(
    ("batch", "candidates", "people", "searches"),
    [(64, 5, 16, [48, 32]), (64, 2, 32, [64]), (64, 1, 64, [64]), (2, 3, 1, [3])],
)
def test_sizes_of_shards_need_little_padding(batch, candidates, people, searches, monkeypatch):
    gmi = Gmi(steps=1, batch=batch, candidates=candidates, keep=1)
    assert people_per_shard(gmi.rows, gmi.batch_multiple, candidates, people) == people
    sizes, read_out = [], runner.read_out
    module = nn.Sequential(nn.Flatten(), nn.Linear(768, 80))
    classes = tuple(map(str, range(80)))
    wide = Target(module=module, classes=classes, image_shape=(3, 16, 16), head="1", key="wide")

    def recorded(view, recipe, prior, latents, *more):
        sizes.append(len(latents))
        return read_out(view, recipe, prior, latents, *more)

    monkeypatch.setattr(runner, "read_out", recorded)
    assets, view = Assets(prior=prior()), wide.view(["gradients"])
    invert(gmi, view, assets, people=range(people), seed=0, work=NoWork())
    assert sizes == searches
