"""Any module as a target: its head and taps are detected, and it is left unchanged."""

import copy

import pytest
import torch
from torch import nn

from frostglass.core.errors import ModelError
from frostglass.models.taps import find_head, find_taps
from frostglass.models.wrap import wrap

SHAPE = (3, 16, 16)
PIXELS = 3 * 16 * 16


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


class Functional(nn.Module):
    """Its last layer is a bare weight."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(PIXELS, 6)
        self.weight = nn.Parameter(torch.rand(5, 6))

    def forward(self, images):
        return nn.functional.linear(self.body(images.flatten(1)), self.weight)


class Applied(nn.Module):
    """A network whose output passes through one more function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first = nn.Linear(PIXELS, 6)
        self.last = nn.Linear(6, 5)

    def forward(self, images):
        return self.function(self.last(self.first(images.flatten(1)).relu()))


def with_noise(logits):
    return logits + torch.randn(logits.shape)


def test_head_inside_a_sequential_is_found():
    module = flat(
        nn.Linear(PIXELS, 5),
        nn.ReLU(),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 5), nn.Identity()),
    )
    assert find_head(module, SHAPE) == "3.1"


def test_head_that_is_a_convolution_to_one_pixel_is_found():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 5, 1), nn.Flatten()
    )
    target = wrap(module, classes=5, image_shape=SHAPE)
    assert target.head == "2"
    assert target.outputs(torch.rand(2, *SHAPE))[1].shape == (2, 4)


def test_an_activation_in_place_after_the_last_layer_hides_no_mistake():
    module = flat(nn.Linear(PIXELS, 5), nn.ReLU(inplace=True))
    with pytest.raises(
        ModelError, match=r"no linear layer of Sequential returns its logits \(4, 5\)"
    ):
        find_head(module, SHAPE)


def test_a_functional_last_layer_is_refused_with_the_last_layers():
    with pytest.raises(
        ModelError,
        match=r'the last ones it runs: body \(4, 6\): name the layer .* with head="name"',
    ):
        wrap(Functional(), classes=5, image_shape=SHAPE)


def test_a_layer_used_twice_is_no_head():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(PIXELS, PIXELS)

        def forward(self, images):
            return self.mix(self.mix(images.flatten(1)))

    with pytest.raises(ModelError, match="no linear layer of Twice"):
        find_head(Twice(), SHAPE)


def test_named_layers_are_used_as_given():
    target = wrap(
        Applied(with_noise), classes=list("abcde"), image_shape=SHAPE, head="last", taps=["first"]
    )
    assert (target.head, target.taps, target.classes) == (
        "last",
        ("first",),
        ("a", "b", "c", "d", "e"),
    )
    parameters = PIXELS * 6 + 6 + 6 * 5 + 5
    assert target.info == {"given": True, "architecture": "Applied", "parameters": parameters}


def test_classes_by_number_get_names():
    assert wrap(flat(nn.Linear(PIXELS, 3)), classes=3, image_shape=SHAPE).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.relu, "<built-in method relu"),
        (nn.Linear, "<class 'torch.nn.modules.linear.Linear'>"),
        (None, "None"),
    ],
)
def test_only_modules_can_be_wrapped(value, shown):
    message = (
        f"^expected a torch.nn.Module to wrap, got {shown}.*: call a function from the forward"
    )
    with pytest.raises(ModelError, match=message):
        wrap(value, classes=5, image_shape=SHAPE)


def test_taps_of_shallow_networks():
    assert find_taps(flat(nn.Linear(PIXELS, 5)), SHAPE) == ()
    assert find_taps(flat(nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 5)), SHAPE) == ("2",)
    assert find_taps(
        flat(nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)), SHAPE
    ) == ("2", "4")


