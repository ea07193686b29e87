"""How much of an image fits through a narrow layer."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.analyses._result import Analysis, Axis, Cell, Curve, Figure, Table
from frostglass.analyses.base import AnalysisMethod, Context, analyses
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.models.architectures.cnn import cnn
from frostglass.networks.decoder import build_decoder
from frostglass.runtime.seeding import generator_for, seeded

CHUNK = 128
SQUASH: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "identity": nn.Identity}


def linear_errors(images: Tensor, others: Tensor, ranks: Sequence[int]) -> list[float]:
    """Return the mean squared error of the best linear autoencoder of each rank, on other images.

    It projects on the first principal components of the images (N, F); no linear map of that rank
    has a smaller error on these (Eckart and Young).
    """
    centre = images.double().mean(0)
    _, _, rows = torch.linalg.svd(images.double() - centre, full_matrices=False)
    rest = others.double() - centre
    bases = [rows[:rank] for rank in ranks]
    return [(rest - rest @ basis.T @ basis).square().mean().item() for basis in bases]


def autoencoder(image_shape: Shape, rank: int, activation: str, width: int) -> nn.Sequential:
    """Build a convolutional autoencoder that passes so many numbers in its middle."""
    encoder = cnn(classes=rank, image_shape=image_shape, width=width)
    decoder = build_decoder((rank,), image_shape, width=width)
    return nn.Sequential(encoder, SQUASH[activation](), decoder)


@analyses.register
@parameters
class Bottleneck(AnalysisMethod):
    """Reconstruction error of autoencoders against the width of their bottleneck.

    Convolutional autoencoders learn the public images; the error is that on held-out private
    images. Beside it is the error of the best linear autoencoder, by principal components. It
    shows how many numbers a head must pass for an image to be reconstructed from them.

    Paper: Yu et al., CALoR: Towards Comprehensive Model Inversion Defense, 2024, arXiv 2410.05814,
        Figure 4.
    Differs: the architecture is ours, the model cnn and a decoder. Errors are measured, and no
        image is kept.

    Args:
        ranks: widths of the bottleneck. activation: after it, tanh or identity.
        width: of the networks. steps, batch, lr: of their training by Adam.
    """

    ranks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=2)] = (2, 8, 32, 128)
    activation: Literal["tanh", "identity"] = "tanh"
    width: Annotated[int, Field(ge=1)] = 16
    steps: Annotated[int, Field(ge=1)] = 400
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0)] = 2e-3

    title = "autoencoder bottleneck"

    def run(self, context: Context) -> Analysis:
        split, seed = context.subjects[0].split, context.seed
        public, held = split.public, split.test
        ordered = sorted(set(self.ranks))
        linear = linear_errors(public.floats().flatten(1), held.floats().flatten(1), ordered)
        rows: list[tuple[Cell, ...]] = [
            (rank, reconstruction_error(self.trained(public, rank, seed), held), best)
            for rank, best in zip(ordered, linear, strict=True)
        ]
        ranks = tuple(float(row[0]) for row in rows)  # type: ignore[arg-type]
        curves = [
            Curve(name, ranks, tuple(row[place] for row in rows))  # type: ignore[misc]
            for place, name in ((1, f"autoencoder, {self.activation}"), (2, "best linear"))
        ]
        head = ("rank", "mean squared error", "best linear")
        figure = Figure(
            "Reconstruction through a bottleneck",
            Axis("width of the bottleneck", log=True),
            Axis("mean squared error"),
            tuple(curves),
        )
        return Analysis((Table("bottleneck", head, tuple(rows)),), (figure,))

    def trained(self, images: Images, rank: int, seed: int) -> nn.Module:
        """Train an autoencoder on images."""
        with seeded(seed, "bottleneck", rank):
            network = autoencoder(images.shape, rank, self.activation, self.width)
        optimizer = torch.optim.Adam(network.parameters(), self.lr)
        rng = generator_for(seed, "bottleneck", "batches")
        for _ in range(self.steps):
            index = torch.randint(len(images), (self.batch,), generator=rng)
            batch = images.floats(index)
            optimizer.zero_grad()
            F.mse_loss(network(batch), batch).backward()
            optimizer.step()
        return network.eval().requires_grad_(False)


def reconstruction_error(network: nn.Module, images: Images) -> float:
    """Return the mean squared error of an autoencoder on images."""
    total = 0.0
    with torch.no_grad():
        for index in torch.arange(len(images)).split(CHUNK):
            batch = images.floats(index)
            total += (network(batch) - batch).square().double().sum().item()
    return total / math.prod(images.pixels.shape)
