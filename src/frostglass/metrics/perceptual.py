"""How different a reconstruction looks from the true image, by the layers of a network."""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import match_shape
from frostglass.metrics.base import Evidence, Metric, metrics
from frostglass.networks.measuring import read_lpips
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen

CHUNK = 32


@metrics.register
@parameters
class Perceptual(Metric):
    """How different does the reconstruction look from the true image?

    With files of weights, column `lpips`: Σ over layers l of VGG-16 of the mean over positions of
    w_l · (f_l(x̂) - f_l(x))², where f_l has length 1 at each position and w_l was learned from
    people's answers.

    Without them, column `perceptual`: the mean over layers l of the embedder, a network trained on
    public people, of ‖f_l(x̂) - f_l(x)‖² / ‖f_l(x)‖². It is 0 for equal images. It has no learned
    weights, and its layers know faces and not ImageNet: its values are on another scale than LPIPS.

    True images are those of `likeness`: the attacked ones, or in an audit of a model the person's
    private training image of the least MSE.

    Use: to compare with papers that report LPIPS.
    Paper: Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric,
    CVPR 2018, arXiv 1801.03924.

    Args:
        weights: a file with the weights of torchvision's vgg16.
        linear: a file with the five learned layers of LPIPS for VGG-16.
    """

    title: ClassVar[str] = "Perceptual distance"

    weights: str | None = None
    linear: str | None = None

    def __post_init__(self) -> None:
        if bool(self.weights) != bool(self.linear):
            raise ValueError("LPIPS needs both weights and linear: give both files, or neither")

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset() if self.weights else frozenset({"embedder"})

    def files(self) -> list[Path]:
        return [Path(self.weights), Path(self.linear)] if self.weights and self.linear else []

    def check_files(self) -> None:
        if self.weights and self.linear:
            read_lpips(self.weights, self.linear)

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        originals = evidence.originals
        shape = (3, *originals.shape[2:])
        pairs = [
            (match_shape(ours, shape).clamp(0, 1), match_shape(theirs, shape))
            for ours, theirs in zip(
                evidence.images.split(CHUNK), originals.split(CHUNK), strict=True
            )
        ]
        if self.weights and self.linear:
            lpips = read_lpips(self.weights, self.linear)
            with torch.no_grad():
                return {"lpips": evidence.table(torch.cat([lpips(*pair) for pair in pairs]))}
        if evidence.embedder is None:
            raise ConfigError(
                "perceptual needs a network whose layers compare images, got none: pass "
                "embedder=..., or the files of LPIPS"
            )
        network = evidence.embedder
        device = device_of(network.module)
        with frozen(network.module), torch.no_grad():
            parts = [
                perceptual_distance(network, ours.to(device), theirs.to(device)).cpu()
                for ours, theirs in pairs
            ]
        return {"perceptual": evidence.table(torch.cat(parts))}
