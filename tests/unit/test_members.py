"""Members: every unit of a class is inverted, and an ordinary head has one unit per class."""

import pytest
import torch

from frostglass.attacks.base import attacks, invert
from frostglass.attacks.model.members import Members
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.objective import margin
from frostglass.defenses.training.decoys import Decoys
from worlds import prior, rng, target

BASE = {"name": "gmi", "steps": 60, "pool": 200, "lr": 0.1, "coupling": 1, "optimizer": "adam"}
CROWD = Decoys(people=2).prepare(target(), seed=0)
CROWD.module.eval()


def test_a_view_by_unit_shows_the_units_and_counts_queries():
    view = CROWD.view({"gradients"})
    units, each = view.by_unit()
    images = torch.rand(5, *CROWD.image_shape, generator=rng())
    assert (each, units.classes) == (3, 12)
    inner = units.logits(images)
    assert inner.shape == (5, 12)
    merged = inner.unflatten(1, (4, 3)).logsumexp(2)
    assert torch.allclose(merged, view.logits(images), atol=1e-5)  # the target is unchanged
    assert view.queries == units.queries == 10


def test_an_ordinary_head_has_one_unit_for_each_class():
    units, each = target().view({"gradients"}).by_unit()
    assert (each, units.classes) == (1, 4)


def test_each_search_aims_at_a_unit_of_its_own():
    """Of the images of a class, the one that was made for a unit suits that unit best."""
    attack = Members(base=BASE | {"loss": "margin"}, candidates=3, keep=3)
    view = CROWD.view(attack.access)
    result = invert(attack, view, Assets(prior=prior()), people=[0, 2], seed=0)
    units, _ = view.by_unit()
    for person, images, order in zip((0, 2), result.images, result.draws, strict=True):
        aimed = 3 * person + order % 3
        logits = units.logits(images).detach()
        margins = torch.stack([-margin(logits, unit.repeat(3)) for unit in aimed])
        assert margins.argmax(1).tolist() == [0, 1, 2]


def test_without_units_it_is_its_base():
    known, people = Assets(prior=prior()), [0, 1, 2]
    attack = Members(base=BASE, candidates=3, keep=2)
    base = attacks.build(BASE | {"candidates": 3, "keep": 2})
    results = [
        invert(each, target().view(each.access), known, people=people, seed=0)
        for each in (attack, base)
    ]
    assert torch.allclose(results[0].images, results[1].images, atol=1e-5)


def test_bases_that_see_no_units_are_refused():
    with pytest.raises(ConfigError, match="base: members sees the units of the network"):
        Members(base={"name": "mirror_genetic"})
    with pytest.raises(ConfigError, match="base: students answer for classes"):
        Members(base={"name": "gmi", "variant": "subtract"})
