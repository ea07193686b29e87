"""Transfer learning as a defense: private pictures may change only the last layers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.base import Defense, Part, Size, Stage, defenses
from frostglass.defenses.training._heads import head_block
from frostglass.models.depth import groups, inside, leaves, weights_by_leaf
from frostglass.models.taps import check_layers
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for

PROBE_PICTURES, FISHER_PICTURES = 2000, 64  # to fit the linear probe, and to take gradients of it


@defenses.register
@parameters
class Transfer(Defense):
    """Transfer learning: the first layers come from public pictures and stay as they are, so only the last ones can remember private people.

    Stage 1 trains the whole network on public people (or takes `target.start`); stage 2 gives it a new head, freezes the layers before the
    boundary and trains the rest on private pictures. The boundary is the one knob.

    Paper: Ho et al., Model Inversion Robustness: Can Transfer Learning Help?, CVPR 2024, arXiv 2405.05588.
    Differs: the published code freezes up to and including the given index, leaves the stem of IR networks trainable by a slip (1,920
        weights) and gives the index 0 two meanings; here the boundary is named in one of the papers' own terms and the stem is frozen too.
        Running statistics of frozen batch norms go on absorbing private pictures in both published code bases (`frozen_norm = "update"`);
        "strict" stops that. `boundary = "fisher"` is an addition after the paper's analysis of layers.

    Args:
        pretrain: "public" trains on the public people first; "start" begins from `target.start`, or from random weights if there is none
            (published for ResNet-34).
        epochs: of the training on public people; as many as the target's by default.
        boundary: "ratio", "parameters", "layer" or "fisher"; "none" freezes nothing, which is plain fine-tuning.
        ratio: share of all leaf modules, in order of registration from the input, that is frozen (CALoR's convention; published 0.5 to 0.7).
        parameters: how many weights stay trainable, |θ_C| (the TL paper's convention, such as 13.9e6); the nearest boundary between two
            convolutions is taken.
        layer: the last frozen layer, by name.
        information: with "fisher", freeze as many first layers as leave at least this share of the Fisher information about private people
            in trainable ones. It is measured on 64 training pictures, through a linear probe on the network training begins from.
        frozen_norm: whether the statistics of frozen batch norms follow the private pictures ("update") or stay ("strict").
    """

    pretrain: Literal["public", "start"] = "public"
    epochs: Annotated[int, Field(ge=1)] | None = None
    boundary: Literal["ratio", "parameters", "layer", "fisher", "none"] = "ratio"
    ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    parameters: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    layer: str | None = None
    information: Annotated[float, Field(gt=0, lt=1)] = 0.9
    frozen_norm: Literal["update", "strict"] = "update"

    off = {"pretrain": "start", "boundary": "none"}  # noqa: RUF012

    def __post_init__(self) -> None:
        for name in ("parameters", "layer"):
            if (self.boundary == name) != (getattr(self, name) is not None):
                raise ValueError(
                    f'boundary = "{name}" and {name} go together: give both or neither, got boundary = "{self.boundary}"'
                )

    def replaces(self) -> frozenset[Part]:
        # Also with "start": another defense that trained on private pictures first would leave them in the layers frozen here.
        return (
            frozenset({"starting weights"})
            if self.pretrain == "public" or self.boundary != "none"
            else frozenset()
        )

    def non_gradient_leakage(self) -> str | None:
        return "chooses its boundary by private pictures" if self.boundary == "fisher" else None

    def stage(self) -> Stage | None:
        return (
            Stage("public", {"epochs": self.epochs} if self.epochs else {})
            if self.pretrain == "public"
            else None
        )

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self.boundary not in ("none", "fisher"):
            self._freeze(target, self._first_layers(target))
        return target

    def begin(self, target: Target, images: Images, *, seed: int) -> None:
        if self.boundary == "fisher":
            chain = groups(target.module, target.image_shape, head_block(target))
            self._freeze(
                target,
                _flat(
                    chain[: _boundary(fisher(target, images, chain, seed=seed), self.information)]
                ),
            )

    def modes(self, target: Target) -> None:
        if self.frozen_norm == "strict":
            for part in target.module.modules():
                if getattr(part, "frozen_layer", False) and isinstance(
                    part, nn.modules.batchnorm._BatchNorm
                ):
                    part.eval()

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        if self.boundary == "none":
            return {}
        still = [
            name for name in leaves(target.module) if _is_frozen(target.module.get_submodule(name))
        ]
        trainable, total = _counts(target.module)
        return {"last_frozen_layer": still[-1], "trainable": trainable, "frozen": total - trainable}

    def _first_layers(self, target: Target) -> list[str]:
        block = head_block(target)
        if self.boundary == "ratio":
            every = [
                *(name for name in leaves(target.module) if not inside(name, block)),
                block,
            ]  # a replaced head counts as one
            return every[: sum(place < self.ratio * len(every) for place in range(len(every)))]
        chain = groups(target.module, target.image_shape, block)
        if self.boundary == "parameters":
            return _flat(chain[: _nearest(target, chain, self.parameters or 0.0)])
        assert self.layer is not None
        check_layers(target.module, target.image_shape, taps=(self.layer,))
        if inside(block, self.layer) or inside(self.layer, block):
            return [block]  # which is refused
        run = _flat(chain)
        return run[: 1 + max(place for place, name in enumerate(run) if inside(name, self.layer))]

    def _freeze(self, target: Target, names: list[str]) -> None:
        block = head_block(target)
        chosen = _weights(target.module, names)
        knob = "information" if self.boundary == "fisher" else self.boundary
        asked = f'boundary = "{self.boundary}" with {knob} = {getattr(self, knob)}'
        if any(inside(name, block) or inside(block, name) for name in names):
            raise ConfigError(
                f"transfer: {asked} freezes everything, also the head {block!r}: move the boundary towards the input"
            )
        if not any(weight.requires_grad for weight in chosen):
            more = (
                "lower information"
                if self.boundary == "fisher"
                else "move the boundary towards the head"
            )
            raise ConfigError(
                f'transfer: {asked} freezes nothing: {more}, or set boundary = "none"'
            )
        for weight in chosen:
            weight.requires_grad_(False)
        for name in names:
            target.module.get_submodule(name).frozen_layer = True  # type: ignore[assignment]


def fisher(target: Target, images: Images, chain: list[tuple[str, ...]], *, seed: int) -> Tensor:
    """The empirical Fisher information about the private labels in each group's weights: E[(∂ ln p(y|x) / ∂θ)²], summed over the weights.

    The labels are read from the features by a ridge regression fitted in closed form, because the network's own head is still untrained.
    """
    device = device_of(target.module)
    order = torch.randperm(len(images), generator=generator_for(seed, "transfer", "fisher"))

    def features(index: Tensor) -> Tensor:
        with capture(target.module, (head_block(target),), inputs=True) as seen:
            target.module(images.floats(index).to(device))
        return next(iter(seen.values())).flatten(1)

    with frozen(target.module):
        with torch.no_grad():
            known = torch.cat([features(index) for index in order[:PROBE_PICTURES].split(100)])
        centre = known.mean(0)
        answers = F.one_hot(images.labels[order[:PROBE_PICTURES]], len(target.classes)).to(known)
        probe = ridge_probe(known - centre, answers - answers.mean(0))
        weights = [_weights(target.module, group) for group in chain]
        for weight in _flat(weights):
            weight.requires_grad_()
        total = torch.zeros(len(chain))
        for row in order[:FISHER_PICTURES]:
            score = ((features(row[None]) - centre) @ probe).log_softmax(1)[0, images.labels[row]]
            slopes = iter(torch.autograd.grad(score, _flat(weights), allow_unused=True))
            total += torch.stack(
                [
                    sum(
                        (g.square().sum().cpu() for _ in group if (g := next(slopes)) is not None),
                        torch.zeros(()),
                    )
                    for group in weights
                ]
            )
    return total / min(FISHER_PICTURES, len(images))


def ridge_probe(features: Tensor, answers: Tensor) -> Tensor:
    """The linear map from centred features (n, d) to centred answers of least squared error, with a ridge of a thousandth of the mean variance."""
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
    """How many first groups can be frozen while the rest holds at least this share of the whole."""
    left = information.sum() - torch.cat([torch.zeros(1), information.cumsum(0)])
    return int((left >= share * information.sum()).nonzero().max())


def _nearest(target: Target, chain: list[tuple[str, ...]], wanted: float) -> int:
    """After how many groups the number of trainable weights is nearest to the wanted one."""
    fixed = accumulate(
        (
            sum(w.numel() for w in _weights(target.module, group) if w.requires_grad)
            for group in chain
        ),
        initial=0,
    )
    left = [_counts(target.module)[0] - gone for gone in fixed]
    if wanted < left[-1]:
        raise ConfigError(
            f"transfer: parameters = {wanted:,.0f} freezes everything: {left[-1]:,} weights are behind the last layer that can be frozen; give as many or more"
        )
    return min(range(len(left)), key=lambda place: abs(left[place] - wanted))


def _weights(module: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    owned = weights_by_leaf(module)
    return [weight for name in names for weight in owned.get(name, [])]


def _counts(module: nn.Module) -> tuple[int, int]:
    """Trainable weights and all weights."""
    sizes = [(weight.requires_grad, weight.numel()) for weight in module.parameters()]
    return sum(size for learns, size in sizes if learns), sum(size for _, size in sizes)


def _is_frozen(part: nn.Module) -> bool:
    own = list(part.parameters(recurse=False))
    return bool(own) and not any(weight.requires_grad for weight in own)


def _flat(lists: Any) -> list[Any]:
    return [item for one in lists for item in one]
