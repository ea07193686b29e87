"""Inception and LPIPS from files: what fits is read, what does not is refused in one line."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evidence import reconstructions
from frostglass.core.errors import CheckpointError
from frostglass.metrics.base import Evidence
from frostglass.metrics.fid import Fid
from frostglass.metrics.perceptual import Perceptual
from frostglass.networks.measuring import _fid_network, read_inception, read_lpips
from worlds import rng, split, target

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


def random_inception(network):
    """Random weights with batch norms that fit them: without, features would all be near 0."""
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        network.train()(torch.rand(4, 3, 299, 299, generator=rng(9)) * 2 - 1)
    return network.eval()


def slow_features(network, images):
    """The pooled layer before the last one, of images at 299 pixels in [-1, 1]."""
    seen = []
    hook = network.avgpool.register_forward_hook(lambda *call: seen.append(call[2].flatten(1)))
    large = F.interpolate(images, (299, 299), mode="bilinear", antialias=True)
    with torch.no_grad():
        for image in large:
            network(2 * image[None] - 1)
    hook.remove()
    return torch.cat(seen).double()


def slow_fid(first, second):
    """By roots of covariances, on the directions in which the images differ at all."""
    both = torch.cat([first, second])
    basis = torch.linalg.svd(both - both.mean(0), full_matrices=False)[2]
    first, second = first @ basis.T, second @ basis.T
    c1, c2 = first.T.cov(), second.T.cov()
    shared = torch.linalg.eigvals(c1 @ c2).real.clamp(min=0).sqrt().sum()
    shift = (first.mean(0) - second.mean(0)).square().sum()
    return (shift + c1.trace() + c2.trace() - 2 * shared).item()


@pytest.mark.slow
def test_both_inceptions_are_read(tmp_path):
    from torchvision.models import inception_v3

    plain = inception_v3(weights=None, init_weights=False)
    for name, network in (("fid", _fid_network()), ("torchvision", plain)):
        torch.save(network.state_dict(), tmp_path / name)
        inception = read_inception(tmp_path / name)
        with torch.no_grad():
            assert inception.outputs(torch.rand(1, 3, 32, 32))[1].shape == (1, 2048)
        assert name in inception.info["model"].lower()


@pytest.mark.slow
def test_fid_with_inception_against_its_definition(tmp_path):
    """With random weights: the real ones are the user's."""
    network = random_inception(_fid_network())
    torch.save(network.state_dict(), tmp_path / "inception.pth")
    data = split(count=24)
    images = torch.rand(2, 3, 3, 16, 16, generator=rng()).mul(255).round().div(255)
    evidence = Evidence(reconstructions(images), target(), [target(seed=1)], data)
    metric = Fid(inception=str(tmp_path / "inception.pth"))
    found = metric.summaries(evidence)
    private, real = (
        slow_features(network, part.floats((part.labels < 2).nonzero().flatten()))
        for part in (data.train, data.test)
    )
    slow = slow_fid(slow_features(network, images.flatten(0, 1)), private)
    assert found["fid"].value == pytest.approx(slow, rel=1e-3)
    assert found["fid_real"].value == pytest.approx(slow_fid(real, private), rel=1e-3)
    assert found["fid_real"].value < found["fid"].value
