"""The nouns every part of the package shares: images, splits, targets, views, reconstructions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.errors import DataError
from frostglass.runtime.hooks import capture

if TYPE_CHECKING:
    from frostglass.core.views import ModelView

Capability = Literal["labels", "scores", "gradients"]
CAPABILITIES: tuple[Capability, ...] = ("labels", "scores", "gradients")
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Images:
    """Labelled pictures held as bytes: `pixels` uint8 (N, C, H, W), `labels` int64 (N,) into `names`, one `sources` entry a picture.

    `attributes` holds binary attributes (N, A) where the data has them, named by `attribute_names`.
    """

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...]
    sources: tuple[str, ...]
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise DataError(
                f"expected uint8 pixels of shape (N, C, H, W), got {self.pixels.dtype} {tuple(self.pixels.shape)}"
            )
        if not len(self.pixels) == len(self.labels) == len(self.sources):
            raise DataError(
                f"{len(self.pixels)} pictures, {len(self.labels)} labels and {len(self.sources)} sources: the three must be as many"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> Shape:
        return tuple(self.pixels.shape[1:])  # type: ignore[return-value]

    def floats(self, index: Tensor | slice = slice(None)) -> Tensor:
        """The pictures at `index` as float32 in [0, 1]."""
        return self.pixels[index].float().div_(255)

    def at(self, index: Tensor) -> "Images":
        """The pictures at `index`, as a set of their own."""
        return Images(
            pixels=self.pixels[index],
            labels=self.labels[index],
            names=self.names,
            sources=tuple(self.sources[i] for i in index.tolist()),
            attributes=None if self.attributes is None else self.attributes[index],
            attribute_names=self.attribute_names,
        )


@dataclass(frozen=True)
class Split:
    """Private train, validation and test pictures of the same identities, and public pictures of other ones.

    `manifest` holds sizes and content hashes of the four parts. Build one with `make_split`, which checks that nothing overlaps.
    """

    train: Images
    validation: Images
    test: Images
    public: Images
    manifest: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.names


def match_shape(images: Tensor, image_shape: Shape) -> Tensor:
    """Pictures of any size, grey or colour, brought to a shape, differentiably."""
    channels, *size = image_shape
    if images.shape[1] != channels:
        images = (
            images.mean(1, keepdim=True) if channels == 1 else images.expand(-1, channels, -1, -1)
        )
    if list(images.shape[2:]) != size:
        images = F.interpolate(
            images, size=size, mode="bilinear", antialias=True, align_corners=False
        )
    return images


@dataclass(frozen=True)
class Target:
    """A trained classifier: any module that maps images in [0, 1] to logits.

    `head` names the last linear layer (its input is the penultimate feature), `taps` the layers a defense or an analysis may read. `cut` is the layer behind
    which its features leave the device, if it is split between one and a server. With `attributes` its `classes` are attributes, any number of which a
    picture may have.
    """

    module: nn.Module
    classes: tuple[str, ...]
    image_shape: Shape
    head: str
    taps: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    cut: str = ""
    attributes: bool = False

    def view(self, access: Iterable[Capability]) -> "ModelView":
        """What an attacker granted `access` may touch of this target."""
        from frostglass.core.views import ModelView  # views are made of targets

        return ModelView(self, frozenset([access] if isinstance(access, str) else access))  # type: ignore[list-item]

    def fit(self, images: Tensor) -> Tensor:
        """Pictures of any size, grey or colour, brought to what this target takes, differentiably."""
        return match_shape(images, self.image_shape)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and flattened penultimate features; the module's mode is the caller's business."""
        with capture(self.module, (self.head,), inputs=True) as seen:
            logits = self.module(self.fit(images))
        return logits, seen[self.head].flatten(1)


@dataclass(frozen=True)
class Reconstructions:
    """What an attack found: for each of I attacked identities, K pictures.

    `images` float32 (I, K, C, H, W); `labels` (I,) the attacked classes; `latents` (I, K, ...); `confidence` (I, K) the target's
    probability of the attacked class; `queries` counts pictures shown to the target, `seconds` is the time spent. Candidates are in the
    order of the target's liking; `draws` (I, K) says which draw each was and `steps` (I, K) how many steps its search took. `broken` (I, K) marks pictures
    whose search broke off (a loss that was not finite, a start that was never found), `partial` (I,) identities of whom there are no others: they say little.
    """

    images: Tensor
    labels: Tensor
    latents: Tensor
    confidence: Tensor
    queries: int
    seconds: float
    key: str = ""
    draws: Tensor | None = None
    steps: Tensor | None = None
    broken: Tensor | None = None
    partial: Tensor | None = None


@dataclass(frozen=True)
class Halves:
    """`encoder` maps images in [0, 1] to features (N, *feature_shape), `rest` maps those to logits; they share their weights with the whole network."""

    encoder: nn.Module
    rest: nn.Module
    image_shape: Shape
    feature_shape: tuple[int, ...]
    tap: str
