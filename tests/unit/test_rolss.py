"""RoLSS: which shortcuts it removes or weakens, in own networks and in those of libraries."""

import copy
from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.defenses.base import TrainingSize
from frostglass.defenses.training.rolss import Rolss
from frostglass.models.build import build
from frostglass.models.shortcuts import last_stage
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork, split, target

SHAPE = (3, 32, 32)
LAST = {
    "resnet": ["stage3.0", "stage3.1"],
    "torchvision:resnet18": ["layer4.0", "layer4.1"],
    "timm:resnet26": ["layer4.0", "layer4.1"],
}
SMALL = {"resnet": {"width": 4}}


def network(name, **more):
    module = build(name, classes=4, image_shape=SHAPE, seed=0, **SMALL.get(name, {}), **more)
    return Target(module, tuple("abcd"), SHAPE, head="head" if name == "resnet" else "fc")


def outputs_of(module, names, images):
    seen = {}
    handles = [
        module.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (args[0].clone(), out.clone())})
        )
        for name in names
    ]
    with torch.no_grad():
        module.eval()(images)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", LAST)
def test_the_last_stage_is_found(name):
    assert last_stage(network(name).module, SHAPE) == LAST[name]


def test_own_larger_networks_have_a_last_stage_too():
    module = build("resnet34", classes=4, image_shape=SHAPE, width=2, seed=0)
    assert last_stage(module, SHAPE) == ["stage4.0", "stage4.1", "stage4.2"]
    module = build("facenet", classes=4, image_shape=SHAPE, width=2, seed=0)
    assert last_stage(module, SHAPE) == ["units.21", "units.22", "units.23"]
    normalised = build(
        "resnet", classes=4, image_shape=SHAPE, mean=[0.5] * 3, std=[0.5] * 3, seed=0, width=2
    )
    assert last_stage(normalised, SHAPE) == ["net.stage3.0", "net.stage3.1"]


@pytest.mark.parametrize("name", LAST)
def test_a_block_without_shortcut_forgets_its_input(name):
    """With zero weights on its last norm or convolution only the shortcut is left."""
    plain = network(name)
    changed = Rolss().prepare(replace(plain, module=copy.deepcopy(plain.module)), seed=0)
    last = LAST[name][-1]
    for module in (plain.module, changed.module):
        block = module.get_submodule(last)
        final = (
            block.conv2
            if name == "resnet"
            else [p for p in block.children() if hasattr(p, "running_mean")][-1]
        )
        with torch.no_grad():
            for weight in final.parameters():
                weight.zero_()
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    before, output = outputs_of(plain.module, [last], images)[last]
    torch.testing.assert_close(output, before if name == "resnet" else before.relu())
    assert output.abs().sum() > 0
    assert outputs_of(changed.module, [last], images)[last][1].abs().sum() == 0


@pytest.mark.parametrize("name", ["resnet", "torchvision:resnet18"])
def test_a_scale_weakens_the_shortcut(name):
    plain = network(name)
    half = Rolss(scale=0.5).prepare(replace(plain, module=copy.deepcopy(plain.module)), seed=0)
    none = Rolss().prepare(replace(plain, module=copy.deepcopy(plain.module)), seed=0)
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    first = LAST[name][0]  # its input is the same in all three
    whole, middle, without = (
        outputs_of(each.module, [first], images)[first][1] for each in (plain, half, none)
    )
    if name == "resnet":  # linear after the sum
        torch.testing.assert_close(middle, (whole + without) / 2)
    else:
        inside = (whole > 0) & (without > 0)  # a ReLU comes after the sum
        torch.testing.assert_close(middle[inside], ((whole + without) / 2)[inside])
    assert not torch.allclose(middle, without)


@pytest.mark.parametrize("name", LAST)
def test_other_stages_stay_and_projections_go(name):
    plain = network(name)
    changed = Rolss().prepare(replace(plain, module=copy.deepcopy(plain.module)), seed=0)
    before, after = plain.module.state_dict(), changed.module.state_dict()
    gone = set(before) - set(after)
    assert gone
    assert all(key.startswith(LAST[name][0]) for key in gone)
    assert all(torch.equal(before[key], value) for key, value in after.items())


def test_taps_on_a_removed_shortcut_are_left_out():
    plain = replace(network("torchvision:resnet18"), taps=("layer1", "layer4.0.downsample.0"))
    assert Rolss().prepare(plain, seed=0).taps == ("layer1",)


def test_a_network_without_shortcuts_is_refused_before_training():
    message = (
        "rolss removes skip connections, and found no residual block in Sequential: choose a "
        "residual network, such as resnet"
    )
    with pytest.raises(ConfigError, match=message):
        Rolss().prepare(target(), seed=0)
    with pytest.raises(ConfigError, match="found no residual block"):
        train_target(Training(model="cnn", epochs=1), split(), [Rolss()], seed=0, work=NoWork())
    assert Rolss(**Rolss.disabled).prepare(target(), seed=0) is not None
    with pytest.raises(ConfigError, match="scale: expected at most 1, got 2"):
        Rolss(scale=2.0)


def test_facts_name_the_blocks():
    changed = Rolss().prepare(network("resnet"), seed=0)
    size = TrainingSize(48, 16, 1)
    assert Rolss().facts(changed, size) == {"blocks": LAST["resnet"], "scale": 0.0}
    assert Rolss(**Rolss.disabled).facts(changed, size) == {}
