"""TIPRDC: features that keep what a picture shows and lose who is on it, for whatever task comes later."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import (
    Batch,
    Defense,
    Opponent,
    Part,
    Size,
    Stage,
    Term,
    TrainingProgress,
    defenses,
)
from frostglass.defenses.training._simulated import build_reader, cut_problems, released
from frostglass.models.base import noise_images
from frostglass.models.cut import halves
from frostglass.networks.decoder import standardised
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)


def capped_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, of each sample at most ln K, what a guess among K classes costs: to be surer of the wrong one hides nobody better."""
    return (
        F.cross_entropy(logits, labels, reduction="none")
        .clamp(max=math.log(logits.shape[1]))
        .mean()
    )


def shared_information(together: Tensor, apart: Tensor) -> Tensor:
    """The Jensen-Shannon estimate E[-softplus(-T)] - E[softplus(T')]: T on what belongs together, T' on what does not; at most 0."""
    return -F.softplus(-together).mean() - F.softplus(apart).mean()


class InformationCritic(nn.Module):
    """T(x, z, u), larger the more a picture x, a feature z and a person u seem to belong together."""

    def __init__(
        self, image_shape: Shape, feature_shape: tuple[int, ...], people: int, *, width: int
    ):
        super().__init__()
        self.picture = build_reader(image_shape, 4 * width, width=width, image_shape=image_shape)
        self.feature = build_reader(feature_shape, 4 * width, width=width, image_shape=image_shape)
        self.person = nn.Embedding(people, 4 * width)
        self.opinion = nn.Sequential(
            nn.ReLU(), nn.Linear(12 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1)
        )

    def forward(self, images: Tensor, features: Tensor, people: Tensor) -> Tensor:
        return self.opinion(
            torch.cat([self.picture(images), self.feature(features), self.person(people)], 1)
        )[:, 0]

    def information(self, images: Tensor, features: Tensor, people: Tensor) -> Tensor:
        """What features and people tell of the pictures; those of their neighbours in the batch do not belong to them."""
        return shared_information(
            self(images, features, people), self(images.roll(1, 0), features, people)
        )


class Readers:
    """An `Opponent` of two networks, one that tells people by features and one that tells how much of a picture is in them.

    They learn after each step of the extractor, on its batch: the batch waits for the next turn, and is part of a checkpoint.
    """

    def __init__(
        self,
        target: Target,
        *,
        weight: float,
        width: int,
        lr: float,
        weight_decay: float,
        seed: int,
    ):
        device = device_of(target.module)
        shape = tuple(
            released(target, noise_images(target.module, target.image_shape, 2)).shape[1:]
        )
        people = len(target.classes)
        with seeded(seed, "tiprdc", "readers"):
            self.who = build_reader(shape, people, width=width, image_shape=target.image_shape).to(
                device
            )
            self.critic = InformationCritic(target.image_shape, shape, people, width=width).to(
                device
            )
        self._networks: dict[str, nn.Module] = {"who": self.who, "critic": self.critic}
        self._rules = {
            name: torch.optim.Adam(network.parameters(), lr=lr, weight_decay=weight_decay)
            for name, network in self._networks.items()
        }
        self._target, self._weight = target, weight
        self._waiting: tuple[Tensor, Tensor] | None = None
        for network in self._networks.values():
            network.eval().requires_grad_(False)

    def turn(self, progress: TrainingProgress, number: int) -> None:
        if self._waiting is None:
            return
        images, people = self._waiting
        features = standardised(released(self._target, images), self._target.image_shape)
        self._descend("who", lambda: F.cross_entropy(self.who(features), people))
        self._descend("critic", lambda: -self.critic.information(images, features, people))

    def losses(self, batch: Batch) -> dict[str, Term]:
        self._waiting = batch.images.detach(), batch.labels
        features = standardised(batch.tapped[self._target.cut], self._target.image_shape)
        return {
            "identity": Term(-self._weight, capped_cross_entropy(self.who(features), batch.labels)),
            "information": Term(
                self._weight - 1, self.critic.information(batch.images, features, batch.labels)
            ),
        }

    def tensors(self) -> dict[str, Tensor]:
        found = (
            {}
            if self._waiting is None
            else dict(zip(("images", "people"), self._waiting, strict=True))
        )
        for name, network in self._networks.items():
            found |= with_prefix(name, network.state_dict()) | with_prefix(
                f"{name}_rule", optimizer_tensors(self._rules[name])
            )
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        device = device_of(self.who)
        self._waiting = (
            (tensors["images"].to(device), tensors["people"].to(device))
            if "images" in tensors
            else None
        )
        for name, network in self._networks.items():
            network.load_state_dict(under_prefix(name, dict(tensors)))
            restore_optimizer(self._rules[name], under_prefix(f"{name}_rule", dict(tensors)))

    def _descend(self, name: str, loss_of: Callable[[], Tensor]) -> None:
        network, rule = self._networks[name], self._rules[name]
        network.train().requires_grad_(True)
        loss = loss_of()
        if not loss.isfinite():
            raise RunError(
                f"tiprdc: the network {name} has a loss of {loss.item()}: lower tiprdc.lr"
            )
        loss.backward()
        rule.step()
        rule.zero_grad(set_to_none=True)
        network.eval().requires_grad_(False)


