"""A model that was given is examined before an audit: each mistake is refused or said."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Target
from frostglass.models.base import Preprocess
from frostglass.models.class_order import advice, exchanged, in_order
from frostglass.models.wrap import wrap
from frostglass.training.examine import examination, examine
from worlds import images, rng, split

PEOPLE, SHAPE = 12, (3, 24, 24)
IMAGES = images(PEOPLE * 20, PEOPLE, shape=SHAPE)
NAMES = IMAGES.names


class Through(nn.Module):
    """A network whose input and output pass through functions."""

    def __init__(self, net, before=lambda x: x, after=lambda x: x):
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x):
        return self.after(self.net(self.before(x)))


def reader(classes=PEOPLE, shape=SHAPE, scale=40.0, level=0.4, noise=0.0):
    """A linear classifier of the images of `worlds`: how bright is each band?"""
    band = shape[1] // classes
    rows = torch.zeros(classes, *shape)
    for number in range(classes):
        rows[number, :, number * band : (number + 1) * band] = scale / (shape[0] * shape[2] * band)
    net = nn.Sequential(nn.Flatten(), nn.Linear(rows[0].numel(), classes))
    with torch.no_grad():
        net[1].weight.copy_(rows.flatten(1) + noise * torch.randn(net[1].weight.shape,
                                                                  generator=rng(3)))  # fmt: skip
        net[1].bias.fill_(-scale * level)
    return net


def rotated(net, who):
    """Exchange rows of the head: the first of `who` gets the row of the last."""
    with torch.no_grad():
        for weight in net[1].parameters():
            weight[who] = weight[[*who[-1:], *who[:-1]]]
    return net


def target(module, classes=NAMES, shape=SHAPE, head="1"):
    return Target(module, classes=tuple(classes), image_shape=shape, head=head)


def found(module, data=IMAGES, classes=None):
    classes = data.names if classes is None else classes
    return examination(target(module, classes, data.shape), data, data.labels)


def only(problems):
    (problem,) = problems
    assert "\n" not in problem
    return problem


def test_a_good_model_is_not_refused():
    good = found(reader())
    assert (good.problems, good.warnings, good.order) == ((), (), ())
    assert good.accuracy > 0.99
    assert len(good.recall) == PEOPLE
    assert min(good.recall) > 0.9


def test_three_of_twelve_rotated_classes_are_refused_with_the_order_to_set():
    module = rotated(reader(), [2, 5, 7])
    wrong = found(module)
    message = only(wrong.problems)
    assert message.startswith("3 of 12 classes are in another order than stated (20 of 20 images")
    assert wrong.accuracy == pytest.approx(0.75, abs=0.02)
    # Row 5 now holds person 2, row 7 person 5, row 2 person 7.
    expected = [f"person {i}" for i in (0, 1, 7, 3, 4, 2, 6, 5, 8, 9, 10, 11)]
    assert list(wrong.order) == expected
    assert message.endswith(f"set classes = {json.dumps(expected)}")
    mended = in_order(target(module, wrong.order), NAMES)
    good = examination(mended, IMAGES, IMAGES.labels)
    assert good.problems == ()
    assert good.accuracy > 0.99


def test_advice_refers_to_the_order_that_was_stated():
    """A stated order that is wrong in two places is corrected, not the order of the people."""
    stated = [NAMES[i] for i in (3, 2, 1, 0, *range(4, PEOPLE))]
    true = [NAMES[i] for i in (2, 3, 1, 0, *range(4, PEOPLE))]
    index = [NAMES.index(name) for name in true]
    module = reader()
    with torch.no_grad():
        for weight in module[1].parameters():
            weight.copy_(weight[index])
    given = in_order(target(module, stated), NAMES)
    wrong = examination(given, IMAGES, IMAGES.labels, stated)
    assert list(wrong.order) == true


def test_long_orders_name_only_what_is_wrong():
    names = tuple(f"p{i:02}" for i in range(30))
    text = advice({"p03": "p04", "p04": "p03"}, names)
    assert text.endswith("'p00', 'p01', ... replace 'p03' by 'p04', 'p04' by 'p03'")


def test_all_classes_in_another_order():
    data = images(60, 3, shape=SHAPE)
    wrong = found(rotated(reader(3), [0, 1, 2]), data)
    assert wrong.order == ("person 2", "person 0", "person 1")


def test_two_exchanged_classes_out_of_two():
    data = images(40, 2, shape=SHAPE)
    assert found(reader(2), data).problems == ()
    assert found(rotated(reader(2), [0, 1]), data).order == ("person 1", "person 0")


def test_two_people_who_look_alike_are_a_warning():
    """The true class comes second, as it does for lookalikes."""
    confusion = np.diag([20] * 6)
    confusion[:2, :2] = [[1, 19], [18, 2]]
    (cycle,) = exchanged(confusion, np.zeros_like(confusion))
    assert (cycle.classes, cycle.moved, cycle.kept, cycle.certain) == ((0, 1), 37, 3, True)
    second = np.zeros_like(confusion)
    second[[0, 1], [1, 0]] = 17
    assert [cycle.certain for cycle in exchanged(confusion, second)] == [False]


def test_too_few_images_to_be_certain():
    confusion = np.diag([3] * 12)
    confusion[:2, :2] = [[0, 3], [3, 0]]
    assert [cycle.certain for cycle in exchanged(confusion, np.zeros_like(confusion))] == [False]


def honest_world(generator, people, noise, each):
    """Count what a nearest-prototype classifier makes of noisy images of each person."""
    centres = generator.normal(size=(people, 6))
    spread = noise * np.exp(0.4 * generator.normal(size=(people, 1)))
    learned = centres + spread / np.sqrt(8) * generator.normal(size=centres.shape)
    confusion, second = np.zeros((2, people, people), dtype=int)
    sizes = np.maximum(1, each * np.exp(generator.normal(size=people))).astype(int)
    for own in range(people):
        seen = centres[own] + spread[own] * generator.normal(size=(sizes[own], 6))
        order = ((seen[:, None] - learned) ** 2).sum(2).argsort(1)
        np.add.at(confusion[own], order[:, 0], 1)
        np.add.at(second[own], order[order[:, 1] == own, 0], 1)
    return confusion, second


def test_honest_models_are_hardly_ever_refused():
    generator, worlds, refused = np.random.default_rng(0), 0, 0
    for number in range(1200):
        people, each = (2, 4, 12)[number % 3], (3, 8, 20)[number // 3 % 3]
        confusion, second = honest_world(generator, people, generator.uniform(0.3, 1.6), each)
        accuracy = np.trace(confusion) / confusion.sum()
        if max(0.4, 1.2 / people) <= accuracy <= 0.95:
            worlds += 1
            refused += any(cycle.certain for cycle in exchanged(confusion, second))
    assert worlds > 600
    assert refused <= 1


def test_a_weak_model_is_not_refused():
    weak = found(reader(noise=1.2))
    assert 0.35 < weak.accuracy < 0.9
    assert weak.problems == ()


def test_a_class_that_is_never_right_is_named():
    net = reader()
    with torch.no_grad():
        net[1].bias[4] -= 100
    missing = found(net)
    assert missing.problems == ()
    assert "no image of person 4 is classified correctly" in only(missing.warnings)


def test_a_model_that_knows_nobody_is_refused():
    net = reader()
    with torch.no_grad():
        net[1].weight.normal_(generator=rng(1))
    message = only(found(net).problems)
    assert "of the private images correctly, where guessing gives 8%. Check its weights" in message


def test_few_images_of_a_model_at_chance_are_a_warning():
    data = images(4, 4, shape=SHAPE)
    net = reader(4)
    with torch.no_grad():
        net[1].bias[0] += 1000
    some = found(net, data)
    assert some.problems == ()
    assert "where guessing gives 25%" in only(some.warnings)


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (lambda x: x.softmax(1), "the outputs are probabilities (they sum to 1), not logits"),
        (lambda x: x.log_softmax(1), ""),
        (torch.sigmoid, ""),
    ],
)
def test_outputs_that_are_not_logits(after, problem):
    seen = found(Through(reader(), after=after))
    if problem:
        assert problem in only(seen.problems)
        assert "remove the softmax" in only(seen.problems)
    else:
        words = {True: "log-probabilities", False: "all outputs are in [0, 1]"}
        assert words[after is not torch.sigmoid] in only(seen.warnings)
        assert seen.problems == ()


def test_probabilities_of_attributes_are_refused():
    data = replace(IMAGES, attributes=torch.rand(len(IMAGES), 3, generator=rng()) > 0.5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 3), nn.Sigmoid())
    predicts = replace(target(net, "abc"), attributes=True)
    seen = examination(predicts, data, data.attributes.float())
    assert only(seen.problems).endswith("remove the sigmoid at the end")


@pytest.mark.parametrize(
    ("mean", "std", "setting"),
    [
        ([0.0] * 3, [1 / 255] * 3, "mean = [0, 0, 0], std = [0.0039216, 0.0039216, 0.0039216]"),
        ([0.5] * 3, [0.5] * 3, "mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] ([-1, 1])"),
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], "mean = [0.485, 0.456, 0.406], std = [0"),
    ],
)
def test_inputs_in_another_range_are_refused_with_the_setting(mean, std, setting):
    net = nn.Sequential(Affine(mean, std), *reader(level=0.4))
    message = found(net, classes=NAMES).problems
    assert f"the model expects other inputs. Set {setting}" in only(message)
    assert found(Preprocess(net, mean, std)).problems == ()


class Affine(nn.Module):
    """Undoes a normalisation, and gets lost in inputs far from images."""

    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def forward(self, x):
        x = x * self.std + self.mean
        mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
        return torch.where((mean < 0.15) | (mean > 0.5) | (std < 0.12), torch.zeros_like(x), x)


def test_reversed_channels_are_refused():
    data = images(PEOPLE * 20, PEOPLE, shape=SHAPE)
    data.pixels[:, 1:] = torch.randint(0, 250, data.pixels[:, 1:].shape, generator=rng(4)).byte()
    net = reader()
    with torch.no_grad():  # reads the last channel only
        net[1].weight.view(PEOPLE, *SHAPE)[:, 2] *= 3
        net[1].weight.view(PEOPLE, *SHAPE)[:, :2] = 0
    message = only(found(net, data).problems)
    assert "reverse the channels in its forward (BGR)" in message


def test_noise_is_said():
    noisy = found(Through(reader(), after=lambda x: x + 0.1 * torch.randn(x.shape)))
    assert noisy.problems == ()
    assert "not deterministic" in only(noisy.warnings)
    assert "attack.samples" in only(noisy.warnings)


def test_noise_that_is_numbered_is_deterministic():
    class Numbered(nn.Module):
        draw = 0

        def forward(self, x):
            return x + torch.randn(x.shape, generator=rng(self.draw)) * 0.1

    assert found(nn.Sequential(reader(), Numbered())).warnings == ()


def test_batch_statistics_are_refused():
    norm = nn.BatchNorm1d(PEOPLE, affine=False, track_running_stats=False)
    message = only(found(nn.Sequential(reader(), norm)).problems)
    assert "with the other images of its batch: use running statistics" in message


def test_a_layer_that_stays_in_training_mode_is_refused():
    class Always(nn.Dropout):
        def train(self, mode=True):
            return super().train(True)

    module = nn.Sequential(*reader(), Always(0.5))
    module.train()
    message = only(found(module).problems)
    assert message.startswith("2 stays in training mode after eval()")
    assert all(part.training for part in module.modules())


def test_outputs_that_are_not_finite_are_refused():
    with pytest.raises(ConfigError, match="returns NaN or infinity for private images"):
        found(Through(reader(), after=lambda x: x / 0))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (("a", "b", "x"), "got 3 without 'c' and with the unknown 'x'"),
        (("a", "b"), "expected the names of the 3 people, each once, .* got 2 without 'c'"),
        (("a", "b", "c", "c"), "got 4 with repetitions"),
    ],
)
def test_an_order_that_is_no_permutation(stated, message):
    with pytest.raises(ConfigError, match=message):
        in_order(target(reader(3), stated), ("a", "b", "c"))


def test_outputs_that_cannot_be_reordered_are_refused():
    mixed = nn.Sequential(nn.Flatten(), nn.Linear(1728, 3), nn.Linear(3, 3))
    with pytest.raises(ModelError, match="return them in the order 'a', 'b'"):
        in_order(target(mixed, "cba", head="1"), ("a", "b", "c"))


def test_a_wrapped_model_is_examined_and_put_in_order():
    data = split(classes=4)
    module = rotated(reader(4, (3, 16, 16)), [0, 1, 3])
    true = tuple(data.classes[i] for i in (3, 0, 2, 1))
    with pytest.raises(ConfigError, match=r'set classes = \["person 3", "person 0", "person 2"'):
        examine(wrap(module, classes=4, image_shape=(3, 16, 16)), data)
    known = examine(wrap(module, classes=true, image_shape=(3, 16, 16)), data)
    assert known.classes == data.classes
    assert known.info["given"] is True
    assert known.info["accuracy"]["test"] > 0.9
    assert known.info["examination"]["warnings"] == []
    inputs = data.test.floats()
    assert torch.equal(known.module(inputs), module(inputs)[:, [1, 3, 2, 0]])


def test_an_order_that_is_given_is_believed_and_the_better_one_is_named():
    data = split(classes=4)
    target_of = wrap(rotated(reader(4, (3, 16, 16)), [0, 1]), classes=4, image_shape=(3, 16, 16))
    with pytest.raises(ConfigError, match="If the stated order is right, give it as classes; othe"):
        examine(target_of, data)
    known = examine(target_of, data, classes=data.classes)
    assert known.info["accuracy"]["test"] == pytest.approx(0.5, abs=0.1)
    warning = only(known.info["examination"]["warnings"])
    assert warning.startswith("2 of 4 classes seem to be in another order than stated")
    better = [data.classes[i] for i in (1, 0, 2, 3)]
    assert warning.endswith(f"if it is wrong, set classes = {json.dumps(better)}")


def test_an_order_that_is_given_does_not_save_a_model_that_knows_nobody():
    data = split(classes=4)
    module = rotated(reader(4, (3, 16, 16)), [0, 1, 2, 3])
    with pytest.raises(ConfigError, match=r"where guessing gives 25%.*; set classes = \["):
        examine(wrap(module, classes=4, image_shape=(3, 16, 16)), data, classes=data.classes)


def test_examining_changes_nothing():
    data, module = split(classes=4), reader(4, (3, 16, 16)).append(nn.BatchNorm1d(4))
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    examination(target(module, data.classes, (3, 16, 16)), data.train, data.train.labels)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(weight.requires_grad for weight in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
