"""The nouns every part of the package shares: images, splits, targets, views, reconstructions.

Images are float32, NCHW, in [0, 1] wherever a function takes or returns them; `Images` keeps them as bytes and converts on the way out.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.errors import AccessError, ConfigError, DataError
from frostglass.runtime import capture, noise_drawn, straight_through, weights_digest

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
            raise DataError(f"expected uint8 pixels of shape (N, C, H, W), got {self.pixels.dtype} {tuple(self.pixels.shape)}")
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


def fitted(images: Tensor, image_shape: Shape) -> Tensor:
    """Pictures of any size, grey or colour, brought to a shape, differentiably."""
    channels, *size = image_shape
    if images.shape[1] != channels:
        images = images.mean(1, keepdim=True) if channels == 1 else images.expand(-1, channels, -1, -1)
    if list(images.shape[2:]) != size:
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
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

    def view(self, access: Iterable[Capability]) -> "View":
        """What an attacker granted `access` may touch of this target."""
        return View(self, frozenset([access] if isinstance(access, str) else access))  # type: ignore[list-item]

    def fit(self, images: Tensor) -> Tensor:
        """Pictures of any size, grey or colour, brought to what this target takes, differentiably."""
        return fitted(images, self.image_shape)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and flattened penultimate features; the module's mode is the caller's business."""
        with capture(self.module, (self.head,), inputs=True) as seen:
            logits = self.module(self.fit(images))
        return logits, seen[self.head].flatten(1)


class View:
    """A target behind a counter: each use must be granted, each picture shown is counted in `queries`.

    `labels` grants hard labels, `scores` probabilities, `gradients` everything a white-box attacker reads: differentiable logits and
    features. `gradients` includes `scores`, and `scores` includes `labels`.
    """

    def __init__(
        self,
        target: Target,
        access: frozenset[Capability],
        samples: int = 1,
        counter: "list[int] | None" = None,
        *,
        straight: bool = False,
    ):
        unknown = sorted(set(access) - set(CAPABILITIES))
        if unknown or not access:
            raise ConfigError(f"access must name some of {', '.join(CAPABILITIES)}; got {', '.join(unknown) or 'nothing'}")
        self._target = target
        self.access = access
        self._samples = samples
        self._straight = straight
        self._counter = [0] if counter is None else counter
        self.key = f"{target.key}:{'+'.join(sorted(access))}" + (f"×{samples}" if samples > 1 else "")

    def averaged(self, samples: int) -> "View":
        """This view through the mean logits (or the commonest label) of several passes, for targets that add noise; its queries count here too."""
        if not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples must be a whole number of at least 1, got {samples!r}")
        return View(self._target, self.access, self._samples * samples, self._counter, straight=self._straight)

    def straightened(self) -> "View":
        """This view with gradients that pass saturating layers as if they were not there; what comes out stays the same."""
        return View(self._target, self.access, self._samples, self._counter, straight=True)

    @property
    def target_key(self) -> str:
        """What names the target alone, whatever is granted of it: its key, or for one that no store made a hash of its weights."""
        if self._target.key:
            return self._target.key
        return f"weights {weights_digest(self.module).hex()[:24]}"

    @property
    def queries(self) -> int:
        return self._counter[0]

    @queries.setter
    def queries(self, number: int) -> None:
        self._counter[0] = number

    @property
    def module(self) -> nn.Module:
        """The network, for freezing and counting; attacks query it through this view alone."""
        return self._target.module

    @property
    def classes(self) -> int:
        return len(self._target.classes)

    @property
    def image_shape(self) -> Shape:
        return self._target.image_shape

    def labels(self, images: Tensor) -> Tensor:
        """The class the target says, (N,)."""
        with torch.no_grad():
            return torch.stack([logits.argmax(1) for logits, _ in self._passes("labels", images)]).mode(0).values

    def scores(self, images: Tensor) -> Tensor:
        """Class probabilities, (N, K), without gradients."""
        with torch.no_grad():
            return self._query("scores", images)[0].softmax(1)

    def logits(self, images: Tensor) -> Tensor:
        """Logits, (N, K), differentiable with respect to the images."""
        return self._query("gradients", images)[0]

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and penultimate features, differentiable with respect to the images."""
        return self._query("gradients", images)

    def _query(self, needed: Capability, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features, averaged over the passes."""
        passes = self._passes(needed, images)
        logits, features = next(passes)
        for more_logits, more_features in passes:
            logits, features = logits + more_logits, features + more_features
        return (logits, features) if self._samples == 1 else (logits / self._samples, features / self._samples)

    def _passes(self, needed: Capability, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if not any(CAPABILITIES.index(granted) >= CAPABILITIES.index(needed) for granted in self.access):
            raise AccessError(
                f"this view grants {', '.join(sorted(self.access))} and not {needed}: ask for it with target.view([{needed!r}])"
            )
        for draw in range(self._samples):
            self._counter[0] += len(images)
            with noise_drawn(self.module, draw), straight_through(self.module) if self._straight else nullcontext():
                made = self._target.outputs(images)
            yield made


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
