"""Every network of the papers at its resolution and full size: head, taps, feature, a step."""

import pytest
import torch
from torch import nn

from frostglass.models.build import build
from frostglass.models.wrap import wrap
from frostglass.runtime.hooks import capture

pytestmark = pytest.mark.slow

CLASSES = 10
BLOCKS = ("features.6", "features.13", "features.23", "features.33", "norm")
VMI = ("stem", "stage1", "stage2", "stage3", "stage4", "embedding", "embedding_norm")

# Name, channels, side, options, head, length of its feature, taps.
NETWORKS = [
    ("vgg16", 3, 64, {}, "head", 2048, BLOCKS),
    ("ir152", 3, 64, {}, "head", 512, ("units.15", "units.33", "units")),
    ("facenet", 3, 64, {}, "head", 512, ("units.7", "units.15", "units")),
    ("facenet", 3, 112, {}, "head", 512, ("units.7", "units.15", "units")),
    ("resnet34", 3, 64, {}, "head", 50, VMI),
    ("lenet", 1, 32, {}, "head", 84, ("stage1", "stage3", "stage4")),
    ("mcnn", 1, 32, {}, "head", 256, ("stage1", "stage2", "stage3")),
    ("scnn", 1, 32, {}, "head", 512, ("stage2", "stage3", "stage5")),
    ("timm:resnet18", 3, 224, {}, "fc", 512, ("layer1", "layer3", "layer4")),
    ("timm:resnet34", 3, 224, {}, "fc", 512, ("layer2", "layer3.3", "layer4")),
    ("timm:resnet50", 3, 224, {}, "fc", 2048, ("layer2.1", "layer3.2", "layer4")),
    ("timm:resnet152", 3, 224, {}, "fc", 2048, ("layer2", "layer3.21", "layer4")),
    ("timm:resnest101e", 3, 224, {}, "fc", 2048, ("layer2", "layer3.14", "layer4")),
    (
        "timm:maxvit_tiny_tf_224",
        3,
        224,
        {},
        "head.fc",
        512,
        ("stages.1", "stages.2.blocks.2", "stages"),
    ),
    ("timm:vit_base_patch16_224", 3, 224, {}, "head", 768, ("blocks.3", "blocks.7", "blocks")),
    (
        "timm:swinv2_tiny_window8_256",
        3,
        224,
        {"window_size": 7},
        "head.fc",
        768,
        ("layers.1", "layers.2.blocks.3", "layers"),
    ),
]


@pytest.mark.parametrize(
    ("name", "channels", "side", "options", "head", "length", "taps"),
    NETWORKS,
    ids=[f"{network[0]}-{network[2]}" for network in NETWORKS],
)
def test_a_network_of_the_papers_works_at_its_size(
    name, channels, side, options, head, length, taps
):
    shape = (channels, side, side)
    module = build(
        name,
        classes=CLASSES,
        image_shape=shape,
        mean=[0.5] * channels,
        std=[0.5] * channels,
        seed=0,
        **options,
    )
    target = wrap(module, classes=CLASSES, image_shape=shape)
    assert target.head == f"net.{head}"
    assert target.taps == tuple(f"net.{tap}" for tap in taps)

    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, features = target.outputs(images)
    assert (logits.shape, features.shape) == ((2, CLASSES), (2, length))

    before = [weight.detach().clone() for weight in module.parameters()]
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    with capture(module, target.taps) as seen:
        loss = nn.functional.cross_entropy(module.train()(images), torch.tensor([0, 1]))
    assert loss.isfinite()
    assert all(seen[tap].requires_grad and seen[tap].isfinite().all() for tap in target.taps)
    loss.backward()
    optimizer.step()
    moved = {
        layer: not torch.equal(weight, old)
        for (layer, weight), old in zip(module.named_parameters(), before, strict=True)
    }
    for layer, weight in module.named_parameters():
        assert weight.isfinite().all(), layer
        assert weight.requires_grad or not moved[layer], layer
        # Weights before a batch norm whose scale starts at 0 have no gradient in the first step.
        assert not weight.requires_grad or moved[layer] or weight.grad.abs().max() == 0, layer
    assert moved[next(iter(moved))]
    assert moved[f"{target.head}.weight"]
