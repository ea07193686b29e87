"""A dry run knows the images that evaluators train on: those of their own, and public people."""

import tomllib
from dataclasses import replace

import pytest
import torch

from commands import TOY
from frostglass.auditing import networks
from frostglass.auditing.experiment import experiments
from frostglass.auditing.fractions import Fractions
from frostglass.data.faces import Faces
from frostglass.evaluators.embedder import read_embedder
from frostglass.plan.brief import blank_split, few_of_each
from frostglass.plan.estimate import dry_run
from frostglass.store.store import Store
from worlds import images

DATA = Faces(size=16, identities=4, images=8, public_identities=6, public_images=1)


def test_a_blank_split_has_the_images_of_evaluators():
    split = blank_split(DATA, Fractions(test=0.25, validation=0.125, evaluators=0.375))
    sizes = [len(part) for part in (split.train, split.validation, split.test, split.evaluators)]
    assert sizes == [8, 4, 8, 12]
    assert len(split.known_to_evaluators) == 20
    assert blank_split(DATA, Fractions(test=0.25, validation=0.125)).evaluators is None


def test_evaluators_are_planned_on_their_images_and_the_target_on_its_own(tmp_path):
    config = tomllib.loads(TOY)
    config["split"] = {"test": 0.25, "validation": 0.125, "evaluators": 0.375}
    steps, unknown = dry_run(experiments(config), Store(tmp_path))
    assert unknown == ""
    works = [step.work for _, _, step in steps if step.title.startswith("target")]
    networks = ["resnet: 1 epochs × 20 images", "lenet: 1 epochs × 20 images"]
    assert works == [*networks, "cnn: 2 epochs × 8 images"]


def test_a_brief_training_keeps_ten_images_of_many_people_in_any_order():
    public = images(60 * 40, 40, shape=(3, 8, 8))
    kept = few_of_each(public, 256)
    assert kept.labels.bincount().tolist() == [10] * 25 + [6]
    assert kept.pixels.is_meta
    shuffled = public.at(torch.randperm(len(public), generator=torch.Generator().manual_seed(0)))
    assert few_of_each(shuffled, 256).labels.tolist() == kept.labels.tolist()


def test_a_brief_training_takes_more_images_of_few_people_and_nobody_with_two():
    sizes = [2, 200, 12, 2, 30]
    whose = torch.arange(5).repeat_interleave(torch.tensor(sizes))
    public = replace(images(len(whose), 5, shape=(3, 8, 8)), labels=whose)
    assert few_of_each(public, 64).labels.bincount().tolist() == [0, 30, 12, 0, 22]


@pytest.mark.parametrize("start", ["", 'start = "public"'])
def test_a_training_on_public_people_with_many_images_is_dry_run(tmp_path, start):
    """A head of the public images would hold one or two people."""
    text = TOY.replace("public_identities = 30", "public_identities = 15")
    text = text.replace("public_images = 1", "public_images = 160")
    text = text.replace('model = "lenet"', f'model = "lenet"\n{start}')
    config = tomllib.loads(text)
    if not start:
        config["evaluators"].append({"kind": "embedder", "source": "public"})
    _, unknown = dry_run(experiments(config), Store(tmp_path))
    assert unknown == ""


def test_an_embedder_is_read_once_for_all_experiments_of_a_grid(tmp_path, monkeypatch):
    read = []

    def counted(*args):
        read.append(args)
        return read_embedder(*args)

    monkeypatch.setattr(networks, "read_embedder", counted)
    config = tomllib.loads(TOY)
    config["evaluators"].append({"kind": "embedder", "source": "faces32"})
    config["grid"] = {"attack.steps": [3, 4, 5]}
    _, unknown = dry_run(experiments(config), Store(tmp_path))
    assert unknown == ""
    assert len(read) == 1


@pytest.mark.parametrize("images", [8, 12])  # of which two, or three, are held out
def test_the_first_images_of_blank_people_differ_in_their_attributes(images):
    """An audit of features with one image of each person can then be estimated."""
    split = blank_split(replace(DATA, images=images), Fractions(test=0.25, validation=0.125))
    first = split.test.labels.diff(prepend=torch.tensor([-1])) != 0
    assert 0 < int(split.test.attributes[first].sum()) < split.test.attributes[first].numel()
    assert 0 < int(split.test.attributes[split.test.labels == 0][:2, 0].sum()) < 2
