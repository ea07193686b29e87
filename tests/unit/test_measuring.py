"""Inception and LPIPS from files: what fits is read, what does not is refused in one line."""

import pytest
import torch
from torch.nn import functional as F

from frostglass.core.errors import CheckpointError
from frostglass.metrics.fid import Fid
from frostglass.metrics.perceptual import Perceptual
from frostglass.networks.measuring import _fid_network, read_inception, read_lpips
from worlds import rng

WIDTHS = (64, 128, 256, 512, 512)


def linear_layers(folder, widths=WIDTHS):
    path = folder / "vgg.pth"
    layers = {
        f"lin{place}.model.1.weight": torch.rand(1, width, 1, 1, generator=rng(place))
        for place, width in enumerate(widths)
    }
    torch.save(layers, path)
    return path


def test_files_of_something_else_are_refused(tmp_path):
    other = tmp_path / "other.pth"
    torch.save({"conv.weight": torch.zeros(2, 3)}, other)
    with pytest.raises(CheckpointError, match=r"other.pth holds no fc.weight, so it is no Incep"):
        Fid(inception=str(other)).check_files()
    with pytest.raises(CheckpointError, match=r"holds layers of \[6\] weights, expected those of"):
        Perceptual(weights=str(other), linear=str(other)).check_files()
    linear = linear_layers(tmp_path)
    with pytest.raises(CheckpointError, match=r"other.pth does not fit torchvision's vgg16"):
        Perceptual(weights=str(other), linear=str(linear)).check_files()
    with pytest.raises(CheckpointError, match="no checkpoint file at"):
        read_inception(tmp_path / "none.pth")
    Fid().check_files()
    Perceptual().check_files()


@pytest.mark.slow
def test_lpips_against_its_definition(tmp_path):
    from torchvision.models.vgg import cfgs, make_layers

    layers = make_layers(cfgs["D"]).eval()
    backbone, linear = tmp_path / "vgg16.pth", linear_layers(tmp_path)
    state = {f"features.{name}": value for name, value in layers.state_dict().items()}
    torch.save(state | {"classifier.0.weight": torch.zeros(2, 2)}, backbone)
    first, second = (torch.rand(2, 3, 32, 32, generator=rng(seed)) for seed in range(2))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x, y = ((each - mean[:, None, None]) / std[:, None, None] for each in (first, second))
    total, weights = torch.zeros(2), list(torch.load(linear).values())
    with torch.no_grad():
        for place, layer in enumerate(layers):
            x, y = layer(x), layer(y)
            if place in (3, 8, 15, 22, 29):
                apart = (F.normalize(x, dim=1) - F.normalize(y, dim=1)).square()
                total += (apart * weights.pop(0)).sum(1).mean((1, 2))
        measured = read_lpips(backbone, linear)(first, second)
        assert read_lpips(backbone, linear)(first, first).abs().max() == 0
    assert measured.tolist() == pytest.approx(total.tolist(), rel=1e-4)


@pytest.mark.slow
def test_both_inceptions_are_read(tmp_path):
    from torchvision.models import inception_v3

    plain = inception_v3(weights=None, init_weights=False)
    for name, network in (("fid", _fid_network()), ("torchvision", plain)):
        torch.save(network.state_dict(), tmp_path / name)
        target = read_inception(tmp_path / name)
        with torch.no_grad():
            assert target.outputs(torch.rand(1, 3, 32, 32))[1].shape == (1, 2048)
        assert name in target.info["model"].lower()
