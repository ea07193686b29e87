"""TIPRDC: features that keep the content of an image and lose the person, for any later task."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

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
    Stage,
    Term,
    TrainingProgress,
    TrainingSize,
    defenses,
)
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._freezing import frozen_layers, mark_frozen
from frostglass.defenses.training._simulated import (
    build_reader,
    cut_problems,
    released,
    released_shape,
)
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
    """Return the cross-entropy with each sample capped at ln K, the loss of a guess among K.

    Being surer of a wrong class does not hide anyone better.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.clamp(max=math.log(logits.shape[1])).mean()


def shared_information(together: Tensor, apart: Tensor) -> Tensor:
    """Return the Jensen-Shannon estimate E[-softplus(-T)] - E[softplus(T')], at most 0.

    T are scores of what belongs together, T' of what does not.
    """
    return -F.softplus(-together).mean() - F.softplus(apart).mean()


class InformationCritic(nn.Module):
    """T(x, z, u): large if image x, feature z and person u seem to belong together."""

    def __init__(
        self, image_shape: Shape, feature_shape: tuple[int, ...], people: int, *, width: int
    ):
        super().__init__()
        self.image = build_reader(image_shape, 4 * width, width=width, image_shape=image_shape)
        self.feature = build_reader(feature_shape, 4 * width, width=width, image_shape=image_shape)
        self.person = nn.Embedding(people, 4 * width)
        self.score = nn.Sequential(
            nn.ReLU(), nn.Linear(12 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1)
        )

    def forward(self, images: Tensor, features: Tensor, people: Tensor) -> Tensor:
        return self._score(self.image(images), self.feature(features), self.person(people))

    def information(self, images: Tensor, features: Tensor, people: Tensor) -> Tensor:
        """Estimate what features and people tell about their images, against their neighbours'."""
        # Each network reads the batch once: a neighbour's image has its row of the same result.
        read = self.image(images)
        others = self.feature(features), self.person(people)
        return shared_information(self._score(read, *others), self._score(read.roll(1, 0), *others))

    def _score(self, *parts: Tensor) -> Tensor:
        return self.score(torch.cat(parts, 1))[:, 0]


