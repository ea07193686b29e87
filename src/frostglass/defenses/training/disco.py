"""Disco: channels of the released feature are pruned, picture by picture, by a network that has learned which of them betray it."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import (
    Batch,
    Defense,
    Opponent,
    Part,
    Size,
    Term,
    TrainingProgress,
    defenses,
)
from frostglass.defenses.training._simulated import (
    Rebuild,
    SimulatedDecoder,
    build_reader,
    cut_problems,
)
from frostglass.models.base import noise_images, probe
from frostglass.models.cut import SQUARE, channel_axis
from frostglass.networks.decoder import DecoderForm, DecoderGame, DecoderNorm, pixel_distance
from frostglass.runtime.device import device_of
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import seeded

INNER, PRUNER = "inner", "pruner"


class Pruner(nn.Module):
    """A mask (N, C) in (0, 1) for features: σ((s - s_k) / T), s the scores of their channels and s_k the one at place k = ⌊ratio · C⌋."""

    def __init__(
        self,
        feature_shape: tuple[int, ...],
        *,
        ratio: float,
        width: int,
        temperature: float,
        image_shape: Shape = SQUARE,
    ):
        super().__init__()
        self.axis = channel_axis(feature_shape, image_shape)
        channels = feature_shape[self.axis]
        self.pruned = int(ratio * channels)
        self.temperature = temperature
        self.scores = build_reader(feature_shape, channels, width=width, image_shape=image_shape)

    def forward(self, features: Tensor) -> Tensor:
        scores = self.scores(features)
        threshold = scores.sort(1).values[:, self.pruned, None]
        return torch.sigmoid((scores - threshold) / self.temperature)


class Pruned(nn.Module):
    """A layer whose output is multiplied by a pruner's mask.

    While it learns, the pruner reads the layer's output without shaping it, and feels `share` of what comes back; afterwards gradients pass
    as they are, or an attacker who follows them would be led astray.
    """

    def __init__(self, inner: nn.Module, pruner: Pruner, share: float):
        super().__init__()
        self.inner = inner
        self.pruner = pruner
        self.share = share

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.inner(inputs)
        if not self.training:
            return masked(features, self.pruner(features), self.pruner.axis)
        return masked(
            features, scaled_gradient(self.pruner(features.detach()), self.share), self.pruner.axis
        )


def masked(features: Tensor, mask: Tensor, axis: int = 0) -> Tensor:
    """Features (N, ...) with each channel multiplied by its number in the mask (N, C); `axis` of a feature counts the channels."""
    sizes = [1] * (features.ndim - 1)
    sizes[axis] = mask.shape[1]
    return features * mask.reshape(len(mask), *sizes)


def scaled_gradient(values: Tensor, share: float) -> Tensor:
    """The very same values, through which only a share of the gradient passes."""
    return values.detach() + share * (
        values - values.detach()
    )  # adds zero, so that no digit changes


@defenses.register
@parameters
class Disco(Defense):
    """Dynamic channel pruning: of each picture's feature only the channels leave the device that a trained pruner does not find telling.

    Released: m · Enc(x), m = σ((s - s_k) / T) with the pruner's scores s of Enc(x) and their k-th smallest s_k, k = ⌊ratio · channels⌋.
    Encoder and the rest of the network minimise the task's loss, the pruner (1 - α) · task - α · L_p, and a decoder, on public pictures,
    L_p = |Dec(m Enc(x)) - x|². All take turns.

    Paper: Singh et al., DISCO: Dynamic and Invariant Sensitive Channel Obfuscation for Deep Neural Networks, CVPR 2021, arXiv 2012.11025;
        as a baseline in Wang et al., Crafter, NDSS 2024.
    Differs: Crafter's code re-creates the tensor through which the pruner should feel the decoder, so that it gets (1 - 2α) times the
        task's gradient and none of the reconstruction's; here it is as meant. There the task's gradient reaches the encoder through the
        scores too; here the pruner reads the feature and does not shape it. The code trains everything on public pictures, we only the
        decoder, and its L_p is the length of the whole batch's difference, without a square (`reduction`). The task's optimiser is the
        pruner's too. The decoder sees features standardised in each channel over the batch, because an attacker would amplify what the mask
        makes faint: at a temperature of 1/30 hardly a channel is quite gone. With one channel left of 64 the mask multiplies it by ½. Only
        epochs of the second half may be selected.

    Args:
        ratio: share of the channels below the threshold, published 0.99; 0 puts in no pruner at all.
        alpha: α, published 0.4; 0 prunes for the task alone.
        temperature: T, published 1/30; smaller is harder.
        pruner_width: channels of the pruner's first stage; 128 is ResNet-18's.
        reduction: of L_p: "mean" over pixels squared, or "crafter", the length of the whole batch's difference.
        decoder_form: "mirrored", "adv_learn" or "crafter" (published); see `priors/decoder.py`.
        decoder_width: channels of the decoder's last stage; 64 is published.
        decoder_lr: Adam's step size for the decoder; published 3e-4.
        decoder_steps: decoder steps before each step of the network.
        head_start: decoder steps more when the decoder is new.
        restart_every: epochs after which a new decoder begins; 0 keeps the first.
        public_batch: public pictures in a decoder step.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.99
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.4
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1 / 30
    pruner_width: Annotated[int, Field(ge=1)] = 128
    reduction: Literal["mean", "crafter"] = "mean"
    decoder_form: DecoderForm = "mirrored"
    decoder_width: Annotated[int, Field(ge=1)] = 64
    decoder_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    decoder_steps: Annotated[int, Field(ge=1)] = 2
    head_start: Annotated[int, Field(ge=0)] = 50
    restart_every: Annotated[int, Field(ge=0)] = 0
    public_batch: Annotated[int, Field(ge=2)] = 64

    off = {"ratio": 0.0, "alpha": 0.0}  # noqa: RUF012
    takes_attributes = True
    variants = {  # noqa: RUF012
        "crafter": (
            "the decoder, its loss and its steps as in Crafter's code, without that code's error",
            {
                "reduction": "crafter",
                "decoder_form": "crafter",
                "decoder_lr": 3e-4,
                "decoder_steps": 1,
                "head_start": 0,
            },
        ),
    }

    def __post_init__(self) -> None:
        if self.alpha and not self.ratio:
            raise ValueError(
                f"alpha {self.alpha} is felt by a pruner, and ratio 0 puts in none: give a ratio above 0, or alpha 0 too"
            )

    def replaces(self) -> frozenset[Part]:
        return frozenset({"training of the encoder"}) if self.ratio else frozenset()

    def couples_samples(self) -> bool:
        return self.alpha > 0

    def prepare(self, target: Target, *, seed: int) -> Target:
        if not self.ratio or not target.cut:
            return target
        with capture(target.module, (target.cut,)) as seen:
            probe(target.module, noise_images(target.module, target.image_shape, 2))
        shape = tuple(seen[target.cut].shape[1:])
        if len(shape) > 3 or shape[channel_axis(shape, target.image_shape)] < 2:
            raise ConfigError(
                f"disco prunes channels of vectors, tokens or maps, of which there must be two, and {target.cut!r} puts out {shape}: cut behind another layer"
            )
        with seeded(seed, "disco", PRUNER):
            pruner = Pruner(
                shape,
                ratio=self.ratio,
                width=self.pruner_width,
                temperature=self.temperature,
                image_shape=target.image_shape,
            )
        inner = target.module.get_submodule(target.cut)
        parent, _, name = target.cut.rpartition(".")
        setattr(
            target.module.get_submodule(parent),
            name,
            Pruned(inner, pruner.to(device_of(target.module)), 1 - self.alpha),
        )
        head = (
            f"{target.cut}.{INNER}"
            if target.head == target.cut
            else _moved(target.head, target.cut)
        )
        return replace(
            target, head=head, taps=tuple(_moved(tap, target.cut) for tap in target.taps)
        )

    def problems(self, target: Target, size: Size) -> list[str]:
        if not self.ratio:
            return []
        if found := cut_problems(target):
            return found
        if f"{target.head}.".startswith(f"{target.cut}."):
            return [
                f"nothing comes after {target.cut}, so that what leaves are the answers, and no server is needed: cut behind an earlier layer"
            ]
        learns = any(weight.requires_grad for weight in self._pruner(target).parameters())
        return (
            []
            if learns
            else [
                "another defense froze its pruner: freeze fewer layers, or cut behind a later one"
            ]
        )

    def taps(self, target: Target) -> tuple[str, ...]:
        return (f"{target.cut}.{INNER}", f"{target.cut}.{PRUNER}") if self.alpha else ()

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        if not self.alpha:
            return None
        norm: DecoderNorm = "mean_square" if self.reduction == "mean" else "batch_norm"
        inner, pruner = self.taps(target)
        axis = self._pruner(target).axis

        def new_game(feature_shape: tuple[int, ...]) -> DecoderGame:
            return DecoderGame(
                feature_shape, target.image_shape, width=self.decoder_width, form=self.decoder_form, lr=self.decoder_lr, norm=norm,
                device=device_of(target.module),
            )  # fmt: skip

        def felt(batch: Batch, rebuild: Rebuild) -> dict[str, Term]:
            # By the mask alone, and before its gradient is scaled: only the pruner feels the decoder.
            made = rebuild(masked(batch.tapped[inner].detach(), batch.tapped[pruner], axis))
            return {"reconstruction": Term(-self.alpha, pixel_distance(made, batch.images, norm))}

        return SimulatedDecoder(
            target, public, new_game, felt, steps=self.decoder_steps, batch=self.public_batch, head_start=self.head_start,
            restart_every=self.restart_every, seed=seed,
        )  # fmt: skip

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        return not self.alpha or 2 * (progress.epoch + 1) > progress.epochs

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        if not self.ratio:
            return {}
        return {"cut": target.cut, "below_threshold": self._pruner(target).pruned}

    def _pruner(self, target: Target) -> Pruner:
        pruner = target.module.get_submodule(f"{target.cut}.{PRUNER}")
        assert isinstance(pruner, Pruner)
        return pruner


def _moved(name: str, cut: str) -> str:
    """The name of a layer now that the one it may be part of stands inside another."""
    return f"{cut}.{INNER}.{name.removeprefix(cut + '.')}" if name.startswith(f"{cut}.") else name
