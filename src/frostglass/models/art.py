"""Targets as estimators of the Adversarial Robustness Toolbox (ART), and its estimators as targets.

ART is not a dependency: install adversarial-robustness-toolbox to call these functions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Shape, Target
from frostglass.models.wrap import wrap
from frostglass.runtime.device import device_of


class Scaled(nn.Module):
    """A network that takes images in [low, high], normalised; called with images in [0, 1]."""

    low: Tensor
    high: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, *, low: Any, high: Any, mean: Any, std: Any) -> None:
        super().__init__()
        self.net = net
        for name, value in {"low": low, "high": high, "mean": mean, "std": std}.items():
            self.register_buffer(name, _by_channel(value), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        scaled = self.low + (self.high - self.low) * images
        return self.net((scaled - self.mean) / self.std)


def art_estimator(target: Target) -> Any:
    """Return a target as ART's PyTorchClassifier of images in [0, 1]; the network is shared."""
    classification = _art()
    if target.attributes:
        raise ModelError(
            "an ART classifier has one class for each image, and this target predicts attributes: "
            "give a classifier of people"
        )
    kind = device_of(target.module).type
    return classification.PyTorchClassifier(
        model=target.module,
        loss=nn.CrossEntropyLoss(),
        input_shape=target.image_shape,
        nb_classes=len(target.classes),
        clip_values=(0.0, 1.0),
        device_type="cpu" if kind == "cpu" else "gpu",
    )


def from_art(estimator: Any, classes: Sequence[str] | int | None = None) -> Target:
    """Return the network of ART's PyTorchClassifier as a target; the network is shared.

    The estimator's `clip_values` are taken for the range of its images, and its `preprocessing` for
    a subtraction and a division. Other preprocessing and defences of ART are refused: they are no
    part of the network, and an attack would not face them.

    Args:
        classes: the names of the classes in the order of the outputs, by default numbers.
    """
    classification = _art()
    if not isinstance(estimator, classification.PyTorchClassifier):
        raise ModelError(
            f"expected a PyTorchClassifier of ART, got {type(estimator).__name__}: other "
            "estimators have no torch network"
        )
    defences = (estimator.preprocessing_defences or []) + (estimator.postprocessing_defences or [])
    if defences:
        names = ", ".join(type(each).__name__ for each in defences)
        raise ModelError(f"the estimator has defences of ART ({names}): remove them")
    shape: Shape = tuple(estimator.input_shape)
    return wrap(_network(estimator), classes=classes or estimator.nb_classes, image_shape=shape)


def _network(estimator: Any) -> nn.Module:
    network: nn.Module = estimator.model
    if estimator.clip_values is None:
        raise ModelError(
            "the estimator states no clip_values, so that the range of its images is not known: "
            "build it with clip_values=(0, 1)"
        )
    low, high = estimator.clip_values
    steps = estimator.preprocessing
    mean, std = (steps.mean, steps.std) if steps is not None else (0.0, 1.0)
    values = [np.asarray(value, np.float32) for value in (low, high, mean, std)]
    if all((value == plain).all() for value, plain in zip(values, (0, 1, 0, 1), strict=True)):
        return network
    return Scaled(network, low=low, high=high, mean=mean, std=std).to(device_of(network)).eval()


def _by_channel(value: Any) -> Tensor:
    """Return a number, or one for each channel, in a shape that images are computed with."""
    values = torch.as_tensor(np.asarray(value, np.float32)).flatten()
    return values.view(1, -1, 1, 1)


def _art() -> Any:
    try:
        from art.estimators import classification
    except ImportError as error:
        raise ConfigError(
            f"ART is not installed ({error}): install it with "
            "`pip install adversarial-robustness-toolbox`"
        ) from error
    return classification