class Readers(Opponent):
    """Two networks: one recognises people, one measures image information.

    They train after each step of the extractor, on its batch. That batch waits for the next turn
    and is part of a checkpoint.
    """

    def __init__(self, defense: "Tiprdc", target: Target, *, seed: int):
        device, people, shape = (
            device_of(target.module),
            len(target.classes),
            released_shape(target),
        )
        width, image_shape = defense.reader_width, target.image_shape
        with seeded(seed, "tiprdc", "readers"):
            self.who = build_reader(shape, people, width=width, image_shape=image_shape).to(device)
            self.critic = InformationCritic(image_shape, shape, people, width=width).to(device)
        self._networks: dict[str, nn.Module] = {"who": self.who, "critic": self.critic}
        self._rules = {
            name: torch.optim.Adam(
                network.parameters(), lr=defense.lr, weight_decay=defense.weight_decay
            )
            for name, network in self._networks.items()
        }
        self._target, self._weight = target, defense.weight
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
        identity = capped_cross_entropy(self.who(features), batch.labels)
        information = self.critic.information(batch.images, features, batch.labels)
        return {
            "identity": Term(-self._weight, identity),
            "information": Term(self._weight - 1, information),
        }

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        if self._waiting:
            tensors["images"], tensors["people"] = self._waiting
        for name, network in self._networks.items():
            tensors |= with_prefix(name, network.state_dict())
            tensors |= with_prefix(f"{name}_rule", optimizer_tensors(self._rules[name]))
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        device = device_of(self.who)
        if "images" in tensors:
            self._waiting = tensors["images"].to(device), tensors["people"].to(device)
        else:
            self._waiting = None
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
    """Task-independent anonymised features: train an extractor to keep the image, not the person.

    Extractor FE: min -λ · CE(CF(z), u) - (1 - λ) · I(x; z, u) with z = FE(x) and u the person; CF,
    which recognises people by z, minimises CE, and the critic T of
    I = E[-softplus(-T(x, z, u))] - E[softplus(T(x', z, u))] maximises I, x' the image of a
    neighbour in the batch. One step each on every batch, in that order. FE is the network up to
    target.cut. It is then frozen, and the layers after it learn the task.

    Use: features that leave a device before the task is known. In our two worlds, cut
        after a first stage, it left 93 and 92 % recognised for 0.10 and 0.14 of MCC.
    Cost: two readers are trained beside the extractor: some 9 times the time of an undefended
        training with 40 epochs in faces/trained-protections.
    Paper: Li et al., TIPRDC: Task-Independent Privacy-Respecting Data Crowdsourcing Framework for
        Deep Learning with Anonymized Intermediate Representations, KDD 2020, arXiv 2005.11480;
        with people as the private attribute as a baseline in Wang et al., Crafter, NDSS 2024.
    Differs: -CE has no lower bound; here it counts up to ln(people) per sample, where CF is no
        better than a guess. CF and T see z standardised in each channel over the batch, so that
        scaling does not help. Both are residual networks of our own and start untrained, where the
        published code starts with a trained CF and FE; for a trained FE set target.start. x' is
        the cyclic shift of the original code; Crafter's copy permutes at random. FE is trained by
        the target's optimiser and schedule, published Adam with lr 1e-4 and weight decay 1e-4 at
        batches of 128. Its last epoch is kept: there is no accuracy to choose by.

    Args:
        epochs: epochs of the extractor's training, published 200; 0 leaves extractor and network
            as they are.
        weight: λ, published 0.66, and 0.6 in Crafter's copy.
        reader_width: channels of the first stage of CF and T.
        lr: Adam's step size for CF and T, published 1e-4, as that of FE: with a larger target.lr
            raise it too, or they cannot keep up.
        weight_decay: of CF and T, published 1e-4.
        extracting: whether this is the extractor's own training; the first stage sets it.
    """

    epochs: Annotated[int, Field(ge=0)] = 200
    weight: Annotated[float, Field(ge=0, le=1)] = 0.66
    reader_width: Annotated[int, Field(ge=1)] = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    extracting: bool = False

    title = "TIPRDC"
    adaptive: ClassVar = ("adapt",)
    disabled: ClassVar = {"epochs": 0}
    takes_attributes = True
    needs_cut = True

    def __post_init__(self) -> None:
        if self.extracting and not self.epochs:
            raise ValueError("extracting needs epochs above 0: raise epochs, or drop extracting")

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"weight": Real(0.1, 0.95)}

    @property
    def _uses_extractor(self) -> bool:
        """Whether this is the second training, on top of the frozen extractor."""
        return self.epochs > 0 and not self.extracting

    def brief(self) -> Self:
        return replace(self, epochs=min(self.epochs, 1))

    def replaces(self) -> frozenset[Part]:
        if not self.epochs:
            return frozenset()
        part: Part = "classification loss" if self.extracting else "starting weights"
        return frozenset({"training of the encoder", part})

    def couples_samples(self) -> bool:
        return self.extracting

    def non_gradient_leakage(self) -> str | None:
        return "trains its extractor on private images first" if self._uses_extractor else None

    def stage(self) -> Stage | None:
        settings = {"epochs": self.epochs, "attributes": (), "keep": "last"}
        return Stage("private", settings) if self._uses_extractor else None

    def during_stage(self) -> Defense | None:
        return replace(self, extracting=True) if self._uses_extractor else None

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self._uses_extractor and target.cut and (extractor := _extractor(target)):
            extractor.requires_grad_(False)
            mark_frozen(extractor.modules())
        return target

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        if not self.epochs:
            return []
        if self.extracting:
            message = "its extractor is trained on people: leave target.attributes out"
            return [*([message] if target.attributes else []), *cut_problems(target)]
        if not target.cut:
            return ["needs to know where the network is cut: set target.cut"]
        if _extractor(target) is None:
            return [
                f"the layers before {target.cut} share weights with those after it, so they "
                "cannot be frozen alone: choose another layer or model"
            ]
        return []

    def modes(self, target: Target) -> None:
        if self._uses_extractor:
            for layer in frozen_layers(target.module):
                layer.eval()

    def taps(self, target: Target) -> tuple[str, ...]:
        return (target.cut,) if self.extracting else ()

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        return Readers(self, target, seed=seed) if self.extracting else None

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        return {"cut": target.cut} if self.epochs else {}


def _extractor(target: Target) -> nn.Module | None:
    """Return the network up to the cut; None if it shares weights with the rest."""
    parts = halves(target)
    rest = {id(weight) for weight in parts.rest.parameters()}
    shared = any(id(weight) in rest for weight in parts.encoder.parameters())
    return None if shared else parts.encoder
