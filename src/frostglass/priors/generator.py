"""A user's own generator: any network that makes images, once its latents and range are stated."""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import UNKNOWN, Prior
from frostglass.core.types import Shape
from frostglass.models.foreign import (
    check_trust,
    files_of,
    load_network,
    onnx_input,
    split_source,
)
from frostglass.priors._user_images import Latents, UserImages, check_generator, sides
from frostglass.priors.base import (
    LOADED,
    PriorMethod,
    PriorTask,
    check_size,
    identity_hashes,
    on_device,
    priors,
)
from frostglass.runtime.tensors import weights_digest


class SourcedImages(UserImages):
    """Images of a network that is read from its source every time.

    A store keeps only a hash of the weights, and compares it.
    """

    content: Tensor

    def __init__(
        self,
        source: str,
        network: nn.Module,
        latents: Latents,
        black: float,
        white: float,
        memory: float | None = None,
    ):
        super().__init__(network, latents, black, white, memory)
        self.source = source
        digest = torch.tensor(list(weights_digest(network)), dtype=torch.uint8)
        self.register_buffer("content", digest)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {"content": self.content}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        if not torch.equal(state_dict["content"].cpu(), self.content.cpu()):
            raise CheckpointError(
                f"{self.source} gives other weights than when this prior was stored: a function "
                "must give the same network every time; name the file it reads as prior.weights, "
                "or use another --store"
            )


@priors.register
@parameters
class Generator(PriorMethod):
    """Your own generator: an ONNX file, a TorchScript file, or a function that returns a module.

    G(n) = (g(f(n)) - black) / (white - black), clamped to [0, 1], where g is the network and f
    converts standard normals n to the latents it takes: n itself, 2Φ(n) - 1 for uniform ones,
    n / √mean(n²) for the sphere. What is stated is checked before anything else: whether g takes
    such latents, gives finite images of that range and size, the same ones every time and in every
    batch, others for other latents, and gradients that agree with differences. There is no critic,
    no mapping network and no block to look into. Whom it saw in training is not known.

    Use: you have a generator of such images already, in any framework that writes ONNX.
    Paper: none; this is how an attacker uses what can be downloaded.
    Differs: priors that are trained here know whose images they were trained on, and are refused if
    an attacked person is among them.

    Args:
        source: "onnx:FILE", "torchscript:FILE", or "package.module:function"; the function is
            called without arguments.
        weights: a file of weights for the network that the function returns, safetensors or tensors
            of torch.save; every name and shape must match.
        latent: what it takes: "normal:512" (standard normal), "uniform:100" (each number in
            [-1, 1]), "sphere:512" (normal, scaled to the length √512), or with several axes, as a
            DCGAN's "normal:100x1x1".
        range: what it puts out for black and for white.
        size: height and width of its images in pixels, if they are to be checked.
        resize: accept a generator that makes images of another size than the data has; they are
            resized for the target. Colour and grey serve each other anyway.
        memory: GiB that making images may take in an attack; fewer at a time are made where it is
            too little. What one image takes is measured. By default a batch is made at once.
        trust: read a TorchScript file, which is a program and can write files when it is read.
    """

    source: str
    weights: str | None = None
    latent: str
    range: tuple[
        Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]
    ] = (-1.0, 1.0)
    size: Annotated[int, Field(ge=1)] | None = None
    resize: bool = False
    memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    trust: bool = False

    title: ClassVar[str] = "User's generator"
    ready: ClassVar[bool] = True

    def __post_init__(self) -> None:
        kind, _ = split_source(self.source)
        if self.weights and kind in ("onnx", "torchscript"):
            raise ValueError(
                f"weights: {self.source} brings its own: leave them out, or name a function as "
                "source"
            )
        check_trust(self.source, trust=self.trust)
        Latents.parse(self.latent)
        _check_distinct(self.range)

    @property
    def latents(self) -> Latents:
        """The stated latents."""
        return Latents.parse(self.latent)

    def files(self) -> list[Path]:
        return files_of(self.source, self.weights)

    def fit(self, task: PriorTask) -> Prior:
        # A dry run is on the meta device, where nothing can be checked.
        device = torch.device("cpu") if task.device.type == "meta" else task.device
        return on_device(self.read(task.public.shape, device), task.device)

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        return self.read(image_shape, torch.device("cpu"))

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        return self._prior(self._images(), image_shape)

    def read(self, image_shape: Shape, device: torch.device) -> Prior:
        """Read the prior; refuse it if it is not as stated or does not fit images of this shape."""
        kind, place = split_source(self.source)
        images = self._images().to(device)
        if kind == "onnx" and (taken := onnx_input(Path(place))) not in (None, self.latents.shape):
            raise ModelError(
                f"{self.source} takes latents of {sides(taken)}, and {self.latents} was stated: "
                f"state {Latents(self.latents.kind, taken)}"
            )
        shape = check_generator(images, self.source, self.size)
        if not self.resize:
            check_size(self.source, shape, image_shape)
        return self._prior(images, shape)

    def _images(self) -> SourcedImages:
        network = load_network(self.source, self.weights)
        return SourcedImages(self.source, network, self.latents, *self.range, self.memory)

    def _prior(self, images: UserImages, shape: Shape) -> Prior:
        return _prior(images, shape, self.record()["parameters"], resize=self.resize)

    def budget(self, size: AuditSize) -> Budget:
        return Budget(LOADED)


def prior_from(
    module: nn.Module,
    *,
    latent: str,
    range: tuple[float, float] = (-1.0, 1.0),
    size: int | None = None,
    resize: bool = False,
    memory: float | None = None,
) -> Prior:
    """Return a prior of any module that makes images, checked as `prior.name = "generator"` is.

    The module is put into evaluation mode. Such a prior cannot be read back from a file: a config
    names a source instead.

    Args:
        latent: what the module takes, such as "normal:512", "uniform:100", "sphere:512" or
            "normal:100x1x1".
        range: what it puts out for black and for white.
        size: height and width of its images, if they are to be checked.
        resize: accept targets that take images of another size.
        memory: GiB that making images may take; larger batches are made in parts.
    """
    name = type(module).__name__
    try:
        latents = Latents.parse(latent)
        _check_distinct(range)
    except ValueError as error:
        raise ConfigError(f"prior_from: {error}") from None
    images = UserImages(module, latents, *range, memory).eval()
    stated = {
        "source": f"a {name} in memory",
        "latent": latent,
        "range": list(range),
        "size": size,
        "resize": resize,
        "memory": memory,
    }
    return _prior(images, check_generator(images, name, size), stated, resize=resize)


def _prior(images: UserImages, shape: Shape, stated: dict[str, Any], *, resize: bool) -> Prior:
    method = {"name": "generator", "parameters": stated}
    return Prior(
        generator=images.eval(),
        critic=None,
        latent=images.latents.size,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        info={
            "method": method,
            "seen_identities": UNKNOWN,
            **({"resize": True} if resize else {}),
        },
    )


def _check_distinct(range: tuple[float, float]) -> None:
    black, white = range
    if black == white or not math.isfinite(black) or not math.isfinite(white):
        raise ValueError(
            "range: expected two different numbers, for black and for white, got "
            f"{black:g} and {white:g}"
        )