def test_taps_skip_layers_without_a_tensor():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, stride=4)
            self.rnn = nn.LSTM(4, 6, batch_first=True)
            self.last = nn.Linear(6, 5)

        def forward(self, images):
            return self.last(self.rnn(self.first(images).flatten(2).transpose(1, 2))[0][:, -1])

    assert find_taps(Recurrent(), SHAPE) == ("first",)
    with pytest.raises(ModelError, match="the layer 'rnn' does not return a tensor"):
        wrap(Recurrent(), classes=5, image_shape=SHAPE, taps=["rnn"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "lst"}, r"Applied has no layer named 'lst': did you mean 'last'"),
        ({"taps": ["frist"]}, r"Applied has no layer named 'frist': did you mean 'first'"),
        ({"taps": [""]}, r"Applied has no layer named ''"),
        ({"head": "unused"}, r"the layer 'unused' runs 0 times"),
        ({"classes": 6}, r"returns 5 logits per image, but 6 classes are named"),
        ({"classes": ["a", "b", "c", "d", "d"]}, r"expected a sequence of different class names"),
        ({"classes": "abcde"}, r"expected a sequence of different class names"),
        ({"image_shape": (3, 8, 8)}, r"Applied cannot take 3x8x8 images: .*mat1 and mat2"),
    ],
)
def test_wrong_arguments_about_a_module_are_refused(arguments, message):
    module = Applied(torch.tanh)
    module.unused = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=message):
        wrap(module, **{"classes": 5, "image_shape": SHAPE, "head": "last", **arguments})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits: (logits, logits), r"Applied returns a tuple: return the logits alone"),
        (lambda logits: {"logits": logits}, r"Applied returns a dict: return the logits alone"),
        (lambda logits: logits.softmax(1), r"Applied returns probabilities, not logits"),
        (lambda logits: logits.argmax(1), r"returns torch.int64 \(8,\) for 8 images"),
        (lambda logits: logits[:, :, None], r"returns torch.float32 \(8, 5, 1\) for 8 images"),
        (lambda logits: logits / 0, r"returns NaN or infinity"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(function, message):
    with pytest.raises(ModelError, match=message):
        wrap(Applied(function), classes=5, image_shape=SHAPE, head="last")


def test_log_probabilities_are_logits():
    assert (
        wrap(
            Applied(lambda logits: logits.log_softmax(1)), classes=5, image_shape=SHAPE, head="last"
        ).head
        == "last"
    )


def residue(module):
    """Everything about a module that wrapping it must not change."""
    return {
        "modes": [part.training for part in module.modules()],
        "weights": copy.deepcopy(module.state_dict()),
        "flags": [
            (weight.requires_grad, None if weight.grad is None else weight.grad.clone())
            for weight in module.parameters()
        ],
        "hooks": [
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()
        ],
        "random": torch.get_rng_state(),
    }


def assert_same(before, after):
    assert before["modes"] == after["modes"]
    assert before["hooks"] == after["hooks"]
    assert torch.equal(before["random"], after["random"])
    assert all(
        torch.equal(value, after["weights"][name]) for name, value in before["weights"].items()
    )
    for (needs, grad), (needs_after, grad_after) in zip(
        before["flags"], after["flags"], strict=True
    ):
        assert needs == needs_after
        assert grad is grad_after is None or torch.equal(grad, grad_after)


class Touchy(nn.Module):
    """Counts its runs in a buffer, draws from the global generator, and may fail in the middle."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(4 * 14 * 14, 5),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images):
        self.seen += 1
        feature = self.net[:4](images) + torch.randn(1)
        if self.fails:
            raise RuntimeError("out of order\nwith a second line")
        return self.net[4](feature)


def touchy(fails):
    module = Touchy(fails=False)
    module(torch.rand(2, *SHAPE)).sum().backward()
    module.net[0].weight.requires_grad_(False)
    module.net[1].eval()
    module.fails = fails
    return module


def test_wrapping_leaves_the_module_unchanged():
    module = touchy(fails=False)
    before = residue(module)
    assert wrap(module, classes=5, image_shape=SHAPE).head == "net.4"
    assert_same(before, residue(module))


@pytest.mark.parametrize(
    "look", [find_head, find_taps, lambda module, shape: wrap(module, classes=5, image_shape=shape)]
)
def test_a_module_that_fails_is_left_unchanged(look):
    module = touchy(fails=True)
    before = residue(module)
    with pytest.raises(ModelError, match=r"Touchy cannot take 3x16x16 images: out of order$"):
        look(module, SHAPE)
    assert_same(before, residue(module))
