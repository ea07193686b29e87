"""Decoys: who is added, how often everyone is shown, and what the loss does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, TrainingProgress, TrainingSize
from frostglass.defenses.training._people_head import PeopleHead
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.decoys import Decoys
from frostglass.defenses.training.label_smoothing import smoothed_cross_entropy
from frostglass.priors._files import save_prior
from frostglass.priors.wgan import Wgan
from frostglass.training.images import TrainingImages
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import SMALL_GAN, images, rng, split, target

CONFIG = Training(model="cnn", options={"width": 4}, epochs=2, batch=16)


def shown(defense, parts=None, seed=0):
    parts = parts or split()
    return TrainingImages.of(parts, parts.train.labels, [defense], seed=seed)


def test_each_class_gets_its_own_secret_people():
    added = Decoys(people=2).added_images(split(), seed=0)
    assert added.labels.bincount().tolist() == [8, 8, 8, 8]  # 2 people with 4 images each
    assert torch.equal(added.labels, added.people // 3)  # of 3 with the private person
    numbers = added.people.unique()
    assert sorted([*numbers.tolist(), *added.private.tolist()]) == list(range(12))
    whose = {tuple(added.pixels[added.people == who].flatten().tolist()) for who in numbers}
    assert len(whose) == 8


def test_whose_decoys_they_are_depends_on_the_seed_alone():
    one, same, other = (Decoys(people=1).added_images(split(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.pixels[:], same.pixels[:])
    assert not torch.equal(one.pixels[:], other.pixels[:])


def test_every_person_is_shown_equally_often_in_an_epoch():
    everyone = shown(Decoys(people=2, per_epoch=3))
    index = everyone.of_epoch(rng())
    assert len(index) == len(everyone) == 12 * 3  # 4 private people and 8 decoys
    assert everyone.people[index].bincount().tolist() == [3] * 12
    private = index[~everyone.added(index)]
    assert (private < len(split().train)).all()
    assert len(private.unique()) == 4 * 3  # nobody is shown twice who has enough images


def test_people_with_too_few_images_repeat_them():
    everyone = shown(Decoys(people=1, images=2, per_epoch=5))
    index = everyone.of_epoch(rng())
    decoys = index[everyone.added(index)]
    assert sorted(everyone.people[decoys].bincount(minlength=8).tolist()) == [0] * 4 + [5] * 4
    counts = decoys.bincount()[len(split().train) :].unflatten(0, (4, 2))
    assert counts.sort(1).values.tolist() == [[2, 3]] * 4


def test_people_without_images_are_left_out():
    parts = split()
    few = parts.train.at((parts.train.labels < 2).nonzero().flatten())
    everyone = shown(Decoys(people=1, per_epoch=3), replace(parts, train=few))
    index = everyone.of_epoch(rng())
    assert len(index) == len(everyone) == (2 + 4) * 3


def test_without_added_people_an_epoch_shows_every_image_once():
    plain = shown(Decoys(people=0))
    assert plain.of_epoch(rng()).tolist() == list(range(48))
    assert plain.added(torch.arange(3)) is None


def batch(logits, labels, added, people=None, **tapped):
    blank, now = torch.zeros(len(labels), 3, 4, 4), TrainingProgress(0, 1)
    whose = torch.zeros_like(labels) if people is None else people
    return Batch(blank, labels, logits, tapped, now, added=added, people=whose)


def test_quiet_smooths_the_labels_of_private_images_alone():
    logits, labels = torch.randn(6, 4, generator=rng()), torch.tensor([0, 1, 2, 3, 0, 1])
    added = torch.tensor([False, True, False, True, True, False])
    term = Decoys(quiet=0.2).losses(batch(logits, labels, added))["quiet"]
    plain = F.cross_entropy(logits, labels)
    private, decoys = ~added, added
    expected = (
        smoothed_cross_entropy(logits[private], labels[private], 0.2) * private.sum()
        + F.cross_entropy(logits[decoys], labels[decoys]) * decoys.sum()
    ) / 6
    assert torch.isclose(plain + term.weight * term.value, expected, atol=1e-6)


def test_match_compares_the_mean_margins():
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    added = torch.tensor([False, True, True])
    term = Decoys(match=0.5).losses(batch(logits, torch.zeros(3, dtype=torch.long), added))["match"]
    assert term.weight == 0.5
    assert term.value.item() == pytest.approx(0.0)  # 3 and (1 + 5) / 2
    logits[0, 0] = 5.0
    term = Decoys(match=0.5).losses(batch(logits, torch.zeros(3, dtype=torch.long), added))["match"]
    assert term.value.item() == pytest.approx(4.0)


def test_places_differ_by_class_seed_and_private_images():
    places = Decoys(people=3)._places(split(), 0)
    assert places.sort(1).values.tolist() == torch.arange(16).unflatten(0, (4, 4)).tolist()
    assert len(set((places[:, 0] % 4).tolist())) > 1  # the private person is not always the first
    other = replace(split().train, pixels=255 - split().train.pixels)
    # An attacker who knows the seed must not know the place.
    assert not torch.equal(places, Decoys(people=3)._places(replace(split(), train=other), 0))
    assert not torch.equal(places, Decoys(people=3)._places(split(), 1))


def test_the_head_adds_up_the_probabilities_of_a_class():
    head = PeopleHead(5, 4, 3)
    features = torch.randn(6, 5, generator=rng())
    units = head.units(features)
    expected = units.softmax(1).unflatten(1, (4, 3)).sum(2)
    assert torch.allclose(head(features).softmax(1), expected, atol=1e-6)
    head.separate = True
    assert torch.equal(head(features), units)


def test_classes_and_people_together_are_cross_entropy_of_everybody():
    head, people = PeopleHead(5, 4, 3), torch.tensor([0, 2, 5, 11, 7, 3])
    features = torch.randn(6, 5, generator=rng())
    logits, units = head(features), head.units(features)
    each = batch(logits, people // 3, torch.zeros(6, dtype=torch.bool), people, head=units)
    term = Decoys(people=2).losses(each)["people"]
    total = F.cross_entropy(logits, people // 3) + term.weight * term.value
    assert torch.isclose(total, F.cross_entropy(units, people), atol=1e-6)


@pytest.mark.parametrize("head", ["people", "classes"])
def test_the_head_is_trained(head):
    defense = Decoys(people=2, head=head)
    trained = train_target(CONFIG, split(), [defense], seed=0)
    assert trained.module(torch.rand(2, 3, 16, 16)).shape == (2, 4)
    units = trained.module.get_submodule(trained.head)
    assert len(units.weight) == (12 if head == "people" else 4)
    assert ("people" in trained.info["history"][0]) == (head == "people")


def test_a_trained_model_is_hardened_afterwards(tmp_path):
    """All but the head of a given model is the start, as with a first stage of its own."""
    plain = train_target(CONFIG, split(), seed=0)
    weights = tmp_path / "plain.safetensors"
    save_file(plain.module.state_dict(), weights)
    given = replace(CONFIG, start=str(weights), epochs=1, lr=1e-12)
    trained = train_target(given, split(), [Decoys(people=1)], seed=1)
    first, start = (each.module.get_submodule("stage1.0").weight for each in (trained, plain))
    assert torch.allclose(first, start, atol=1e-6)
    staged = train_target(CONFIG, split(), [Decoys(people=1, pretrain="private")], seed=0)
    assert staged.info["first_stage"]["data"] == "private"
    assert len(staged.module.get_submodule(staged.head).weight) == 8


def test_a_head_of_its_own_does_not_go_with_another():
    with pytest.raises(ConfigError, match="decoys and calor both replace the head"):
        train_target(CONFIG, split(), [Decoys(people=1), Calor(rank=2, switch=0.0)], seed=0)
    both = [Decoys(people=1, head="classes"), Calor(rank=2, switch=0.0)]
    train_target(CONFIG, split(), both, seed=0)


def test_facts_tell_the_crowd_and_how_loud_it_is():
    trained = train_target(CONFIG, split(), [Decoys(people=2)], seed=0)
    facts = trained.info["facts"]["decoys"]
    assert facts["k"] == 3
    assert facts["expected_first_guess"] == pytest.approx(1 / 3)
    assert 0 <= facts["decoys_called_y"] <= 1
    assert {"margin_private", "margin_decoys", "margin_gap"} <= facts.keys()


def test_too_few_secret_people_are_refused_before_training():
    with pytest.raises(
        ConfigError, match=r"expected 12 secret people \(3 for each of 4 classes\), "
    ):
        train_target(CONFIG, split(), [Decoys(people=3)], seed=0)
    with pytest.raises(ConfigError, match=r"got 0: set split.secret, data.secret"):
        train_target(CONFIG, replace(split(), secret=None), [Decoys(people=1)], seed=0)


def test_two_sources_of_images_are_refused():
    with pytest.raises(ConfigError, match="decoys and decoys both add images"):
        train_target(CONFIG, split(), [Decoys(people=1), Decoys(people=1)], seed=0)


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secret")
    prior = Wgan(**SMALL_GAN | {"steps": 1}).train(images(16, 4, names="owner"), seed=0)
    save_prior(prior, folder)
    return folder / "prior.safetensors"


@pytest.mark.parametrize("source", ["draws", "morphs"])
def test_people_can_be_drawn_from_a_generator_that_is_kept_secret(source, generator):
    defense = Decoys(people=2, source=source, generator=generator, images=3)
    assert defense.files() == [generator]
    assert defense.problems(target(), TrainingSize(48, 16, 2)) == []
    added = defense.added_images(replace(split(), secret=None), seed=0)
    assert added.pixels.shape == (4 * 2 * 3, 3, 16, 16)
    again = defense.added_images(split(), seed=0)
    assert torch.equal(added.pixels, again.pixels)
    assert not torch.equal(added.pixels[0], added.pixels[1])


def test_images_of_one_drawn_person_are_nearer_than_those_of_two(generator):
    defense = Decoys(people=4, source="draws", generator=generator, images=4, spread=0.1)
    faces = defense.added_images(split(), seed=0).pixels.float().flatten(1).unflatten(0, (16, 4))
    within = (faces - faces.mean(1, keepdim=True)).square().mean()
    between = (faces.mean(1) - faces.mean((0, 1))).square().mean()
    assert within < between


def test_a_shipped_generator_is_no_secret():
    (problem,) = Decoys(source="draws", generator="faces32").problems(
        target(), TrainingSize(48, 16, 2)
    )
    assert "ships with Frostglass and is no secret" in problem


def test_a_generator_needs_its_source_and_the_other_way_round():
    for values in ({"generator": "own.safetensors"}, {"source": "draws"}):
        with pytest.raises(ConfigError, match="give both or neither"):
            Decoys(**values)
