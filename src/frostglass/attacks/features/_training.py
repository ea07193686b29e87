"""Shared by attacks that train a network on features of public images: parameters and loop."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.base import Attack, View
from frostglass.attacks.features._channels import channel_problems, channels_at_length_one
from frostglass.attacks.features.base import (
    FeatureAttack,
    QueryLedger,
    RawReconstructions,
    spread_evenly,
    too_few_public,
)
from frostglass.core.assets import Asset, Assets
from frostglass.core.errors import RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.core.views import CHUNK, FeatureView
from frostglass.models.cut import SQUARE, channel_axis
from frostglass.runtime.seeding import generator_for
from frostglass.runtime.tensors import under_prefix, with_prefix

MAX_CACHE = 2**30  # bytes of features kept in memory; more are queried again in each epoch
STATISTICS = 1000  # images whose features give the mean and deviation of each channel
MIN_SCALE = 1e-7  # of the largest deviation: weaker channels are rounding noise, not amplified

# Returns rows for image indices; those of the mirrored image where the second argument is True.
Lookup = Callable[[Tensor, Tensor], Tensor]


class Trainer(Protocol):
    """A network with its optimizer, and whatever is trained beside it."""

    def step(self, features: Tensor, targets: Tensor) -> float: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class TrainingPairs:
    """Features of `count` images and their regression targets; with `flips` also mirrored ones."""

    count: int
    features: Lookup
    targets: Lookup
    flips: bool

    def at(self, rows: Tensor, mirrored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mirrored = torch.zeros_like(rows, dtype=torch.bool) if mirrored is None else mirrored
        return self.features(rows, mirrored), self.targets(rows, mirrored)


@parameters
class TrainedAttack(FeatureAttack):
    """Base of attacks that train a network on features of public images, anew for each encoder.

    Args:
        epochs: passes over the public images. batch: images per step. lr: Adam's step size.
        width: channels of the network's narrowest stage.
        standardize: scale each channel of the features to mean 0 and deviation 1, as measured on
            public images, so that an encoder gains nothing from small numbers.
        unit_channels: divide each channel of each feature by its length first, for a device that
            weakens channels, as Disco does: what a channel shows counts, and not its size. Ours.
        flips: mirror half of the images of each epoch; their features are queried too.
        validation: share of the public images held out; the epoch with the least squared error on
            them is kept. 0 keeps the last epoch.
        adapt: public images that the device is asked to protect (A1): training continues on what
            it releases for them. 0 asks for none.
        adapt_epochs: passes over those.
    """

    epochs: Annotated[int, Field(ge=1)] = 40
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    width: Annotated[int, Field(ge=4)] = 32
    standardize: bool = True
    unit_channels: bool = False
    flips: bool = True
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    adapt: Annotated[int, Field(ge=0)] = 0
    adapt_epochs: Annotated[int, Field(ge=1)] = 70

    unkeyed: ClassVar[Mapping[str, Any]] = {"unit_channels": False}

    def problems(self, view: View, assets: Assets) -> list[str]:
        problems = super().problems(view, assets)
        public = 0 if assets.public is None else len(assets.public)
        if public - self._held_out(public) < 2:
            problems.append(
                f"{self.name} needs at least 2 public images that are not held out, got {public} "
                f"public images. Pass more, or lower {self.name}.validation."
            )
        if self.adapt and self.adapt - self._held_out(self.adapt) < 2:
            problems.append(
                f"{self.name}.adapt must leave at least 2 images that are not held out, got "
                f"{self.adapt}. Raise it, or set it to 0."
            )
        if self.unit_channels:
            problems += channel_problems(view, f"{self.name}.unit_channels")
        return [*problems, *too_few_public(self.name, self.adapt, assets)]

    @property
    def pretraining(self) -> Attack | None:
        return Pretraining(attack=replace(self, adapt=0, adapt_epochs=1, averaged=1))

    @property
    def pretrained_checkpoints(self) -> tuple[str, ...]:
        return (f"{self.checkpoint}-units", self.checkpoint)

    @property
    def protected_images(self) -> int:
        return self.adapt

    def brief(self) -> Self:
        return replace(self, epochs=1, adapt_epochs=1)

    def budget(self, size: AuditSize) -> Budget:
        adaptation = f", {self.adapt_epochs} epochs × {self.adapt} protected images"
        return Budget(
            f"{size.images} images{adaptation if self.adapt else ''}",
            evaluations=size.images,
            trained=self.adapt_epochs * self.adapt,
        )

    @abstractmethod
    def build_network(
        self, view: FeatureView, assets: Assets, target_shape: Sequence[int]
    ) -> tuple[Trainer, nn.Module]:
        """Build a network that predicts targets of a shape, from torch's global generator."""

    def _held_out(self, count: int) -> int:
        return math.ceil(self.validation * count)

    def train_network(
        self,
        trainer: Trainer,
        network: nn.Module,
        view: FeatureView,
        public: Images,
        targets: Lookup,
        *,
        seed: int,
        ledger: QueryLedger,
    ) -> Callable[[Tensor], Tensor]:
        """Train on plain features, then on protected ones with `adapt`; return the predictor.

        `targets` takes indices of public images.
        """
        encode = self._features_of(view, public, ledger)
        scaled = self._scaling(encode, len(public), view, ledger)
        pairs = TrainingPairs(
            len(public),
            lambda rows, mirrored: scaled(encode(rows, mirrored)),
            targets,
            self.flips,
        )
        self._fit(self.checkpoint, trainer, network, pairs, self.epochs, seed=seed, ledger=ledger)
        if self.adapt:
            chosen = spread_evenly(len(public), self.adapt)
            released = ledger.once("protected", lambda: view.protected(public.floats(chosen)))
            features = scaled(released).to(view.device)
            pairs = TrainingPairs(
                self.adapt,
                lambda rows, _: features[rows.to(features.device)],
                lambda rows, mirrored: targets(chosen[rows], mirrored),
                flips=False,
            )
            name = f"{self.checkpoint}-adapted"
            self._fit(name, trainer, network, pairs, self.adapt_epochs, seed=seed, ledger=ledger)
        network.eval().requires_grad_(False)
        return lambda features: network(scaled(features))

    def _scaling(
        self, encode: Lookup, count: int, view: FeatureView, ledger: QueryLedger
    ) -> Callable[[Tensor], Tensor]:
        """Return how features are scaled before the network sees them."""

        def sized(features: Tensor) -> Tensor:
            if not self.unit_channels:
                return features
            return channels_at_length_one(features, view.image_shape)

        if not self.standardize:
            return sized
        sample = spread_evenly(count, min(STATISTICS, count))
        mean, deviation = ledger.once(
            f"{self.checkpoint}-units",
            lambda: channel_statistics(
                sized(encode(sample, torch.zeros_like(sample, dtype=torch.bool))), view.image_shape
            ),
        )
        return lambda features: (sized(features) - mean) / deviation

    def _features_of(self, view: FeatureView, public: Images, ledger: QueryLedger) -> Lookup:
        """Look up features of public images: queried once if they fit into memory."""

        def query(rows: Tensor, mirrored: Tensor) -> Tensor:
            return view.encode(flip(public.floats(rows), mirrored))

        def query_all(mirrored: bool) -> Tensor:
            parts = torch.arange(len(public)).split(CHUNK)
            return torch.cat(
                [query(part, torch.full_like(part, mirrored, dtype=torch.bool)) for part in parts]
            )

        if 4 * math.prod(view.feature_shape) * len(public) * (2 if self.flips else 1) > MAX_CACHE:
            return query
        cache: list[Tensor] = []

        def cached(rows: Tensor, mirrored: Tensor) -> Tensor:
            if not cache:  # filled on first use: a pretrained network needs no features
                cache.append(ledger.once(f"{self.checkpoint}-features", lambda: query_all(False)))
                if self.flips:
                    cache.append(
                        ledger.once(f"{self.checkpoint}-mirrored", lambda: query_all(True))
                    )
            return select_rows(cache, rows, mirrored)

        return cached

    def _fit(
        self,
        name: str,
        trainer: Trainer,
        network: nn.Module,
        pairs: TrainingPairs,
        epochs: int,
        *,
        seed: int,
        ledger: QueryLedger,
    ) -> None:
        """Train for some epochs, resuming after the last whole one; end with the best epoch."""
        order = torch.randperm(pairs.count, generator=generator_for(seed, name, "held out"))
        split = self._held_out(pairs.count)
        held_out, training = order[:split], order[split:]
        with ledger.part(name):
            if checkpoint := ledger.load(name):
                tensors, values = checkpoint
                trainer.restore(tensors)
                done, least, best = values["epoch"], values["error"], under_prefix("best", tensors)
            else:  # the network may already be better than after any epoch of this training
                done, least, best = 0, _error(network, pairs, held_out), copy_weights(network)
                ledger.progress(0, epochs, f"{name}: features are known")
            for epoch in range(done, epochs):
                self._epoch(trainer, pairs, training, generator_for(seed, name, epoch))
                error = _error(network, pairs, held_out)
                weights = network.state_dict().values()
                if not math.isfinite(error) or not all(w.isfinite().all() for w in weights):
                    raise RunError(
                        f"{name}: NaN or infinity after epoch {epoch}. Lower {self.name}.lr."
                    )
                if error < least or not len(held_out):
                    least, best = error, copy_weights(network)
                tensors = trainer.tensors() | with_prefix("best", best)
                ledger.save(name, tensors, {"epoch": epoch + 1, "error": least})
                note = f"{name}: error {error:.4g} on held-out images" if len(held_out) else name
                ledger.progress(epoch + 1, epochs, note)
        load_weights(network, best)

    def _epoch(
        self, trainer: Trainer, pairs: TrainingPairs, rows: Tensor, rng: torch.Generator
    ) -> None:
        order = rows[torch.randperm(len(rows), generator=rng)]
        mirrored = torch.rand(len(order), generator=rng) < (0.5 if pairs.flips else 0.0)
        # Near-equal batches of at least `batch` images: batch norm needs several rows.
        batches = max(1, len(order) // self.batch)
        for part, flips in zip(
            order.tensor_split(batches), mirrored.tensor_split(batches), strict=True
        ):
            trainer.step(*pairs.at(part, flips))


@parameters
class Pretraining(FeatureAttack):
    """The training of an attack on plain features, shared by all protections of an encoder."""

    attack: TrainedAttack

    name: ClassVar[str] = "pretraining"

    @property
    def needs(self) -> frozenset[Asset]:
        return self.attack.needs

    @property
    def pretrained_checkpoints(self) -> tuple[str, ...]:
        return self.attack.pretrained_checkpoints

    def problems(self, view: View, assets: Assets) -> list[str]:
        return self.attack.problems(view, assets)

    def brief(self) -> Self:
        return replace(self, attack=self.attack.brief())

    def budget(self, size: AuditSize) -> Budget:
        attack = self.attack
        return Budget(
            f"{attack.name}: {attack.epochs} epochs × {size.public} public images",
            evaluations=size.public * (2 if attack.flips else 1) + attack.budget(size).evaluations,
            trained=attack.epochs * size.public,
        )

    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        return self.attack.reconstruct(view, features, assets, seed=seed, ledger=ledger)


def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror the images where `mirrored` (N,) is True."""
    return torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(3), images)


def select_rows(tables: list[Tensor], rows: Tensor, mirrored: Tensor) -> Tensor:
    """Return rows of the first table, or of the second where `mirrored`."""
    rows, mirrored = (index.to(tables[0].device) for index in (rows, mirrored))
    selected = tables[0][rows]
    if len(tables) > 1 and mirrored.any():
        selected[mirrored] = tables[1][rows[mirrored]]
    return selected


def channel_statistics(features: Tensor, image_shape: Shape = SQUARE) -> Tensor:
    """Return mean and deviation (2, ...) of each channel of features (N, ...)."""
    channels = 1 + channel_axis(tuple(features.shape[1:]), image_shape)
    axes = [axis for axis in range(features.ndim) if axis != channels]
    deviation, mean = torch.std_mean(features, dim=axes, keepdim=True, correction=0)
    least = max(MIN_SCALE * deviation.max().item(), 1e-12)
    return torch.stack([mean[0], deviation[0].clamp(min=least)])


def _error(network: nn.Module, pairs: TrainingPairs, held_out: Tensor) -> float:
    """Return the mean squared error on held-out images; 0 if there are none."""
    if not len(held_out):
        return 0.0
    network.eval()
    with torch.no_grad():
        errors = [
            (network(features) - targets).square().flatten(1).mean(1)
            for features, targets in map(pairs.at, held_out.split(CHUNK))
        ]
    return torch.cat(errors).mean().item()


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers themselves, which a wrapped `state_dict` may not return."""
    return {
        name: tensor.detach().clone()
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }


def load_weights(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `copy_weights` returned."""
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            tensor.copy_(tensors[name])
