"""From a feature to the person, without an image."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.base import attacks
from frostglass.attacks.features._training import TrainedAttack, Trainer, flip, select_rows
from frostglass.attacks.features.base import QueryLedger, RawReconstructions
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError
from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.types import Shape
from frostglass.core.views import CHUNK, FeatureView, batch_invariant
from frostglass.models.cut import SQUARE
from frostglass.networks.decoder import channels_first
from frostglass.networks.embedding import embed, public_centre
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

COARSEST = 4  # pixels a side below which maps are not made smaller
WIDEST = 8  # times `width`: most channels of a stage


@attacks.register
@parameters
class Mapper(TrainedAttack):
    """Feature-to-person mapping: a network trained on public images to predict face embeddings.

    min over M of ‖M(Enc(x)) - C(x)‖², x public, C(x) the embedding of length 1 by which two images
    are said to show the same person or not. Its `latents` are M(F), normalised to length 1; their
    cosine with the person's embedding is the score. It generates no images: it shows the public
    image with the nearest embedding, a stranger who looks like the person.

    Use: features of deep layers, where images look safe: it tells who it is without any image.
    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations
        (AdvLearn), AAAI 2020, arXiv 1911.10143 (equation 10).
    Differs: the paper does not say what M is; here maps pass strided convolutions down to 4×4 and,
        in parallel, are averaged over their positions; two hidden layers follow, which are all
        there is for vectors. C is our embedder, trained on public people, relative to the mean of
        public images; the paper's is OpenFace. Mirrored images, standardised features, the choice
        of an epoch by held-out public images, and `adapt` are ours.

    Args:
        hidden: numbers in each hidden layer.
    """

    hidden: Annotated[int, Field(ge=1)] = 512

    embeds: ClassVar[bool] = True
    variants: ClassVar[Variants] = {
        "adaptive": (
            "A1: continues training on what the protection releases for public images",
            {"adapt": 512, "adapt_epochs": 70},
        ),
    }

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"embedder"})

    def build_network(
        self, view: FeatureView, assets: Assets, target_shape: Sequence[int]
    ) -> tuple[Trainer, nn.Module]:
        network = build_mapper(
            view.feature_shape,
            *target_shape,
            width=self.width,
            hidden=self.hidden,
            image_shape=view.image_shape,
        )
        return Regression(network.to(view.device), self.lr), network

    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        public, embedder = assets.require_public(), assets.embedder
        if embedder is None:
            raise ConfigError(assets.missing(self.needs, self.name))
        centre = public_centre(embedder, public)

        def embeddings(mirrored: bool) -> Tensor:
            parts = torch.arange(len(public)).split(CHUNK)
            sides = (torch.full_like(part, mirrored, dtype=torch.bool) for part in parts)
            images = (
                flip(public.floats(part), side) for part, side in zip(parts, sides, strict=True)
            )
            return torch.cat([embed(embedder, batch, centre) for batch in images]).to(view.device)

        known = [embeddings(False), *([embeddings(True)] if self.flips else [])]
        with seeded(seed, "mapper", "init"):
            trainer, network = self.build_network(view, assets, known[0].shape[1:])
        predict = self.train_network(
            trainer,
            network,
            view,
            public,
            lambda rows, mirrored: select_rows(known, rows, mirrored),
            seed=seed,
            ledger=ledger,
        )
        people = F.normalize(batch_invariant(predict, features), dim=1)
        nearest = torch.stack([(known[0] @ person).argmax() for person in people]).cpu()
        return RawReconstructions(view.fit(public.floats(nearest))[:, None], people[:, None])


class Regression:
    """Trains a network by squared error."""

    def __init__(self, network: nn.Module, lr: float):
        self._network = network
        self._optimizer = torch.optim.Adam(network.parameters(), lr=lr)

    def step(self, features: Tensor, targets: Tensor) -> float:
        self._network.train()
        loss = (self._network(features) - targets).square().sum(1).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        optimizer = with_prefix("optimizer", optimizer_tensors(self._optimizer))
        return with_prefix("mapper", self._network.state_dict()) | optimizer

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._network.load_state_dict(under_prefix("mapper", dict(tensors)))
        restore_optimizer(self._optimizer, under_prefix("optimizer", dict(tensors)))


class Parallel(nn.Module):
    """Concatenates the outputs of several networks for the same input."""

    def __init__(self, *networks: nn.Module):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([network(features) for network in self.networks], 1)


def build_mapper(
    feature_shape: tuple[int, ...],
    size: int,
    *,
    width: int = 64,
    hidden: int = 512,
    image_shape: Shape = SQUARE,
) -> nn.Sequential:
    """Build a network from features (N, *feature_shape) of images of a shape to rows (N, size).

    Weights are drawn from torch's global generator.
    """
    if len(feature_shape) == 3:
        layout, maps = channels_first(feature_shape, image_shape)
        first, numbers = _strided(*maps, width=width)
    else:
        layout, first, numbers = [], nn.Flatten(), math.prod(feature_shape)
    return nn.Sequential(
        *layout,
        first,
        nn.Linear(numbers, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, size),
    )  # fmt: skip


def _strided(channels: int, high: int, wide: int, *, width: int) -> tuple[nn.Module, int]:
    """Build convolutions that halve maps to at most 4×4, with the maps' means; and their size."""
    layers: list[nn.Module] = []
    means, stage = channels, 0
    while stage == 0 or max(high, wide) > COARSEST:
        after = width * min(2**stage, WIDEST)
        layers += [
            nn.Conv2d(channels, after, 3, 2, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
        channels, high, wide, stage = after, (high + 1) // 2, (wide + 1) // 2, stage + 1
    parallel = Parallel(
        nn.Sequential(*layers, nn.Flatten()), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    return parallel, channels * high * wide + means