@defenses.register
@parameters
class Tiprdc(Defense):
    """Task-independent anonymised features: an extractor is trained to keep the picture and lose the person, before there is a task.

    Extractor FE: min -λ · CE(CF(z), u) - (1 - λ) · I(x; z, u) with z = FE(x) and u the person; CF, which tells people by z, minimises CE,
    and the critic T of I = E[-softplus(-T(x, z, u))] - E[softplus(T(x', z, u))] maximises I, x' the picture of a neighbour in the batch.
    One step each on every batch, in that order. FE is the network up to target.cut. It is frozen then, and the layers behind it learn the
    task.

    Paper: Li et al., TIPRDC: Task-Independent Privacy-Respecting Data Crowdsourcing Framework for Deep Learning with Anonymized
        Intermediate Representations, KDD 2020, arXiv 2005.11480; with people as the private attribute as a baseline in Wang et al.,
        Crafter, NDSS 2024.
    Differs: -CE has no lower bound; it counts up to ln(people) a sample, where CF is no better than a guess. CF and T see z standardised in
        each channel over the batch, so that scale wins nothing. Both are residual networks of our own, and begin untrained, where the
        published code begins with a trained CF and FE; for a trained FE set target.start. x' is the cyclic shift of the original code;
        Crafter's copy permutes at random. FE is trained by target's optimiser and schedule, published Adam with lr 1e-4 and weight decay
        1e-4 at batches of 128. Its last epoch is kept: there is no accuracy to choose by.

    Args:
        epochs: epochs of the extractor's training, published 200; 0 leaves extractor and network as they are.
        weight: λ, published 0.66, and 0.6 in Crafter's copy.
        reader_width: channels of the first stage of CF and T.
        lr: Adam's step size for CF and T, published 1e-4.
        weight_decay: theirs, published 1e-4.
        extracting: whether this is the extractor's own training; the first stage sets it.
    """

    epochs: Annotated[int, Field(ge=0)] = 200
    weight: Annotated[float, Field(ge=0, le=1)] = 0.66
    reader_width: Annotated[int, Field(ge=1)] = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    extracting: bool = False

    off = {"epochs": 0}  # noqa: RUF012
    takes_attributes = True

    def __post_init__(self) -> None:
        if self.extracting and not self.epochs:
            raise ValueError(
                "an extractor's training has epochs: give some, or leave extracting out"
            )

    def replaces(self) -> frozenset[Part]:
        if not self.epochs:
            return frozenset()
        return frozenset(
            {
                "training of the encoder",
                "classification loss" if self.extracting else "starting weights",
            }
        )

    def couples_samples(self) -> bool:
        return self.extracting

    def non_gradient_leakage(self) -> str | None:
        return (
            "trains its extractor on private pictures first"
            if self.epochs and not self.extracting
            else None
        )

    def stage(self) -> Stage | None:
        if not self.epochs or self.extracting:
            return None
        return Stage("private", {"epochs": self.epochs, "attributes": (), "keep": "last"})

    def during_stage(self) -> Defense | None:
        return replace(self, extracting=True) if self.epochs and not self.extracting else None

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self.epochs and not self.extracting and target.cut and (extractor := _extractor(target)):
            extractor.requires_grad_(False)
            for layer in extractor.modules():
                layer.frozen_layer = True  # type: ignore[assignment]
        return target

    def problems(self, target: Target, size: Size) -> list[str]:
        if not self.epochs:
            return []
        if self.extracting:
            people = (
                []
                if not target.attributes
                else ["an extractor loses people: leave target.attributes out"]
            )
            return people + cut_problems(target)
        if not target.cut:
            return ["needs to know where the network is cut: set target.cut"]
        if _extractor(target) is None:
            return [
                f"the layers before {target.cut} cannot be told from those behind it, to be frozen alone: choose another layer or model"
            ]
        return []

    def modes(self, target: Target) -> None:
        if self.epochs and not self.extracting:
            for layer in target.module.modules():
                if getattr(layer, "frozen_layer", False):
                    layer.eval()

    def taps(self, target: Target) -> tuple[str, ...]:
        return (target.cut,) if self.extracting else ()

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        if not self.extracting:
            return None
        return Readers(
            target,
            weight=self.weight,
            width=self.reader_width,
            lr=self.lr,
            weight_decay=self.weight_decay,
            seed=seed,
        )

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        return {"cut": target.cut} if self.epochs else {}


def _extractor(target: Target) -> nn.Module | None:
    """The network up to the cut, made of its own layers; None if the rest has some of them too."""
    parts = halves(target)
    behind = {id(weight) for weight in parts.rest.parameters()}
    return (
        None
        if any(id(weight) in behind for weight in parts.encoder.parameters())
        else parts.encoder
    )
