"""Bring your own generator: any network that makes pictures from latents, once it is said which latents and which pictures."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.parameters import parameters
from frostglass.core.prior import UNKNOWN, Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import ModelView
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.priors._foreign import files_of, load_network, onnx_latent, split_source
from frostglass.priors.base import check_size, identity_hashes, priors
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from frostglass.runtime.tensors import weights_digest
from frostglass.store.files import Work

KINDS = ("normal", "uniform", "sphere")
MOST_NUMBERS = 2**20  # of a latent
USUAL = ((0, 1), (-0.5, 0.5), (-1, 1), (0, 255))  # ranges that generators have, narrow ones first
PARTS = (
    3,
    2,
    3,
    3,
    3,
)  # latents shown together in a trial; two sizes, because exported graphs may be tied to one
SLACK = 0.05  # how far beyond its range, as a share of it, a value may lie
OUTSIDE = 0.1  # share of values that may lie even further: a StyleGAN's are not bounded
USED = 0.55  # share of its range that a generator must use; pictures in 0:1 use half of -1:1
SAME = 1e-4  # share of the range by which two pictures may differ that should be the same
ALONE = 1e-3  # the same for pictures made in another batch, where kernels round differently
STEP = 0.02  # length of the step in latent space by which gradients are compared with differences
AGREEING = (0.8, 1.25)  # gradient over difference


@dataclass(frozen=True)
class Latents:
    """What a generator takes: numbers of one `kind`, each latent of one `shape`."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Latents":
        """Latents as they are stated: "normal:512", "uniform:100", "sphere:512", "normal:100x1x1"."""
        kind, _, sides = str(text).partition(":")
        shape = tuple(int(side) for side in sides.split("x") if side.isascii() and side.isdigit())
        if (
            kind not in KINDS
            or len(shape) != len(sides.split("x"))
            or not 0 < math.prod(shape) <= MOST_NUMBERS
        ):
            raise ValueError(
                f"latent: expected a kind ({', '.join(KINDS)}) and a shape, such as normal:512 or normal:100x1x1, of at most {MOST_NUMBERS:,} numbers, got {text!r}"
            )
        return cls(kind, shape)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, normals: Tensor) -> Tensor:
        """Standard normals (N, size) carried to what the generator takes, (N, *shape)."""
        if self.kind == "uniform":
            normals = torch.erf(normals / math.sqrt(2))  # 2Φ(n) - 1, in [-1, 1]
        elif self.kind == "sphere":
            normals = normals * (normals.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        return normals.unflatten(1, self.shape)


class OwnPictures(nn.Module):
    """Pictures in [0, 1] from standard normals (N, size), made by a network that takes `latents` and puts out `black` to `white`."""

    def __init__(self, network: nn.Module, latents: Latents, black: float, white: float):
        super().__init__()
        self.network = network
        self.latents = latents
        self.black, self.white = black, white

    def forward(self, normals: Tensor) -> Tensor:
        return self.paint(normals).clamp(0, 1)

    def paint(self, normals: Tensor) -> Tensor:
        """Pictures that are not cut off at 0 and 1: a search can follow their gradients everywhere."""
        return (self.raw(normals) - self.black) / (self.white - self.black)

    def raw(self, normals: Tensor) -> Tensor:
        """What the network itself puts out."""
        return self.network(self.latents.of(normals))


class SourcedPictures(OwnPictures):
    """Pictures of a network that is read from its source every time: a store keeps only a hash of the weights, and compares it."""

    content: Tensor

    def __init__(
        self, source: str, network: nn.Module, latents: Latents, black: float, white: float
    ):
        super().__init__(network, latents, black, white)
        self.source = source
        self.register_buffer(
            "content", torch.tensor(list(weights_digest(network)), dtype=torch.uint8)
        )

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {"content": self.content}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        if not torch.equal(state_dict["content"].cpu(), self.content.cpu()):
            raise CheckpointError(
                f"{self.source} gives other weights than when this prior was stored: a function must give the same network every time; "
                "name the file it reads as prior.weights, or use another --store"
            )


@priors.register
@parameters
class Generator:
    """Your own generator: an ONNX file, a TorchScript file, or a function that returns a torch.nn.Module.

    G(n) = (g(f(n)) - black) / (white - black), cut off at 0 and 1, where g is the network and f carries standard normals n to the latents it takes: n itself, 2Φ(n) - 1
    for uniform ones, n / √mean(n²) for the sphere. What is stated is tried before anything else: whether g takes such latents, gives finite pictures
    of that range and size, the same ones every time and whoever shares the batch, others for other latents, and gradients that agree with
    differences. There is no critic, no mapping network and no block to look into. Whom it saw in training is not known.

    Paper: none; this is how an attacker uses what can be downloaded.
    Differs: priors that are trained here know whose pictures they were trained on, and are refused if an attacked person is among them.

    Args:
        source: "onnx:FILE", "torchscript:FILE", or "package.module:function"; the function is called without arguments.
        weights: a file of weights for the network that the function returns, safetensors or tensors of torch.save; every name and shape must match.
        latent: what it takes: "normal:512" (standard normal), "uniform:100" (each number in [-1, 1]), "sphere:512" (normal, brought to the length √512), or with
            several axes, as a DCGAN's "normal:100x1x1".
        range: what it puts out for black and for white.
        size: height and width of its pictures in pixels, if they are to be checked.
        resize: accept a generator that makes pictures of another size than the data has; they are resized for the target. Colour and grey serve each other anyway.
    """

    source: str
    weights: str | None = None
    latent: str
    range: tuple[
        Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]
    ] = (-1.0, 1.0)
    size: Annotated[int, Field(ge=1)] | None = None
    resize: bool = False

    ready: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    needs: ClassVar[None] = None
    keeps_critic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kind, _ = split_source(self.source)
        if self.weights and kind in ("onnx", "torchscript"):
            raise ValueError(
                f"weights: {self.source} brings its own: leave them out, or name a function as source"
            )
        Latents.parse(self.latent)
        _check_distinct(self.range)

    @property
    def latents(self) -> Latents:
        """What is stated of the latents."""
        return Latents.parse(self.latent)

    def files(self) -> list[Path]:
        """Files this prior reads."""
        return files_of(self.source, self.weights)

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[SourcedPictures, None]:
        """The generator, as its source gives it; there is no critic."""
        return SourcedPictures(
            self.source, load_network(self.source, self.weights), self.latents, *self.range
        ), None

    def read(self, image_shape: Shape) -> Prior:
        """The prior, if the generator is as stated and fits images of this shape."""
        kind, place = split_source(self.source)
        pictures = self.networks(image_shape)[0].to(default_device())
        if kind == "onnx" and (taken := onnx_latent(Path(place))) not in (None, self.latents.shape):
            raise ModelError(
                f"{self.source} takes latents of {_sides(taken)}, and {self.latents} was stated: state {Latents(self.latents.kind, taken)}"
            )
        shape = check_generator(pictures, self.source, self.size)
        if not self.resize:
            check_size(self.source, shape, image_shape)
        return _prior(pictures, shape, asdict(self), resize=self.resize)  # type: ignore[call-overload]

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Read and try the generator; `public` is only asked for its shape."""
        return self.read(public.shape)


def prior_from(
    module: nn.Module,
    *,
    latent: str,
    range: tuple[float, float] = (-1.0, 1.0),
    size: int | None = None,
    resize: bool = False,
) -> Prior:
    """A prior around any module that makes pictures, after the same trials as those of `prior.name = "generator"`.

    The module is put into evaluation mode. Such a prior cannot be read back from a file: a config names a source instead.

    Args:
        latent: what the module takes, such as "normal:512", "uniform:100", "sphere:512" or "normal:100x1x1".
        range: what it puts out for black and for white.
        size: height and width of its pictures, if they are to be checked.
        resize: accept targets that take pictures of another size.
    """
    name = type(module).__name__
    try:
        latents = Latents.parse(latent)
        _check_distinct(range)
    except ValueError as error:
        raise ConfigError(f"prior_from: {error}") from None
    pictures = OwnPictures(module, latents, *range).eval()
    shape = check_generator(pictures, name, size)
    stated = {
        "source": f"a {name} in memory",
        "latent": latent,
        "range": list(range),
        "size": size,
        "resize": resize,
    }
    return _prior(pictures, shape, stated, resize=resize)


def _prior(pictures: OwnPictures, shape: Shape, stated: dict[str, Any], *, resize: bool) -> Prior:
    info: dict[str, Any] = {
        "method": {"name": "generator", "parameters": stated},
        "seen_identities": UNKNOWN,
    }
    if resize:
        info["resize"] = True
    return Prior(
        generator=pictures.eval(),
        critic=None,
        latent=pictures.latents.size,
        image_shape=shape,
        seen_identities=identity_hashes([]),
        info=info,
    )


def _check_distinct(range: tuple[float, float]) -> None:
    black, white = range
    if black == white or not math.isfinite(black) or not math.isfinite(white):
        raise ValueError(
            f"range: expected two different numbers, for black and for white, got {black:g} and {white:g}"
        )


def check_generator(pictures: OwnPictures, name: str, size: int | None = None) -> Shape:
    """Try a generator on a few latents, refuse what is not as it was stated, and give the shape of its pictures."""
    normals = torch.randn(
        sum(PARTS), pictures.latents.size, generator=generator_for(0, "generator", "probe")
    ).to(device_of(pictures))
    with frozen(pictures):
        with torch.no_grad():
            made = torch.cat([_tried(pictures, part, name) for part in normals.split(PARTS)])
            shape: Shape = tuple(made.shape[1:])  # type: ignore[assignment]
            if size and shape[1:] != (size, size):
                raise ModelError(
                    f"{name} makes pictures of {_sides(shape[1:])} pixels, and {size}×{size} was stated: correct prior.size"
                )
            if made.std(0).max() <= ALONE * (made.max() - made.min()):
                raise ModelError(
                    f"{name} makes the same picture of every latent: it was not trained, or its input is not the latent"
                )
            width = abs(pictures.white - pictures.black)
            _check_range(made, sorted((pictures.black, pictures.white)), name)
            _check_repeatable(pictures, normals[: PARTS[0]], made[: PARTS[0]], width, name)
        _check_gradient(pictures, normals[:2], name)
    return shape


def _tried(pictures: OwnPictures, normals: Tensor, name: str) -> Tensor:
    """What the network puts out, if those are pictures."""
    rows, taken = len(normals), f"{len(normals)} latents of {_sides(pictures.latents.shape)}"
    try:
        made: Any = pictures.raw(normals)
    except MODEL_ERRORS as error:
        raise ModelError(
            f"{name} cannot take {taken}, stated as {pictures.latents}: {_said(error)}{_hint(pictures, normals)}"
        ) from error
    if not isinstance(made, Tensor):
        raise ModelError(
            f"{name} gives a {type(made).__name__}: return the pictures alone, from a small module around it if need be"
        )
    if made.ndim != 4 or not made.is_floating_point() or made.shape[1] not in (1, 3):
        last = made.ndim == 4 and made.shape[3] in (1, 3)
        hint = "; its channels come last: add .permute(0, 3, 1, 2)" if last else ""
        raise ModelError(
            f"{name} gives {str(made.dtype).removeprefix('torch.')} {tuple(made.shape)} for {taken}: "
            f"expected float pictures ({rows}, 1 or 3, height, width){hint}"
        )
    if len(made) != rows:
        raise ModelError(
            f"{name} gives {len(made)} pictures for {taken}: export it with a batch axis of any length"
        )
    if not made.isfinite().all():
        raise ModelError(
            f"{name} gives NaN or infinity for {taken}: its weights or the statement of its latents ({pictures.latents}) are wrong"
        )
    return made.float()


def _said(error: Exception) -> str:
    """The line of an error that tells most: TorchScript puts it last, behind two tracebacks."""
    lines = str(error).strip().splitlines()
    return (
        lines[-1].removeprefix("RuntimeError: ")
        if lines and "TorchScript interpreter" in lines[0]
        else first_line(error)
    )


def _hint(pictures: OwnPictures, normals: Tensor) -> str:
    """What would have worked: latents with or without axes of length 1, or one row at a time."""
    latents = pictures.latents
    other = Latents(
        latents.kind, (*latents.shape, 1, 1) if len(latents.shape) == 1 else (latents.size,)
    )
    for rows, tried, text in (
        (normals, other, f"; it takes {other}"),
        (
            normals[:1],
            latents,
            "; it takes one at a time: export it with a batch axis of any length",
        ),
    ):
        try:
            pictures.network(tried.of(rows))
        except MODEL_ERRORS:
            continue
        return text
    return ""


def _check_range(made: Tensor, stated: list[float], name: str) -> None:
    low, high = stated
    width, values = high - low, made.flatten()
    least, most = values.min().item(), values.max().item()
    outside = (
        ((values < low - SLACK * width) | (values > high + SLACK * width)).float().mean().item()
    )
    used = (min(most, high) - max(least, low)) / width
    if outside <= OUTSIDE and used > USED:
        return
    found = (
        f"{outside:.0%} of its values lie outside"
        if outside > OUTSIDE
        else f"its values use {max(used, 0):.0%} of"
    )
    some = values[:: max(1, len(values) // 10**6)]
    inner, outer = some.quantile(0.01).item(), some.quantile(0.99).item()
    likely = next(
        (
            f"{a:g}:{b:g}"
            for a, b in USUAL
            if (a, b) != (low, high)
            and a - SLACK * (b - a) <= inner
            and outer <= b + SLACK * (b - a)
        ),
        "",
    )
    raise ModelError(
        f"{name}: {found} the stated range {low:g}:{high:g}, they go from {least:.3g} to {most:.3g}: "
        + (f"it looks like {likely}; " if likely else "")
        + "state as prior.range what it puts out for black and white"
    )


def _check_repeatable(
    pictures: OwnPictures, normals: Tensor, made: Tensor, width: float, name: str
) -> None:
    """The same latents must give the same pictures, again and alone."""
    if (change := (pictures.raw(normals) - made).abs().max().item() / width) > SAME:
        raise ModelError(
            f"{name} draws noise: the same latents gave pictures that differ by up to {change:.1%} of the range; "
            "switch the noise off or make it constant (of a StyleGAN: noise_mode = 'const')"
        )
    alone = torch.cat([_tried(pictures, row, name) for row in normals.split(1)])
    if (change := (alone - made).abs().max().item() / width) > ALONE:
        raise ModelError(
            f"{name} makes other pictures of the same latents in other company, by up to {change:.1%} of the range: "
            "it normalises over the batch; export it in evaluation mode"
        )


def _check_gradient(pictures: OwnPictures, normals: Tensor, name: str) -> None:
    """Along a small step, the gradient must tell what the difference of two pictures tells: Σ c · (J s) = Σ c² with c the change of the pictures."""
    step = torch.randn(normals.shape, generator=generator_for(0, "generator", "step")).to(normals)
    step = STEP * step / step.norm(dim=1, keepdim=True)
    with torch.no_grad():
        change = (pictures.raw(normals + step) - pictures.raw(normals - step)) / 2
    seen = change.square().sum().item()
    start = normals.detach().requires_grad_()
    made = pictures.raw(start)
    if not made.requires_grad:
        raise ModelError(
            f"{name} lets no gradient through from its pictures to its latents: a part of it is detached, or made without gradients"
        )
    (slope,) = torch.autograd.grad((made * change).sum(), start, allow_unused=True)
    told = 0.0 if slope is None else (slope * step).sum().item()
    if not seen or not AGREEING[0] < told / seen < AGREEING[1]:
        share = f"{told / seen:.0%} of the change that" if seen else "nothing, and nothing is what"
        raise ModelError(
            f"{name}: its gradients tell {share} a small step in its latents makes in its pictures: a part of it is detached, or its values are rounded"
        )


def _sides(shape: Any) -> str:
    return "×".join(map(str, shape))
