"""A user's generator as images of standard normals, and the checks that it is as stated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.priors._parts import in_parts, rows_at_once
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for

KINDS = ("normal", "uniform", "sphere")
MOST_NUMBERS = 2**20  # of a latent
USUAL = ((0, 1), (-0.5, 0.5), (-1, 1), (0, 255))  # ranges of generators, narrow ones first
BATCHES = (3, 2, 3, 3, 3)  # two sizes, because exported graphs may be tied to one
SLACK = 0.05  # how far beyond its range, as a share of it, a value may lie
OUTSIDE = 0.1  # share of values that may lie even further: a StyleGAN's are not bounded
USED = 0.55  # share of its range that a generator must use; images in 0:1 use half of -1:1
SAME = 1e-4  # share of the range by which two equal images may differ
ALONE = 1e-3  # the same for images made in another batch, where kernels round differently
STEP = 0.02  # length of the step in latent space by which gradients are compared with differences
AGREEING = (0.8, 1.25)  # gradient over difference


@dataclass(frozen=True)
class Latents:
    """What a generator takes: numbers of one `kind`, each latent of one `shape`."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Latents":
        """Read a statement such as "normal:512", "uniform:100", "sphere:512", "normal:100x1x1"."""
        kind, _, sides = str(text).partition(":")
        shape = tuple(int(side) for side in sides.split("x") if side.isascii() and side.isdigit())
        if (
            kind not in KINDS
            or len(shape) != len(sides.split("x"))
            or not 0 < math.prod(shape) <= MOST_NUMBERS
        ):
            raise ValueError(
                f"latent: expected a kind ({', '.join(KINDS)}) and a shape, such as normal:512 or "
                f"normal:100x1x1, of at most {MOST_NUMBERS:,} numbers, got {text!r}"
            )
        return cls(kind, shape)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, normals: Tensor) -> Tensor:
        """Convert standard normals (N, size) to what the generator takes, (N, *shape)."""
        if self.kind == "uniform":
            normals = torch.erf(normals / math.sqrt(2))  # 2Φ(n) - 1, in [-1, 1]
        elif self.kind == "sphere":
            normals = normals * (normals.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        return normals.unflatten(1, self.shape)


class UserImages(nn.Module):
    """Images in [0, 1] from standard normals (N, size), made by a user's network.

    The network takes `latents` and puts out values from `black` to `white`. With `memory`, images
    are made in parts that take about so many GiB, gradients included.
    """

    def __init__(
        self,
        network: nn.Module,
        latents: Latents,
        black: float,
        white: float,
        memory: float | None = None,
    ):
        super().__init__()
        self.network = network
        self.latents = latents
        self.black, self.white = black, white
        self.memory = memory

    def forward(self, normals: Tensor) -> Tensor:
        return self.paint(normals).clamp(0, 1)

    def paint(self, normals: Tensor) -> Tensor:
        """Return unclamped images: a search can follow their gradients everywhere."""
        return (self.raw(normals) - self.black) / (self.white - self.black)

    def raw(self, normals: Tensor) -> Tensor:
        """Return the network's own output."""
        rows = len(normals)
        if self.memory is not None and rows > 1:
            rows = rows_at_once(self.memory, self.image_bytes)
        return in_parts(lambda part: self.network(self.latents.of(part)), rows, normals)

    @cached_property
    def image_bytes(self) -> int:
        """Measure the memory that one image takes: what gradients keep, and as much while they run.

        What the network always holds, its weights, does not count.
        """
        held = (*self.network.parameters(), *self.network.buffers())
        weights = {tensor.untyped_storage()._cdata for tensor in held}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        start = torch.zeros(1, self.latents.size, device=device_of(self), requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            image = self.network(self.latents.of(start))
        return image.nbytes + 2 * sum(size for name, size in kept.items() if name not in weights)


def check_generator(generator: UserImages, name: str, size: int | None = None) -> Shape:
    """Try a generator on a few latents, refuse it if not as stated, return its image shape."""
    rng = generator_for(0, "generator", "probe")
    normals = torch.randn(sum(BATCHES), generator.latents.size, generator=rng)
    normals = normals.to(device_of(generator))
    with frozen(generator):
        with torch.no_grad():
            raw = torch.cat([_tried(generator, part, name) for part in normals.split(BATCHES)])
            shape: Shape = tuple(raw.shape[1:])  # type: ignore[assignment]
            if size and shape[1:] != (size, size):
                raise ModelError(
                    f"{name} makes images of {sides(shape[1:])} pixels, and {size}×{size} was "
                    "stated: correct prior.size"
                )
            if raw.std(0).max() <= ALONE * (raw.max() - raw.min()):
                raise ModelError(
                    f"{name} makes the same image of every latent: it was not trained, or its "
                    "input is not the latent"
                )
            _check_range(raw, sorted((generator.black, generator.white)), name)
            _check_repeatable(generator, normals[: BATCHES[0]], raw[: BATCHES[0]], name)
        _check_gradient(generator, normals[:2], name)
    return shape


def _tried(generator: UserImages, normals: Tensor, name: str) -> Tensor:
    """Return the network's output; refuse it if those are not images."""
    rows, taken = len(normals), f"{len(normals)} latents of {sides(generator.latents.shape)}"
    try:
        raw: Any = generator.raw(normals)
    except MODEL_ERRORS as error:
        raise ModelError(
            f"{name} cannot take {taken}, stated as {generator.latents}: "
            f"{_message(error)}{_hint(generator, normals)}"
        ) from error
    if not isinstance(raw, Tensor):
        raise ModelError(
            f"{name} gives a {type(raw).__name__}: return the images alone, from a small module "
            "around it if need be"
        )
    if raw.ndim != 4 or not raw.is_floating_point() or raw.shape[1] not in (1, 3):
        last = raw.ndim == 4 and raw.shape[3] in (1, 3)
        hint = "; its channels come last: add .permute(0, 3, 1, 2)" if last else ""
        raise ModelError(
            f"{name} gives {str(raw.dtype).removeprefix('torch.')} {tuple(raw.shape)} for {taken}: "
            f"expected float images ({rows}, 1 or 3, height, width){hint}"
        )
    if len(raw) != rows:
        raise ModelError(
            f"{name} gives {len(raw)} images for {taken}: export it with a batch axis of any length"
        )
    if not raw.isfinite().all():
        raise ModelError(
            f"{name} gives NaN or infinity for {taken}: its weights or the statement of its "
            f"latents ({generator.latents}) are wrong"
        )
    return raw.float()


def _message(error: Exception) -> str:
    """Return the most telling line of an error: TorchScript's last, behind two tracebacks."""
    lines = str(error).strip().splitlines()
    if lines and "TorchScript interpreter" in lines[0]:
        return lines[-1].removeprefix("RuntimeError: ")
    return first_line(error)


def _hint(generator: UserImages, normals: Tensor) -> str:
    """Say what would have worked: latents with or without axes of length 1, or single rows."""
    latents = generator.latents
    shape = (*latents.shape, 1, 1) if len(latents.shape) == 1 else (latents.size,)
    other = Latents(latents.kind, shape)
    single = "; it takes one at a time: export it with a batch axis of any length"
    for rows, tried, text in (
        (normals, other, f"; it takes {other}"),
        (normals[:1], latents, single),
    ):
        try:
            generator.network(tried.of(rows))
        except MODEL_ERRORS:
            continue
        return text
    return ""


def _check_range(raw: Tensor, stated: list[float], name: str) -> None:
    """Refuse values outside the stated range, or in a small part of it."""
    low, high = stated
    width, values = high - low, raw.flatten()
    least, most = values.min().item(), values.max().item()
    beyond = (values < low - SLACK * width) | (values > high + SLACK * width)
    outside = beyond.float().mean().item()
    used = (min(most, high) - max(least, low)) / width
    if outside <= OUTSIDE and used > USED:
        return
    problem = (
        f"{outside:.0%} of its values lie outside"
        if outside > OUTSIDE
        else f"its values use {max(used, 0):.0%} of"
    )
    some = values[:: max(1, len(values) // 10**6)]
    inner, outer = some.quantile(0.01).item(), some.quantile(0.99).item()
    likely = [
        f"it looks like {a:g}:{b:g}; "
        for a, b in USUAL
        if (a, b) != (low, high) and a - SLACK * (b - a) <= inner and outer <= b + SLACK * (b - a)
    ]
    raise ModelError(
        f"{name}: {problem} the stated range {low:g}:{high:g}, they go from {least:.3g} to "
        f"{most:.3g}: {next(iter(likely), '')}state as prior.range what it puts out for black and "
        "white"
    )


def _check_repeatable(generator: UserImages, normals: Tensor, raw: Tensor, name: str) -> None:
    """Refuse a network that makes other images of the same latents, again or in another batch."""
    width = abs(generator.white - generator.black)
    if (change := (generator.raw(normals) - raw).abs().max().item() / width) > SAME:
        raise ModelError(
            f"{name} draws noise: the same latents gave images that differ by up to {change:.1%} "
            "of the range; switch the noise off or make it constant (of a StyleGAN: noise_mode = "
            "'const')"
        )
    alone = torch.cat([_tried(generator, row, name) for row in normals.split(1)])
    if (change := (alone - raw).abs().max().item() / width) > ALONE:
        raise ModelError(
            f"{name} makes other images of the same latents in another batch, by up to "
            f"{change:.1%} of the range: it normalises over the batch; export it in evaluation mode"
        )


def _check_gradient(generator: UserImages, normals: Tensor, name: str) -> None:
    """Compare gradient and difference: Σ c · (J s) = Σ c², c the images' change by step s."""
    step = torch.randn(normals.shape, generator=generator_for(0, "generator", "step")).to(normals)
    step = STEP * step / step.norm(dim=1, keepdim=True)
    with torch.no_grad():
        change = (generator.raw(normals + step) - generator.raw(normals - step)) / 2
    actual = change.square().sum().item()
    start = normals.detach().requires_grad_()
    raw = generator.raw(start)
    if not raw.requires_grad:
        raise ModelError(
            f"{name} lets no gradient through from its images to its latents: a part of it is "
            "detached, or made without gradients"
        )
    (slope,) = torch.autograd.grad((raw * change).sum(), start, allow_unused=True)
    predicted = 0.0 if slope is None else (slope * step).sum().item()
    if not actual or not AGREEING[0] < predicted / actual < AGREEING[1]:
        share = (
            f"{predicted / actual:.0%} of the change that"
            if actual
            else "no change, and none is what"
        )
        raise ModelError(
            f"{name}: its gradients predict {share} a small step in its latents makes in its "
            "images: a part of it is detached, or its values are rounded"
        )


def sides(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
