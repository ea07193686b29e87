"""From a feature to the person, without a picture."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.features._learned import Learned, Student, chosen_from, flipped
from frostglass.attacks.features.base import Ledger, Rebuilt, feature_attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import ConfigError
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


@feature_attacks.register
@parameters
class Mapper(Learned):
    """Feature-to-person mapping: a network that learns from public pictures which embedding a feature belongs to.

    min over M of ‖M(Enc(x)) - C(x)‖², x public, C(x) the embedding of length 1 by which pictures show the same person or not. Its `latents`
    are M(F), brought to length 1, and by their cosine with the victim's embedding it should be judged. It makes no pictures: what it shows
    is the public picture whose embedding is nearest, a stranger who looks like the victim.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations (AdvLearn), AAAI 2020, arXiv 1911.10143
        (equation 10).
    Differs: the paper does not say what M is; here maps pass strided convolutions down to 4×4 and, beside them, are averaged over their
        places; two hidden layers follow, for vectors they are all. C is our embedder, trained on public people, seen from the mean of
        public pictures; the paper's is OpenFace. Mirrored pictures, standardised features, the choice of an epoch by held-out public
        pictures, and `adapt` are ours.

    Args:
        hidden: numbers in each hidden layer.
    """

    hidden: Annotated[int, Field(ge=1)] = 512

    embeds: ClassVar[bool] = True
    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        "adaptive": (
            "A1: goes on learning from what the protection makes of public pictures",
            {"adapt": 512, "adapt_epochs": 70},
        ),
    }

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"embedder"})

    def untaught(
        self, view: FeatureView, assets: Assets, answer: Sequence[int]
    ) -> tuple[Student, nn.Module]:
        network = build_mapper(
            view.feature_shape,
            *answer,
            width=self.width,
            hidden=self.hidden,
            image_shape=view.image_shape,
        )
        return Regression(network.to(view.device), self.lr), network

    def rebuild(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        public, embedder = assets.require_public(), assets.embedder
        if embedder is None:
            raise ConfigError("mapper needs the embedder, and none is given: pass embedder=...")
        centre = public_centre(embedder, public)

        def embeddings(mirrored: bool) -> Tensor:
            parts = torch.arange(len(public)).split(CHUNK)
            sides = (torch.full_like(part, mirrored, dtype=torch.bool) for part in parts)
            pictures = (
                flipped(public.floats(part), side) for part, side in zip(parts, sides, strict=True)
            )
            return torch.cat([embed(embedder, some, centre) for some in pictures]).to(view.device)

        known = [embeddings(False), *([embeddings(True)] if self.flips else [])]
        with seeded(seed, "mapper", "init"):
            student, network = self.untaught(view, assets, known[0].shape[1:])
        guess = self.taught(
            student,
            network,
            view,
            public,
            lambda places, mirrored: chosen_from(known, places, mirrored),
            seed=seed,
            ledger=ledger,
        )
        persons = F.normalize(batch_invariant(guess, features), dim=1)
        nearest = torch.stack([(known[0] @ person).argmax() for person in persons]).cpu()
        return Rebuilt(view.fit(public.floats(nearest))[:, None], persons[:, None])


class Regression:
    """A network that learns by squared error."""

    def __init__(self, network: nn.Module, lr: float):
        self._network = network
        self._rule = torch.optim.Adam(network.parameters(), lr=lr)

    def step(self, features: Tensor, answers: Tensor) -> float:
        self._network.train()
        loss = (self._network(features) - answers).square().sum(1).mean()
        self._rule.zero_grad(set_to_none=True)
        loss.backward()
        self._rule.step()
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        return with_prefix("mapper", self._network.state_dict()) | with_prefix(
            "rule", optimizer_tensors(self._rule)
        )

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._network.load_state_dict(under_prefix("mapper", dict(tensors)))
        restore_optimizer(self._rule, under_prefix("rule", dict(tensors)))


class Beside(nn.Module):
    """What several networks make of the same thing, side by side."""

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
    """A network that maps features (N, *feature_shape) of pictures of a shape to rows (N, size); draws its weights from torch's global generator."""
    turned, maps = (
        channels_first(feature_shape, image_shape) if len(feature_shape) == 3 else ([], None)
    )
    first, numbers = (
        _strided(*maps, width=width) if maps else (nn.Flatten(), math.prod(feature_shape))
    )
    return nn.Sequential(
        *turned,
        first,
        nn.Linear(numbers, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
        nn.Linear(hidden, size),
    )  # fmt: skip


def _strided(channels: int, high: int, wide: int, *, width: int) -> tuple[nn.Module, int]:
    """Convolutions that halve maps until they are no larger than 4×4, at least one of them, beside the maps' means; and how many numbers they make."""
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
    beside = Beside(
        nn.Sequential(*layers, nn.Flatten()), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    return beside, channels * high * wide + means
