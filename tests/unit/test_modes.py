"""Modes: one guess for each person that a class accepts, and the order of the guesses."""

import pytest
import torch

from crowds import SEARCH, crowd, knowledge, people_in
from frostglass.attacks._search.likeness import Likeness, people_among
from frostglass.attacks._search.select import Candidates
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.modes import Modes
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from worlds import PUBLIC, NoWork, prior, rng, styled_prior, target

BASE = {"name": "gmi", **SEARCH}


def run(attack, made=None, people=(0,)):
    view = (made or crowd()).view(["gradients"])
    return invert(attack, view, knowledge(), people=people, seed=0, work=NoWork())


def test_both_people_of_a_crowd_are_listed():
    """Single searches return one person again and again, and modes both of them."""
    made = crowd(left=12.0, right=10.0)
    single = run(Gmi(**SEARCH, candidates=12, keep=2), made)
    assert people_in(single) == ["left", "left"]
    listed = run(Modes(base=BASE, candidates=12, keep=2), made)
    assert sorted(people_in(listed)) == ["left", "right"]
    both = run(Modes(base=BASE, candidates=12, keep=2), made, people=(1, 0))
    assert people_in(both, row=1) == people_in(listed)


def test_clusters_are_ranked_by_size_or_by_their_best():
    """Two searches in three end on the right, and the person on the left is louder."""
    embeddings = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.02], [0.01, 1.0], [0.0, 1.0], [0.02, 1.0]]), dim=1
    )
    # Rows are in the order of the base: the best is alone in its cluster.
    assert Modes(order="size")._people(embeddings).tolist() == [1, 0]
    assert Modes(order="best")._people(embeddings).tolist() == [0, 1]
    assert Modes(order="quiet")._people(embeddings).tolist() == [1, 0]
    assert Modes(similarity=0.99999)._people(embeddings).tolist() == [0, 1, 2, 3]
    assert Modes(similarity=-0.9)._people(embeddings).tolist() == [3]  # nearest to all


def test_of_two_equal_images_the_better_one_is_the_guess():
    pair = torch.nn.functional.normalize(torch.randn(2, 64, generator=rng()), dim=1)
    assert Modes(similarity=-0.99)._people(pair).tolist() == [0]
    assert Modes()._people(pair[:0]).tolist() == []
    assert Modes()._people(pair[:1]).tolist() == [0]


def test_average_linkage_against_a_slow_reference():
    points = torch.nn.functional.normalize(torch.randn(14, 3, generator=rng(2)), dim=1).double()
    cosines = points @ points.T
    groups = [[row] for row in range(14)]
    while len(groups) > 1:
        means = {
            (a, b): cosines[groups[a]][:, groups[b]].mean().item()
            for a in range(len(groups))
            for b in range(a)
        }
        (a, b), most = max(means.items(), key=lambda pair: pair[1])
        if most < 0.4:
            break
        groups[b] += groups.pop(a)
    found = people_among(cosines, 0.4)
    fast = sorted((found == number).nonzero()[:, 0].tolist() for number in found.unique())
    assert 2 < len(groups) < 10
    assert fast == sorted(map(sorted, groups))


def test_what_broke_off_is_never_a_guess():
    assets, attack = knowledge(), Modes(base=BASE, candidates=4, keep=4)
    recipe = attack.recipe(crowd().view(["gradients"]), assets, seed=0)
    images = torch.tensor([[[0.2, 0.8], [0.21, 0.8], [0.2, 0.79], [0.8, 0.2]]]).view(1, 4, 1, 1, 2)
    score = torch.tensor([[1.0, 3.0, 2.0, -torch.inf]])
    order = recipe.select(Candidates(images, torch.tensor([0]), score))
    assert order[0, 3] == 3
    assert sorted(order[0].tolist()) == [0, 1, 2, 3]
    whole = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    order = recipe.select(Candidates(images, torch.tensor([0]), whole))
    assert order[0, 1] == 3
    none = recipe.select(Candidates(images, torch.tensor([0]), torch.full((1, 4), -torch.inf)))
    assert none.tolist() == [[0, 1, 2, 3]]


def test_embeddings_are_directions_from_the_public_mean():
    assets = knowledge()
    images = torch.rand(5, 1, 1, 2, generator=rng())
    away = images.flatten(1) - assets.public.floats().flatten(1).mean(0)
    expected = away / away.norm(dim=1, keepdim=True)
    assert torch.allclose(Likeness(assets).embed_rows(images), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("base", "known"),
    [({"name": "mirror", "variant": "subtract", "steps": 3, "pool": 20}, styled_prior()),
     ({"name": "ppa", "steps": 2, "pool": 20, "trials": 1}, prior()),
     ({"name": "kedmi", "steps": 2, "draws": 2}, prior()),
     ({"name": "brepmi", "points": 4, "radius": 0.5, "max_queries": 60}, prior())],
    ids=["mirror", "ppa", "kedmi", "brepmi"],
)  # fmt: skip
def test_any_attack_on_models_can_be_the_base(base, known):
    attack = Modes(base=base, candidates=3, keep=3)
    made = target()
    assets = Assets(public=PUBLIC, prior=known, embedder=target(seed=3))
    found = invert(attack, made.view(attack.access), assets, people=[2, 1], work=NoWork())
    assert found.images.shape[:2] == (2, 3)
    for row in found.draws.tolist():
        assert len(set(row)) == 3


def test_what_cannot_be():
    with pytest.raises(
        ConfigError, match=r"Modes: base: no attack named 'gmj': did you mean 'gmi'"
    ):
        Modes(base={"name": "gmj"})
    with pytest.raises(
        ConfigError, match=r"base: Gmi: stepz: no such parameter; did you mean 'steps"
    ):
        Modes(base={"name": "gmi", "stepz": 1})
    with pytest.raises(ConfigError, match="base: candidates is a parameter of modes itself"):
        Modes(base={"name": "gmi", "candidates": 3})
    with pytest.raises(ConfigError, match="base: expected an attack on models, got decoder"):
        Modes(base={"name": "decoder"})
    with pytest.raises(ConfigError, match="base: expected a table with a name, got"):
        Modes(base={})
    with pytest.raises(ConfigError, match=r"base: Mirror: pool \(8\) must be at least candidates"):
        Modes(base={"name": "mirror", "pool": 8}, candidates=9)
    with pytest.raises(ConfigError, match=r"keep \(21\) must not exceed candidates \(20\)"):
        Modes(keep=21)
    view = crowd().view(["gradients"])
    with pytest.raises(ConfigError, match=r"modes needs assets\.embedder, got none"):
        invert(Modes(base=BASE), view, Assets(prior=knowledge().prior))
    alone = Assets(prior=knowledge().prior, embedder=knowledge().embedder)
    with pytest.raises(ConfigError, match=r"modes needs assets\.public, got none"):
        invert(Modes(base=BASE), view, alone)
    assert Modes(base=BASE).display_title == "Modes of GMI"
