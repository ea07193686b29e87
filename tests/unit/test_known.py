"""Side knowledge: what an attacker knows of a person picks the right one out of a crowd."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from crowds import LEFT, OTHER, RIGHT, SEARCH, SHAPE, crowd, knowledge, people_in
from frostglass.attacks._search.select import Candidates
from frostglass.attacks.base import invert, prior_only
from frostglass.attacks.model.known import Known
from frostglass.auditing.experiment import experiments
from frostglass.auditing.private_facts import attribute_of_people
from frostglass.auditing.run import run_all
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.errors import ConfigError
from frostglass.core.types import Images, Target
from frostglass.data.faces import Faces
from frostglass.plan.problems import problems
from frostglass.store.store import Store
from worlds import NoWork

BASE = {"name": "gmi", **SEARCH}


def recogniser(weight: float = 20.0) -> Target:
    """A classifier of two attributes: in the upper half, and on the right."""
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(weight * torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        head.bias.fill_(-weight / 2)
    module = nn.Sequential(nn.Flatten(), head)
    return Target(module, ("upper", "right"), SHAPE, head="1", key="attribute", attributes=True)


def told(right: bool, name: str = "right") -> Assets:
    known = KnownAttribute(name, (right, False, False), recogniser())
    return replace(knowledge(), attribute=known)


def run(attack, assets, made=None):
    view = (made or crowd(left=12.0, right=10.0)).view(["gradients"])
    return invert(attack, view, assets, people=[0], seed=0, work=NoWork())


def test_the_person_who_fits_is_guessed_first():
    """The louder person is guessed first, unless the attacker knows better."""
    attack = Known(base=BASE, attribute="right", candidates=8, keep=8)
    for right, first in ((False, "left"), (True, "right")):
        guesses = people_in(run(attack, told(right)))
        assert guesses[0] == first
        assert sorted(guesses) == sorted(people_in(run(attack, told(not right))))
        fits = [guess == first for guess in guesses]
        assert fits == sorted(fits, reverse=True)


def test_steering_leads_all_searches_to_the_person_who_fits():
    attack = Known(base=BASE, attribute="right", candidates=6, keep=6)
    assert set(people_in(run(attack, told(True)))) == {"left", "right"}
    assert set(people_in(run(replace(attack, steer=3.0), told(True)))) == {"right"}
    assert set(people_in(run(replace(attack, steer=3.0), told(False)))) == {"left"}


def test_known_after_modes_lists_the_people_who_fit_first():
    modes = {"name": "modes", "base": BASE}
    attack = Known(base=modes, attribute="right", candidates=8, keep=3, steer=0.1)
    assert people_in(run(attack, told(True)))[0] == "right"
    assert attack.needs == {"prior", "embedder", "attribute"}
    assert attack.display_title == "Known attribute of Modes of GMI"


def test_the_order_by_hand():
    recipe = Known(base=BASE, attribute="right").recipe(
        crowd().view(["gradients"]), told(True), seed=0
    )
    places = [LEFT, RIGHT, OTHER, RIGHT, RIGHT]
    images = torch.tensor(places).view(1, 5, 1, 1, 2)
    score = torch.tensor([[5.0, 1.0, 3.0, 2.0, -torch.inf]])
    order = recipe.select(Candidates(images, torch.tensor([0]), score))
    assert order.tolist() == [[3, 1, 0, 2, 4]]


def test_the_baseline_knows_the_attribute_too():
    assets = told(True)
    plain = prior_only(assets.prior, [0, 1], 4, seed=0)
    known = prior_only(assets.prior, [0, 1], 4, known=assets.attribute, seed=0)
    assert known.images.shape == plain.images.shape
    right = known.images[..., 0].flatten(1) > 0.5
    assert right[0].all()
    assert not right[1].any()
    assert 0 < (plain.images[..., 0] > 0.5).sum() < 8
    assert torch.equal(known.latents.view(known.images.shape), known.images)


def test_an_attribute_of_a_person_is_that_of_most_images():
    marks = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1], [0, 0], [1, 1]]).bool()
    pixels, labels = torch.zeros(6, 1, 1, 2, dtype=torch.uint8), torch.tensor([0, 0, 0, 1, 1, 1])
    images = Images(pixels, labels, ("a", "b"), ("",) * 6, marks, ("x", "y"))
    assert attribute_of_people(images, "x") == (True, False)
    assert attribute_of_people(images, "y") == (False, True)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"needs assets\.attribute, got none"):
        run(Known(base=BASE), knowledge())
    with pytest.raises(ConfigError, match="expected to know the attribute 'hat', got 'right'"):
        run(Known(base=BASE, attribute="hat"), told(True))
    with pytest.raises(ConfigError, match="a classifier of the attribute 'hat', got one of upper"):
        run(Known(base=BASE, attribute="hat"), told(True, "hat"))
    few = replace(told(True), attribute=KnownAttribute("right", (True,), recogniser()))
    with pytest.raises(ConfigError, match="of each of 3 classes, got 1 values"):
        run(Known(base=BASE, attribute="right"), few)
    with pytest.raises(ConfigError, match="base: steer is 1, and brepmi has searches that take no"):
        Known(base={"name": "brepmi"}, steer=1.0)
    with pytest.raises(ConfigError, match="base: steer is 1, and ifgmi has searches that take no"):
        Known(base={"name": "ifgmi"}, steer=1.0)
    with pytest.raises(ConfigError, match="base: known knows one attribute"):
        Known(base={"name": "known"})
    with pytest.raises(ConfigError, match="attribute: expected the name of one, got ''"):
        Known(attribute="")


TOY = {
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 8,
        "public_identities": 12,
        "public_images": 3,
    },
    "target": {"epochs": 1, "batch": 16, "options": {"width": 4}},
    "embedder": {"epochs": 1, "batch": 16, "options": {"width": 4}},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8},
    "attack": {
        "name": "known",
        "attribute": "glasses",
        "base": {"name": "gmi", "steps": 2},
        "candidates": 2,
        "keep": 2,
    },
    "judging": {"positive_control": False},
}


def test_an_audit_tells_the_attack_one_attribute_and_nothing_else(tmp_path, monkeypatch):
    seen, recipe = [], Known.recipe
    monkeypatch.setattr(
        Known,
        "recipe",
        lambda self, view, assets, *, seed: (
            seen.append(assets) or recipe(self, view, assets, seed=seed)
        ),
    )
    (audit,) = run_all(TOY, Store(tmp_path)).audits
    (assets,) = seen
    assert assets.attribute.name == "glasses"
    test = audit.split.test
    column = test.attributes[:, test.attribute_names.index("glasses")]
    expected = [column[test.labels == person].float().mean() > 0.5 for person in range(4)]
    assert assets.attribute.present == tuple(map(bool, expected))
    assert assets.attribute.classifier.classes == ("glasses",)
    assert assets.attribute.classifier.attributes
    assert assets.embedder is None


def test_an_attribute_that_the_data_lacks_is_refused_before_anything_is_trained(monkeypatch):
    attack = TOY["attack"] | {"attribute": "glases"}
    (found,) = problems(experiments(TOY | {"attack": attack}))
    assert "the data has no attribute 'glases'; it has glasses" in found
    assert problems(experiments(TOY)) == []
    monkeypatch.setattr(Faces, "describes_public", lambda self: False)
    (found,) = problems(experiments(TOY))
    assert found.startswith("attack: public images have no attributes")
