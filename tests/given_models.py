"""Models that a user might bring: linear classifiers fitted to private images, right or misread."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.types import Images


def linear(classes, image_shape):
    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))


def split_in_two():
    """Return a network of 17 attributes at 16 pixels."""
    layers = {"first": nn.Conv2d(3, 2, 3, 2, 1), "flat": nn.Flatten(), "fc": nn.Linear(128, 17)}
    return nn.Sequential(OrderedDict(layers)).eval()


def with_softmax(classes, image_shape):
    return nn.Sequential(*linear(classes, image_shape), nn.Softmax(1))


def fitted(data: Images, *, range_=1.0, rows=None) -> dict[str, torch.Tensor]:
    """Return weights of `linear` that classify the images, by least squares.

    `range_` is the value that white has; `rows` is the order in which the outputs are.
    """
    seen = data.floats().flatten(1).double() * range_
    answers = F.one_hot(data.labels).double()
    centre = seen.mean(0)
    weight = 20 * (torch.linalg.pinv(seen - centre) @ (answers - answers.mean(0))).T
    bias = -(weight @ centre)
    rows = list(range(len(bias))) if rows is None else rows
    return {"1.weight": weight[rows].float().contiguous(), "1.bias": bias[rows].float()}
