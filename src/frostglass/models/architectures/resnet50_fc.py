"""ResNet-50 with two more layers on its 1000 outputs, as in AdvLearn."""

from collections import OrderedDict

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models
from frostglass.models.taps import Tapped


class ResNet50FC(Tapped):
    """The layers by name: `body` (a ResNet-50), `relu`, `hidden`, `hidden_relu` and `head`."""


@models.register
def resnet50_fc(*, classes: int, image_shape: Shape, hidden: int = 512) -> nn.Module:
    """ResNet-50 to its 1000-d output, then two fully connected layers.

    Published cuts: `body.maxpool` (conv1), `body.layer1` to `body.layer3` (conv2 to conv4),
    `body.global_pool` and `body` (fc).

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented
    Representations, AAAI 2020 (arXiv:1911.10143). Differs: the paper does not say how wide the
    first of the two layers is, or what lies between them; here a ReLU comes before each.

    Args:
        hidden: width of the first of the two layers.
    """
    import timm  # slow to import

    check_positive("resnet50_fc", hidden=hidden)
    body = timm.create_model("resnet50", num_classes=1000, in_chans=image_shape[0])
    for layer in body.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False  # taps and per-sample gradients need the unchanged output
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        body=body,
        relu=nn.ReLU(),
        hidden=nn.Linear(1000, hidden),
        hidden_relu=nn.ReLU(),
        head=nn.Linear(hidden, classes),
    )
    stages = ("maxpool", "layer1", "layer2", "layer3", "global_pool")
    return ResNet50FC(layers, (*(f"body.{stage}" for stage in stages), "body"))
