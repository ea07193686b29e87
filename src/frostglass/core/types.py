"""The nouns every part of the package shares: images, splits, targets, reconstructions.

Images are float32, NCHW, in [0, 1] wherever a function takes or returns them. The class `Images`
stores them as bytes and converts on access.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from frostglass.core.display import MAX_ROWS, image_grid, image_tag
from frostglass.core.errors import DataError
from frostglass.core.pixels import ByteImages, Pixels, joined, view
from frostglass.runtime.hooks import capture

if TYPE_CHECKING:
    from frostglass.core.views import ModelView

Capability = Literal["labels", "scores", "gradients"]
CAPABILITIES: tuple[Capability, ...] = ("labels", "scores", "gradients")
Shape = tuple[int, int, int]
TRACED = ("loss", "gradient_norm", "confidence")
HELD_OUT_IMAGES, GIVEN_IMAGES = "held-out images", "the private images given"


@dataclass(frozen=True)
class Images:
    """Labelled images stored as bytes.

    `pixels` is uint8 (N, C, H, W), a tensor or a source that is read where it is indexed; subsets
    are views of it. `labels` int64 (N,) indexes `names`, `sources` says where each image came from.
    `attributes` (N, A) holds binary attributes, if the data has any, named by `attribute_names`.
    """

    pixels: Pixels
    labels: Tensor
    names: tuple[str, ...]
    sources: tuple[str, ...]
    attributes: Tensor | None = None
    attribute_names: tuple[str, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            got = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise DataError(f"expected uint8 pixels of shape (N, C, H, W), got {got}")
        if not len(self.pixels) == len(self.labels) == len(self.sources):
            raise DataError(
                f"expected as many labels and sources as images, got {len(self.pixels)} images, "
                f"{len(self.labels)} labels and {len(self.sources)} sources"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        size = "×".join(map(str, self.shape))
        return f"Images({len(self):,} images of {len(self.names)} people, {size})"

    def _repr_html_(self) -> str:
        some = torch.linspace(0, len(self) - 1, min(len(self), 32)).long()
        grid = image_grid(self.floats(some), columns=8)
        return f"<p>{self!r}</p>{image_tag(grid, alt='images')}"

    @property
    def shape(self) -> Shape:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def floats(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return the images at `index` as float32 in [0, 1]."""
        return self.pixels[index].float().div_(255)

    def at(self, index: Tensor) -> "Images":
        """Return the images at `index` as a set of their own, a view of the same pixels."""
        return Images(
            pixels=view(self.pixels, index),
            labels=self.labels[index],
            names=self.names,
            sources=tuple(self.sources[i] for i in index.tolist()),
            attributes=None if self.attributes is None else self.attributes[index],
            attribute_names=self.attribute_names,
        )

    def first_of_each(self) -> Tensor:
        """Return the first image of each class, (K, C, H, W)."""
        first = [(self.labels == label).nonzero()[0, 0] for label in range(len(self.names))]
        return self.floats(torch.stack(first))

    def of_people(self, people: Tensor) -> "Images":
        """Return the images of some people only, numbered from 0 in the given order."""
        number = torch.full((len(self.names),), -1).scatter(0, people, torch.arange(len(people)))
        own = self.at((number[self.labels] >= 0).nonzero().flatten())
        names = tuple(self.names[who] for who in people.tolist())
        return replace(own, labels=number[own.labels], names=names)

    def joined(self, other: "Images", *, key: str = "") -> "Images":
        """Return these images followed by others of the same people, shape and attributes."""
        attributes = None
        if self.attributes is not None and other.attributes is not None:
            attributes = torch.cat([self.attributes, other.attributes])
        return Images(
            pixels=joined([self.pixels, other.pixels]),
            labels=torch.cat([self.labels, other.labels]),
            names=self.names,
            sources=self.sources + other.sources,
            attributes=attributes,
            attribute_names=self.attribute_names,
            key=key,
        )


@dataclass(frozen=True)
class Split:
    """Private train, validation and test images of the same people, public images of others.

    `evaluators`, if given, are further images of the private people that only evaluators train on.
    `secret`, if given, are images of further people whom only the owner of the model has: they are
    neither private nor public, and no attacker sees them.
    `manifest` holds sizes and content hashes of the parts. Build a split with `make_split`, which
    checks that nothing overlaps.
    """

    train: Images
    validation: Images
    test: Images
    public: Images
    manifest: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    evaluators: Images | None = None
    secret: Images | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.names

    @property
    def known_to_evaluators(self) -> Images:
        """The private images that evaluators train on: the target's, and those it never sees."""
        if self.evaluators is None:
            return self.train
        key = f"{self.key}.known_to_evaluators" if self.key else ""
        return self.train.joined(self.evaluators, key=key)

    def __repr__(self) -> str:
        sizes = f"{len(self.train)}/{len(self.validation)}/{len(self.test)}"
        people = f"{len(self.classes)} private people"
        more = f", {len(self.evaluators)} for evaluators" if self.evaluators is not None else ""
        secret = f", {len(self.secret)} secret" if self.secret is not None else ""
        parts = f"{sizes} images train/validation/test{more}, {len(self.public)} public{secret}"
        return f"Split({people}, {parts})"


