"""Networks that published measures compare images in: Inception-v3 (FID) and LPIPS."""

from pathlib import Path

from torch import Tensor, nn

from frostglass.core.errors import CheckpointError
from frostglass.core.types import Shape, Target
from frostglass.models.checkpoint import load_weights
from frostglass.models.weight_files import differences, read_state, usable

SIZE: Shape = (3, 299, 299)
FID_CLASSES = 1008  # of the network that FID was defined with, ported from TensorFlow


class _Scaled(nn.Module):
    """Inception-v3 for images in [0, 1]; it takes values in [-1, 1]."""

    def __init__(self, inception: nn.Module):
        super().__init__()
        self.inception = inception

    def forward(self, images: Tensor) -> Tensor:
        return self.inception(2 * images - 1)


def read_inception(path: str | Path) -> Target:
    """Return Inception-v3 as a target without classes, whose features are the last pooled layer.

    The file holds the weights of FID's own network (1008 outputs, from TensorFlow) or those of
    torchvision's `inception_v3`. The two have different features, and their FID differ too.
    """
    outputs = _outputs(Path(path))
    inception = _fid_network() if outputs == FID_CLASSES else _torchvision_network(outputs)
    load_weights(inception, path)
    name = "inception (FID)" if outputs == FID_CLASSES else "inception (torchvision)"
    module = _Scaled(inception).eval()
    return Target(module, (), SIZE, "inception.fc", info={"model": name})


def _outputs(path: Path) -> int:
    last = read_state({}, path).get("fc.weight")
    if last is None or last.ndim != 2:
        raise CheckpointError(
            f"{path.name} holds no fc.weight, so it is no Inception-v3: give torchvision's "
            "inception_v3 or FID's own network as a state dict"
        )
    return len(last)


def _torchvision_network(outputs: int) -> nn.Module:
    from torchvision.models import inception_v3  # slow to import

    return inception_v3(weights=None, num_classes=outputs, aux_logits=True, init_weights=False)


def _fid_network() -> nn.Module:
    """Return the network of the FID paper: its pools average without the padding."""
    from piq.feature_extractors import fid_inception as blocks  # slow to import
    from torchvision.models import inception_v3

    network = inception_v3(
        weights=None, num_classes=FID_CLASSES, aux_logits=False, init_weights=False
    )
    for name, width, pooled in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        setattr(network, f"Mixed_{name}", blocks.FIDInceptionA(width, pool_features=pooled))
    for name, width in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        setattr(network, f"Mixed_{name}", blocks.FIDInceptionC(768, channels_7x7=width))
    network.Mixed_7b = blocks.FIDInceptionE1(1280)
    network.Mixed_7c = blocks.FIDInceptionE2(2048)
    return network


def read_lpips(backbone: str | Path, linear: str | Path) -> nn.Module:
    """Return LPIPS (VGG-16) of two images (N, 3, H, W) in [0, 1], one value each.

    `backbone` holds the weights of torchvision's `vgg16`; its classifier is not used. `linear`
    holds the five learned layers, as the file vgg.pth of the package `lpips`.
    """
    import piq  # slow to import
    from torchvision.models.vgg import cfgs, make_layers

    state = read_state({}, Path(linear))
    weights = [state[name].reshape(1, -1, 1, 1) for name in sorted(state)]
    if [weight.numel() for weight in weights] != [64, 128, 256, 512, 512]:
        raise CheckpointError(
            f"{Path(linear).name} holds layers of {[weight.numel() for weight in weights]} "
            "weights, expected those of LPIPS for VGG-16: 64, 128, 256, 512 and 512"
        )
    layers = make_layers(cfgs["D"])
    own = layers.state_dict()
    held = {
        name.removeprefix("features."): value
        for name, value in read_state(own, Path(backbone)).items()
        if not name.startswith("classifier.")
    }
    if problems := differences(own, held):
        raise CheckpointError(f"{Path(backbone).name} does not fit torchvision's vgg16: {problems}")
    layers.load_state_dict(usable(own, held, Path(backbone).name))
    places = ["3", "8", "15", "22", "29"]  # relu1_2 to relu5_3
    return piq.ContentLoss(
        layers.eval(), places, weights, normalize_features=True, reduction="none"
    )
