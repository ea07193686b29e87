"""Every built-in network, at several sizes, grey and colour: a new file in models/ is found here by itself."""

import pytest
import torch

from frostglass.models.base import models
from frostglass.models.build import build
from frostglass.models.checkpoint import load_weights, save_weights
from frostglass.models.taps import find_head, find_taps
from frostglass.models.wrap import wrap

CLASSES = 7
SHAPES = [(channels, side, side) for side in (16, 32, 64) for channels in (1, 3)]


@pytest.fixture(params=models.names())
def name(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request):
    return request.param


def pictures(shape, count=3):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(5))


def differences(one, other):
    return [name for name, value in one.state_dict().items() if not torch.equal(value, other.state_dict()[name])]


def test_it_gives_finite_logits_that_differ_between_pictures(name, shape):
    module = build(name, classes=CLASSES, image_shape=shape, seed=0).eval()
    logits = module(pictures(shape))
    assert logits.shape == (3, CLASSES)
    assert logits.isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 0


def test_head_is_found_and_its_input_is_the_feature(name, shape):
    module = build(name, classes=CLASSES, image_shape=shape, seed=0).eval()
    head = module.get_submodule(find_head(module, shape))
    assert isinstance(head, torch.nn.Linear)
    logits, features = wrap(module, classes=CLASSES, image_shape=shape).outputs(pictures(shape))
    assert features.shape == (3, head.in_features)
    assert torch.equal(head(features), logits)


def test_taps_are_layers_in_order_of_execution_before_the_head(name, shape):
    module = build(name, classes=CLASSES, image_shape=shape, seed=0)
    taps = find_taps(module, shape)
    names = [layer for layer, _ in module.named_modules()]
    assert len(taps) == 3
    assert [names.index(tap) for tap in taps] == sorted({names.index(tap) for tap in taps})
    assert find_head(module, shape) not in taps


def test_every_weight_learns(name, shape):
    module = build(name, classes=CLASSES, image_shape=shape, seed=0)
    images = pictures(shape).requires_grad_()
    module(images).square().sum().backward()
    assert images.grad.abs().sum() > 0
    assert [layer for layer, weight in module.named_parameters() if weight.grad is None or not weight.grad.isfinite().all()] == []


def test_the_seed_decides_the_weights(name):
    first, same, other = (build(name, classes=CLASSES, image_shape=(3, 32, 32), seed=seed) for seed in (4, 4, 5))
    assert differences(first, same) == []
    assert differences(first, other) != []


def test_global_random_state_is_left_alone(name):
    before = torch.get_rng_state()
    module = build(name, classes=CLASSES, image_shape=(3, 32, 32), seed=0)
    wrap(module, classes=CLASSES, image_shape=(3, 32, 32))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_come_back_bit_for_bit(name, tmp_path):
    trained, fresh = (build(name, classes=CLASSES, image_shape=(3, 32, 32), seed=seed) for seed in (1, 2))
    trained.train()(pictures((3, 32, 32)))  # moves the running statistics of batch norm, where there are any
    save_weights(trained, tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert differences(trained, fresh) == []


def test_no_layer_works_in_place(name):
    module = build(name, classes=CLASSES, image_shape=(3, 32, 32), seed=0)
    assert [layer for layer, part in module.named_modules() if getattr(part, "inplace", False)] == []


def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'wdith'; it takes classes, image_shape"):
        build(name, classes=CLASSES, image_shape=(3, 32, 32), seed=0, wdith=3)
