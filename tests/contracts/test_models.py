"""Every built-in network at several sizes, grey and colour; new files are included."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from frostglass.models.base import models
from frostglass.models.build import build
from frostglass.models.checkpoint import body, load_body, load_weights, read_body, save_weights
from frostglass.models.taps import find_head, find_taps, live_taps, trace
from frostglass.models.wrap import wrap

CLASSES = 7
COLOUR = (3, 32, 32)
SHAPES = [(3, 16, 16), (1, 32, 32), (3, 64, 64)]
# Networks of full size would take minutes, so these are narrower; some need 32 px.
SMALL = {
    "vgg16": {"width": 4},
    "ir152": {"width": 4},
    "facenet": {"width": 4},
    "resnet34": {"width": 4},
}
SMALLEST = {"vgg16": 32, "mcnn": 32, "scnn": 32}
CASES = [
    (name, shape)
    for name in models.names()
    for shape in SHAPES
    if shape[1] >= SMALLEST.get(name, 0)
]

every_size = pytest.mark.parametrize(
    ("name", "shape"), CASES, ids=[f"{name}-{'x'.join(map(str, shape))}" for name, shape in CASES]
)
every_network = pytest.mark.parametrize("name", models.names())


def make(name, shape=COLOUR, *, classes=CLASSES, seed=0, **options):
    return build(
        name, classes=classes, image_shape=shape, seed=seed, **SMALL.get(name, {}), **options
    )


def noise(shape, count=3):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(5))


def differences(one, other):
    there = other.state_dict()
    return [name for name, value in one.state_dict().items() if not torch.equal(value, there[name])]


@every_size
def test_it_gives_finite_logits_that_differ_between_images(name, shape):
    logits = make(name, shape).eval()(noise(shape))
    assert logits.shape == (3, CLASSES)
    assert logits.isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 0


@every_size
def test_head_is_found_and_its_input_is_the_feature(name, shape):
    module = make(name, shape).eval()
    head = module.get_submodule(find_head(module, shape))
    assert isinstance(head, nn.Linear)
    logits, features = wrap(module, classes=CLASSES, image_shape=shape).outputs(noise(shape))
    assert features.shape == (3, head.in_features)
    assert torch.equal(head(features), logits)


@every_size
def test_taps_are_layers_in_order_of_execution_before_the_head(name, shape):
    module = make(name, shape)
    order = [call.name for call in trace(module, shape)[0]]
    for taps, count in [
        (find_taps(module, shape), len(getattr(module, "published_taps", "123"))),
        (find_taps(module, shape, 3), 3),
    ]:
        assert len(taps) == count
        assert [order.index(tap) for tap in taps] == sorted({order.index(tap) for tap in taps})
        assert order.index(taps[-1]) < order.index(find_head(module, shape))


@every_size
def test_every_weight_learns(name, shape):
    module = make(name, shape)
    images = noise(shape).requires_grad_()
    module(images).square().sum().backward()
    learning = {
        layer: weight.grad for layer, weight in module.named_parameters() if weight.requires_grad
    }
    assert images.grad.abs().sum() > 0
    assert [
        layer for layer, slope in learning.items() if slope is None or not slope.isfinite().all()
    ] == []


@every_network
def test_the_seed_decides_the_weights(name):
    first, same, other = (make(name, seed=seed) for seed in (4, 4, 5))
    assert differences(first, same) == []
    assert differences(first, other) != []


@every_network
def test_global_random_state_is_left_alone(name):
    before = torch.get_rng_state()
    wrap(make(name), classes=CLASSES, image_shape=COLOUR)
    assert torch.equal(torch.get_rng_state(), before)


@every_network
def test_weights_are_loaded_bit_for_bit(name, tmp_path):
    trained, fresh = (make(name, seed=seed) for seed in (1, 2))
    trained.train()(noise(COLOUR))  # changes the running statistics of batch norm, if any
    save_weights(trained, tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert differences(trained, fresh) == []


@every_network
def test_all_but_the_head_can_start_from_a_network_for_other_classes(name, tmp_path):
    trained, fresh = make(name, classes=5, seed=1), make(name, seed=2)
    trained.train()(noise(COLOUR))
    save_weights(trained, tmp_path / "w.safetensors")
    expected = {
        layer: value
        for layer, value in trained.state_dict().items()
        if not layer.startswith("head.")
    }
    for start in (read_body(fresh, "head", tmp_path / "w.safetensors"), body(trained, "head")):
        module = make(name, seed=2)
        load_body(module, "head", start)
        state = module.state_dict()
        assert all(torch.equal(state[layer], value) for layer, value in expected.items())
        assert set(state) == {*expected, "head.weight", "head.bias"}
        assert torch.equal(module.head.weight, fresh.head.weight)


@every_network
def test_no_layer_works_in_place(name):
    assert [
        layer for layer, part in make(name).named_modules() if getattr(part, "inplace", False)
    ] == []


@every_network
def test_outputs_of_taps_are_not_changed_later(name):
    module = make(name)
    seen = []
    for tap in find_taps(module, COLOUR):
        module.get_submodule(tap).register_forward_hook(
            lambda layer, args, output: seen.append((output, output._version))
        )
    for mode in (True, False):
        module.train(mode)(noise(COLOUR))
    assert len(seen) == 2 * len(find_taps(module, COLOUR))
    assert [output._version for output, _ in seen] == [version for _, version in seen]


@every_network
def test_taps_before_the_first_trained_weight_are_not_live(name):
    module = make(name)
    taps = find_taps(module, COLOUR)
    assert live_taps(module, COLOUR, taps) == taps
    module.requires_grad_(False).head.requires_grad_(True)
    assert live_taps(module, COLOUR, taps) == ()


@every_network
def test_gradients_of_one_image_at_a_time(name):
    """As needed for DP-SGD, against one backward pass for each image."""
    module = make(name).eval()
    images = noise(COLOUR, 2)
    weights = {layer: weight for layer, weight in module.named_parameters() if weight.requires_grad}

    def loss(weights, image):
        return functional_call(module, weights, image[None]).square().sum()

    slopes = vmap(grad(loss), in_dims=(None, 0))(
        {layer: weight.detach() for layer, weight in weights.items()}, images
    )
    for number, image in enumerate(images):
        alone = torch.autograd.grad(loss(weights, image), list(weights.values()))
        for layer, slope in zip(weights, alone, strict=True):
            assert torch.allclose(
                slopes[layer][number], slope, rtol=1e-3, atol=1e-4 * slope.abs().max()
            ), layer


@every_network
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=r"unexpected keyword argument 'wdith'; it takes classes, image_shape"
    ):
        make(name, wdith=3)