def match_shape(images: Tensor, image_shape: Shape) -> Tensor:
    """Resize images and convert grey to colour or back, differentiably."""
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

    `head` names the last linear layer; its input is the penultimate feature. `taps` names the
    layers that a defense or an analysis may read. `cut` is the layer after which features leave
    the device, if the model is split. With `attributes`, the `classes` are attributes, and an
    image may have any number of them.
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

    def view(self, access: Capability | Iterable[Capability]) -> "ModelView":
        """Return what an attacker with this access may touch."""
        from frostglass.core.views import ModelView  # imports this module

        return ModelView(self, frozenset([access] if isinstance(access, str) else access))

    @property
    def tested_on(self) -> str:
        """What its test accuracy is measured on; a given model may have been trained on that."""
        return GIVEN_IMAGES if self.info.get("given") else HELD_OUT_IMAGES

    def fit(self, images: Tensor) -> Tensor:
        """Convert images to this target's size and colours, differentiably."""
        return match_shape(images, self.image_shape)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and flattened penultimate features; the caller sets the module's mode."""
        with capture(self.module, (self.head,), inputs=True) as seen:
            logits = self.module(self.fit(images))
        return logits, seen[self.head].flatten(1)

    def __repr__(self) -> str:
        kind = "attributes" if self.attributes else "classes"
        size = "×".join(map(str, self.image_shape))
        cut = f", cut after {self.cut}" if self.cut else ""
        accuracy = self.info.get("accuracy", {}).get("test")
        right = "" if accuracy is None else f", {accuracy:.1%} accurate on {self.tested_on}"
        name = self.info.get("model", type(self.module).__name__)
        return f"Target({name}, {len(self.classes)} {kind}, {size}{cut}{right})"


@dataclass(frozen=True)
class Reconstructions:
    """The result of an attack: K images for each of I attacked people.

    `images` float32 (I, K, C, H, W), or `ByteImages` that are read where they are indexed: a store
    keeps 8 bits and maps its file. `labels` (I,) the attacked classes; `latents` (I, K, ...).
    `confidence` (I, K) is the target's probability of the attacked class, or the share of the
    released feature that an image explains. `queries` counts images shown to the target, `seconds`
    the time spent. On the model surface candidates are in the order of the attack's guesses, the
    first guess first; most attacks rank by the target's margin. `draws` (I, K) says which draw each
    was. `steps` (I, K) counts search steps. `broken` (I, K) marks
    searches that stopped at a non-finite loss or without a start, `partial` (I,) people with no
    other candidate. `trace` (I, K, steps, 3), if the attack recorded it, has the values named
    TRACED before each step of the search behind an image; NaN after it stopped.
    """

    images: Tensor | ByteImages
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
    trace: Tensor | None = None

    def traced(self, name: Literal["loss", "gradient_norm", "confidence"]) -> Tensor:
        """Return one recorded value of each candidate at each step, (I, K, steps)."""
        if self.trace is None or name not in TRACED:
            have = "no search was recorded" if self.trace is None else ", ".join(TRACED)
            raise DataError(f"no trace of {name!r} ({have}): set trace of the attack to true")
        return self.trace[..., TRACED.index(name)]

    def count(self, mark: Literal["broken", "partial"]) -> int:
        """Count the images or people that carry a mark."""
        column = self.broken if mark == "broken" else self.partial
        return 0 if column is None else int(column.sum())

    def grid(self, people: int | None = None) -> Image.Image:
        """Return the images as one PIL image: a row per person, a column per candidate."""
        rows = self.images[:people]
        return image_grid(rows.flatten(0, 1), columns=rows.shape[1])

    def __repr__(self) -> str:
        people, candidates = self.images.shape[:2]
        size = "×".join(map(str, self.images.shape[2:]))
        work = f"{self.queries:,} queries, {self.seconds:.0f} s"
        return f"Reconstructions({people} people × {candidates} images of {size}, {work})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>{image_tag(self.grid(MAX_ROWS))}"


@dataclass(frozen=True)
class Halves:
    """A network cut in two; both halves share their weights with the whole.

    `encoder` maps images in [0, 1] to features (N, *feature_shape), `rest` maps features to logits.
    """

    encoder: nn.Module
    rest: nn.Module
    image_shape: Shape
    feature_shape: tuple[int, ...]
    tap: str
