"""Transfer learning as a defense: private images change only the last layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.base import Defense, Part, Stage, TrainingSize, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._freezing import frozen_layers, mark_frozen
from frostglass.defenses.training._heads import head_block
from frostglass.models.depth import groups, inside, leaves, weights_by_leaf
from frostglass.models.taps import check_layers
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for

PROBE_IMAGES, FISHER_IMAGES = 2000, 64  # to fit the linear probe, and to take its gradients


@defenses.register
@parameters
class Transfer(Defense):
    """Transfer learning: frozen first layers come from public images, so only the last memorise.

    Stage 1 trains the whole network on public people (or takes `target.start`); stage 2 gives it a
    new head, freezes the layers before the boundary and trains the rest on private images. The
    boundary is the only parameter of its strength.

    Use: public images of another domain are at hand. In our trials frozen layers that know faces
        hid nobody, and layers from patterns left 29 % under one attack, for 8.5 points of accuracy.
    Cost: an epoch takes 0.64 times as long with half of the modules frozen (a small `cnn`); the
        first stage comes on top.
    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help?, CVPR 2024,
        arXiv 2405.05588.
    Differs: the published code freezes up to and including the given index, leaves the stem of IR
        networks trainable by mistake (1,920 weights) and gives the index 0 two meanings; here the
        boundary is named in one of the papers' own terms and the stem is frozen too. Running
        statistics of frozen batch norms still follow private images in both published code bases
        (`frozen_norm = "update"`); "strict" stops that. `boundary = "fisher"` is an addition after
        the paper's analysis of layers.

    Args:
        pretrain: "public" trains on the public people first; "start" begins from `target.start`,
            or from random weights if there is none (published for ResNet-34).
        epochs: of the training on public people; as many as the target's by default.
        boundary: "ratio", "parameters", "layer" or "fisher"; "none" freezes nothing, which is
            plain fine-tuning.
        ratio: share of all leaf modules, in order of registration from the input, that is frozen
            (CALoR's convention; published 0.5 to 0.7).
        parameters: how many weights stay trainable, |θ_C| (the TL paper's convention, such as
            13.9e6); the nearest boundary between two convolutions is taken.
        layer: the last frozen layer, by name.
        information: with "fisher", freeze as many first layers as leave at least this share of the
            Fisher information about private people in trainable ones. It is measured on 64
            training images, through a linear probe on the network training begins from.
        frozen_norm: whether the statistics of frozen batch norms follow the private images
            ("update") or stay ("strict").
    """

    pretrain: Literal["public", "start"] = "public"
    epochs: Annotated[int, Field(ge=1)] | None = None
    boundary: Literal["ratio", "parameters", "layer", "fisher", "none"] = "ratio"
    ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    parameters: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    layer: str | None = None
    information: Annotated[float, Field(gt=0, lt=1)] = 0.9
    frozen_norm: Literal["update", "strict"] = "update"

    title = "TL"
    disabled: ClassVar = {"pretrain": "start", "boundary": "none"}

    def __post_init__(self) -> None:
        for name, value in (("parameters", self.parameters), ("layer", self.layer)):
            if (self.boundary == name) != (value is not None):
                raise ValueError(
                    f'boundary = "{name}" and {name} go together: give both or neither, '
                    f'got boundary = "{self.boundary}"'
                )

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"ratio": Real(0.2, 0.9)}

    def brief(self) -> Self:
        # Without content there is no Fisher information: training all layers bounds the memory.
        boundary = "none" if self.boundary == "fisher" else self.boundary
        return replace(self, epochs=1, boundary=boundary)

    def replaces(self) -> frozenset[Part]:
        # Also with "start": another defense's first stage on private images would be frozen in.
        inactive = self.pretrain == "start" and self.boundary == "none"
        return frozenset() if inactive else frozenset({"starting weights"})

    def non_gradient_leakage(self) -> str | None:
        return "chooses its boundary by private images" if self.boundary == "fisher" else None

    def stage(self) -> Stage | None:
        if self.pretrain == "start":
            return None
        return Stage("public", {"epochs": self.epochs} if self.epochs else {})

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self.boundary not in ("none", "fisher"):
            self._freeze(target, self._first_layers(target))
        return target

    def begin(self, target: Target, images: Images, *, seed: int) -> None:
        if self.boundary == "fisher":
            blocks = groups(target.module, target.image_shape, head_block(target))
            information = fisher(target, images, blocks, seed=seed)
            self._freeze(target, _flat(blocks[: _boundary(information, self.information)]))

    def modes(self, target: Target) -> None:
        if self.frozen_norm == "strict":
            for layer in frozen_layers(target.module):
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        if self.boundary == "none":
            return {}
        names = [n for n in leaves(target.module) if _is_frozen(target.module.get_submodule(n))]
        trainable, total = _counts(target.module)
        return {"last_frozen_layer": names[-1], "trainable": trainable, "frozen": total - trainable}

    def _first_layers(self, target: Target) -> list[str]:
        """Return the names of the layers before the boundary."""
        head = head_block(target)
        if self.boundary == "ratio":
            names = [name for name in leaves(target.module) if not inside(name, head)]
            names.append(head)  # a replaced head counts as one layer
            return names[: sum(place < self.ratio * len(names) for place in range(len(names)))]
        blocks = groups(target.module, target.image_shape, head)
        if self.boundary == "parameters":
            return _flat(blocks[: _nearest(target, blocks, self.parameters or 0.0)])
        assert self.layer is not None
        check_layers(target.module, target.image_shape, taps=(self.layer,))
        if inside(head, self.layer) or inside(self.layer, head):
            return [head]  # refused by _freeze
        names = _flat(blocks)
        last = max(place for place, name in enumerate(names) if inside(name, self.layer))
        return names[: last + 1]

    def _freeze(self, target: Target, names: list[str]) -> None:
        head = head_block(target)
        weights = _weights(target.module, names)
        values = {
            "ratio": self.ratio,
            "parameters": self.parameters,
            "layer": self.layer,
            "fisher": self.information,
        }
        knob = "information" if self.boundary == "fisher" else self.boundary
        setting = f'boundary = "{self.boundary}" with {knob} = {values[self.boundary]}'
        if any(inside(name, head) or inside(head, name) for name in names):
            raise ConfigError(
                f"transfer: {setting} freezes everything, also the head {head!r}: "
                "move the boundary towards the input"
            )
        if not any(weight.requires_grad for weight in weights):
            remedy = (
                "lower information"
                if self.boundary == "fisher"
                else "move the boundary towards the head"
            )
            raise ConfigError(
                f'transfer: {setting} freezes nothing: {remedy}, or set boundary = "none"'
            )
        for weight in weights:
            weight.requires_grad_(False)
        mark_frozen(target.module.get_submodule(name) for name in names)


def fisher(target: Target, images: Images, blocks: list[tuple[str, ...]], *, seed: int) -> Tensor:
    """Return the empirical Fisher information about private labels in the weights of each block.

    It is E[(∂ ln p(y|x) / ∂θ)²], summed over the weights. Labels are predicted from the features
    by a ridge regression in closed form, because the network's own head is still untrained.
    """
    device = device_of(target.module)
    order = torch.randperm(len(images), generator=generator_for(seed, "transfer", "fisher"))

    def features(index: Tensor) -> Tensor:
        with capture(target.module, (head_block(target),), inputs=True) as seen:
            target.module(images.floats(index).to(device))
        return next(iter(seen.values())).flatten(1)

    with frozen(target.module):
        with torch.no_grad():
            known = torch.cat([features(index) for index in order[:PROBE_IMAGES].split(100)])
        centre = known.mean(0)
        answers = F.one_hot(images.labels[order[:PROBE_IMAGES]], len(target.classes)).to(known)
        probe = ridge_probe(known - centre, answers - answers.mean(0))
        weights = [_weights(target.module, block) for block in blocks]
        for weight in _flat(weights):
            weight.requires_grad_()
        total = torch.zeros(len(blocks))
        for row in order[:FISHER_IMAGES]:
            score = ((features(row[None]) - centre) @ probe).log_softmax(1)[0, images.labels[row]]
            slopes = iter(torch.autograd.grad(score, _flat(weights), allow_unused=True))
            total += torch.stack([_squares(next(slopes) for _ in block) for block in weights])
    return total / min(FISHER_IMAGES, len(images))


def _squares(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return the sum of squares of a block's gradients; unused weights have none."""
    return sum((g.square().sum().cpu() for g in gradients if g is not None), torch.zeros(()))


def ridge_probe(features: Tensor, answers: Tensor) -> Tensor:
    """Return the linear map from centred features (n, d) to centred answers by ridge regression.

    The ridge is a thousandth of the mean variance.
    """
    count, width = features.shape
    ridge = 1e-3 * features.square().sum() / count / width
    if width <= count:
        return torch.linalg.solve(
            features.T @ features / count + ridge * torch.eye(width).to(features),
            features.T @ answers / count,
        )
    # The same map through the smaller matrix.
    return features.T @ torch.linalg.solve(
        features @ features.T / count + ridge * torch.eye(count).to(features), answers / count
    )


def _boundary(information: Tensor, share: float) -> int:
    """Return how many first blocks can be frozen with at least this share left in the others."""
    left = information.sum() - torch.cat([torch.zeros(1), information.cumsum(0)])
    return int((left >= share * information.sum()).nonzero().max())


def _nearest(target: Target, blocks: list[tuple[str, ...]], wanted: float) -> int:
    """Return after how many blocks the number of trainable weights is nearest to `wanted`."""
    sizes = (
        sum(w.numel() for w in _weights(target.module, block) if w.requires_grad)
        for block in blocks
    )
    left = [_counts(target.module)[0] - frozen for frozen in accumulate(sizes, initial=0)]
    if wanted < left[-1]:
        raise ConfigError(
            f"transfer: parameters = {wanted:,.0f} freezes everything: {left[-1]:,} weights come "
            "after the last layer that can be frozen; give as many or more"
        )
    return min(range(len(left)), key=lambda place: abs(left[place] - wanted))


def _weights(module: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    owned = weights_by_leaf(module)
    return [weight for name in names for weight in owned.get(name, [])]


def _counts(module: nn.Module) -> tuple[int, int]:
    """Count trainable weights and all weights."""
    sizes = [(weight.requires_grad, weight.numel()) for weight in module.parameters()]
    return sum(size for learns, size in sizes if learns), sum(size for _, size in sizes)


def _is_frozen(part: nn.Module) -> bool:
    own = list(part.parameters(recurse=False))
    return bool(own) and not any(weight.requires_grad for weight in own)


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))
