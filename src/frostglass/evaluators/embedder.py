"""Evaluators that never saw the private images: networks that tell people apart by embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.method import Budget
from frostglass.core.parameters import parameters
from frostglass.core.types import Shape, Target
from frostglass.data._impostors import HELD_OUT
from frostglass.data._splits import MIN_IMAGES
from frostglass.data.base import Dataset
from frostglass.evaluators.dlib_faces import DlibFaces, dlib_files
from frostglass.models.base import Preprocess, noise_images, probe
from frostglass.models.build import build
from frostglass.models.build import source as code_of
from frostglass.models.checkpoint import load_body, read_body
from frostglass.models.foreign import check_trust, files_of, load_network
from frostglass.models.taps import find_head
from frostglass.runtime.device import default_device
from frostglass.runtime.tensors import weights_digest
from frostglass.store.keys import digest, fingerprint, plain
from frostglass.training.settings import Training

PUBLIC, SHIPPED, DLIB = "public", "faces32", "dlib"
LIBRARIES = ("timm", "torchvision")
FEWEST = 10  # people; a network that learned to tell fewer apart embeds others badly
SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / f"{SHIPPED}.safetensors"


@parameters
class Embedder:
    """An evaluator that compares faces and never saw the private images.

    Args:
        source: what the data suggests, by default. "public" trains a network on the public people;
            "faces32" is shipped with the package for the procedural faces; "dlib" is dlib's face
            embedding, with detection and alignment (extra `faces`). Or a network of yours that
            maps images to embeddings: "onnx:FILE", "torchscript:FILE", "package.module:function"
            (called without arguments); or "timm:NAME" and "torchvision:NAME" with `weights`, read
            before their last layer.
        weights: a file of weights for a function, timm or torchvision.
        size: pixels a side that a network of yours takes; the data's by default.
        mean, std: normalisation inside a network of yours, one number per channel; none by default
            (images stay in [0, 1]).
        training: how the network is trained on the public people. A fifth of them is left out, to
            calibrate with.
        trust: read a TorchScript file, which is a program and can write files when it is read.
    """

    source: str = ""
    weights: str | None = None
    size: Annotated[int, Field(ge=8)] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    training: Training = Field(default_factory=lambda: Training(model="resnet", epochs=30))
    trust: bool = False

    def __post_init__(self) -> None:
        named = ("size", "weights", "mean", "std")
        own = [name for name in named if vars(self)[name] is not None]
        if self.source in ("", PUBLIC, SHIPPED, DLIB):
            if own:
                raise ValueError(f"{own[0]}: name a network of yours as source, or leave it out")
        elif ":" not in self.source:
            raise ValueError(
                f"source: expected {PUBLIC}, {SHIPPED}, {DLIB}, onnx:FILE, torchscript:FILE, "
                f"timm:NAME, torchvision:NAME or MODULE:FUNCTION, got {self.source!r}"
            )
        else:
            check_trust(self.source, trust=self.trust)
        if self.source.partition(":")[0] in LIBRARIES and not self.weights:
            raise ValueError(
                f"weights: required with {self.source}: an untrained network recognises nobody"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean, std: give both, or neither")
        if self.training.attributes or self.training.cut:
            raise ValueError("training: an embedder tells people apart: no attributes, no cut")
        if self.training.start == PUBLIC:
            raise ValueError(
                "training.start: a first stage on all public people would include those that "
                "calibrate: leave it out"
            )

    @property
    def trained(self) -> bool:
        return self.source == PUBLIC

    def files(self) -> list[Path]:
        """List the files this configuration reads."""
        library = self.source.partition(":")[0]
        if self.source in ("", PUBLIC):
            return self.training.files()
        if self.source == SHIPPED:
            return [SHIPPED_WEIGHTS]
        if self.source == DLIB:
            return dlib_files()
        if library in LIBRARIES:
            return [Path(path) for path in (code_of(self.source), self.weights) if path]
        return files_of(self.source, self.weights)

    def brief(self) -> "Embedder":
        """Return a copy with one epoch, for dry runs."""
        return replace(self, training=self.training.brief())

    def budget(self, images: int) -> Budget:
        """Return the amount of work for a training set of this many images."""
        return self.training.budget(images) if self.trained else Budget("loads weights")


def chosen(config: Embedder, data: Dataset) -> Embedder | None:
    """Return the config with the source that the data suggests, where it names none.

    None if that is training and there are too few public people to train on: the controls then warn
    that all evaluators saw the private images.
    """
    if config.source:
        return config
    people = [count for number, count in enumerate(data.public_people()) if number % HELD_OUT]
    if data.embedder() == PUBLIC and sum(count >= MIN_IMAGES for count in people) < FEWEST:
        return None
    return replace(config, source=data.embedder())


def usable(configs: Sequence[Training | Embedder], data: Dataset) -> list[Training | Embedder]:
    """Return the evaluators that there are: embedders by the source that is used."""
    known = [each if isinstance(each, Training) else chosen(each, data) for each in configs]
    return [config for config in known if config is not None]


def read_embedder(
    config: Embedder, image_shape: Shape, device: torch.device | None = None
) -> Target:
    """Load a network that is not trained here as a target without classes."""
    device, size = device or default_device(), config.size or image_shape[-1]
    shape: Shape = (3, 32, 32) if config.source == SHIPPED else (image_shape[0], size, size)
    module, head = _network(config, shape)
    # A dry run has no weights to look at.
    weights = "" if device.type == "meta" else weights_digest(module).hex()
    identity = plain(config, "embedder", False)
    del identity[type(config).__name__]["trust"]  # it changes no result
    content = {"config": identity, "weights": weights, "files": fingerprint(config)}
    return Target(
        module.to(device),
        classes=(),
        image_shape=shape,
        head=head,
        info={
            "model": config.source,
            "parameters": sum(weight.numel() for weight in module.parameters()),
            "detects": config.source == DLIB,
        },
        key=digest(content),
    )


def _network(config: Embedder, shape: Shape) -> tuple[nn.Module, str]:
    """Return a network, and the layer whose input is the embedding."""
    if config.source == SHIPPED:
        return Embedding(_shipped(shape)), "end"
    if config.source == DLIB:
        return Embedding(DlibFaces()), "end"
    if config.source.partition(":")[0] in LIBRARIES:
        options: dict[str, Any] = {"mean": config.mean, "std": config.std}
        module = build(config.source, classes=2, image_shape=shape, seed=0, **options)
        head = find_head(module, shape)
        load_body(module, head, read_body(module, head, str(config.weights)))
        return module, head
    network = load_network(config.source, config.weights)
    if config.mean is not None and config.std is not None:
        network = Preprocess(network, config.mean, config.std)
    module = Embedding(network)
    _check_embeddings(module, config.source, shape)
    return module, "end"


class Embedding(nn.Module):
    """A network whose output is the embedding: the input of the layer `end`."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.end = nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.end(self.network(images).flatten(1))


def _shipped(shape: Shape) -> nn.Module:
    network = build("cnn", classes=2, image_shape=shape, seed=0)
    network.head = nn.Identity()
    tensors = load_file(SHIPPED_WEIGHTS)
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network


def _check_embeddings(module: nn.Module, source: str, shape: Shape) -> None:
    """Refuse a network that does not give one finite vector per image, or the same for all."""
    images = noise_images(module, shape, 4)
    embeddings, alone = probe(module, images), probe(module, images[:1])
    if len(embeddings) != 4 or embeddings.shape[1] < 2 or not embeddings.isfinite().all():
        raise ConfigError(
            f"{source}: expected a finite vector per image, got {tuple(embeddings.shape)} for 4 "
            "images: name a network that maps images to embeddings"
        )
    if torch.allclose(embeddings[:1], embeddings[1:2]) or not torch.allclose(
        embeddings[:1], alone, rtol=1e-3, atol=1e-4
    ):
        raise ConfigError(
            f"{source}: expected embeddings that depend on their image alone, got the same for two "
            "images, or others in a batch: use evaluation mode and inputs in [0, 1]"
        )
