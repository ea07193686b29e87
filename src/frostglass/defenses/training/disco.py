"""Disco: prune the channels of each image's released feature that a trained network selects."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape, Target
from frostglass.defenses.base import Batch, Opponent, Part, Term, TrainingSize, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._simulated import (
    Decode,
    DecoderDefense,
    SimulatedDecoder,
    build_reader,
    cut_problems,
)
from frostglass.defenses.training.mid import noise_of
from frostglass.models.base import noise_images, probe
from frostglass.models.cut import SQUARE, channel_axis
from frostglass.networks.decoder import pixel_distance
from frostglass.runtime.device import device_of
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import seeded

INNER, PRUNER = "inner", "pruner"


class RandomScores(nn.Module):
    """Scores (N, C) that are noise: a function of each feature, the same at every release."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis

    def forward(self, features: Tensor) -> Tensor:
        return noise_of(features.movedim(self.axis + 1, 1).flatten(2).amax(2).detach(), 0)


class Pruner(nn.Module):
    """Computes a mask (N, C) in (0, 1) for features: σ((s - s_k) / T).

    s are the scores of the channels, and s_k is the one at place k = ⌊ratio · C⌋.
    """

    def __init__(
        self,
        feature_shape: tuple[int, ...],
        *,
        ratio: float,
        width: int,
        temperature: float,
        image_shape: Shape = SQUARE,
        random: bool = False,
    ):
        super().__init__()
        self.axis = channel_axis(feature_shape, image_shape)
        channels = feature_shape[self.axis]
        self.pruned = int(ratio * channels)
        self.temperature = temperature
        self.scores: nn.Module = (
            RandomScores(self.axis)
            if random
            else build_reader(feature_shape, channels, width=width, image_shape=image_shape)
        )

    def forward(self, features: Tensor) -> Tensor:
        scores = self.scores(features)
        threshold = scores.sort(1).values[:, self.pruned, None]
        return torch.sigmoid((scores - threshold) / self.temperature)


class Pruned(nn.Module):
    """A layer whose output is multiplied by a pruner's mask.

    In training, the pruner does not shape the layer's output, and receives `share` of the
    gradient. In evaluation, gradients pass unchanged, so that they do not mislead an attacker.
    """

    def __init__(self, inner: nn.Module, pruner: Pruner, share: float):
        super().__init__()
        self.inner = inner
        self.pruner = pruner
        self.share = share

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.inner(inputs)
        if self.training:
            mask = scaled_gradient(self.pruner(features.detach()), self.share)
        else:
            mask = self.pruner(features)
        return masked(features, mask, self.pruner.axis)


def masked(features: Tensor, mask: Tensor, axis: int = 0) -> Tensor:
    """Multiply each channel of features (N, ...) by its value in the mask (N, C).

    `axis` is the channel axis of a single feature.
    """
    sizes = [1] * (features.ndim - 1)
    sizes[axis] = mask.shape[1]
    return features * mask.reshape(len(mask), *sizes)


def scaled_gradient(values: Tensor, share: float) -> Tensor:
    """Return the same values, through which only a share of the gradient passes."""
    # Adds zero, so that no digit changes.
    return values.detach() + share * (values - values.detach())


@defenses.register
@parameters
class Disco(DecoderDefense):
    """Dynamic channel pruning: a trained pruner keeps revealing channels of features on the device.

    Released: m · Enc(x), m = σ((s - s_k) / T) with the pruner's scores s of Enc(x) and their k-th
    smallest s_k, k = ⌊ratio · channels⌋. Encoder and the rest of the network minimise the loss of
    the task, the pruner (1 - α) · task - α · L_p, and a decoder, on public images,
    L_p = |Dec(m Enc(x)) - x|². All take turns.

    Use: features with many channels. In our two worlds 71 and 75 % were recognised, for 0.03 and
        0.12 of MCC. Audit it with the variant "channels" of `latent`, `hybrid` and `decoder`.
    Cost: some 4 times the time of an undefended training in faces/trained-protections.
    Paper: Singh et al., DISCO: Dynamic and Invariant Sensitive Channel Obfuscation for Deep Neural
        Networks, CVPR 2021, arXiv 2012.11025; as a baseline in Wang et al., Crafter, NDSS 2024.
    Differs: Crafter's code re-creates the tensor that should pass the decoder's gradient to the
        pruner, so that the pruner gets (1 - 2α) times the gradient of the task and none of the
        reconstruction's; here it is as meant. There the gradient of the task reaches the encoder
        through the scores too; here the pruner reads the feature and does not shape it. That code
        trains everything on public images, we only the decoder, and its L_p is the norm of the
        whole batch's difference, without a square (`reduction`). The pruner uses the optimiser of
        the task. The decoder sees features standardised in each channel over the batch, because an
        attacker would amplify what the mask attenuates: at a temperature of 1/30 hardly any
        channel is fully removed. With one channel left of 64 the mask multiplies it by ½. Only
        epochs of the second half may be selected.

    Args:
        ratio: share of the channels below the threshold, published 0.99; 0 inserts no pruner.
        alpha: α, published 0.4; 0 prunes for the task alone.
        temperature: T, published 1/30; smaller is harder.
        pruner_width: channels of the pruner's first stage; 128 is ResNet-18's.
        selection: "learned", or "random": each image loses channels at random, as many, which is
            the ablation of the pruner; it needs alpha = 0.
        reduction: of L_p: "mean" over squared pixels, or "crafter", the norm of the whole batch's
            difference.
        decoder_form: "mirrored", "adv_learn" or "crafter" (published); see `networks/decoder.py`.
        decoder_width: channels of the decoder's last stage; 64 is published.
        decoder_lr: Adam's step size for the decoder; published 3e-4.
        decoder_steps: decoder steps before each step of the network.
        head_start: additional steps of a new decoder.
        epoch_turn: before each epoch of the network, train the decoder until its loss settles, at
            most on as many images as are public.
        restart_every: epochs after which a new decoder begins; 0 keeps the first.
        fresh_share: steps of a fresh decoder that is trained on the finished network, as a share
            of those the opponent took; its error stands beside the opponent's in the target's
            `facts`, with a warning if the opponent's is a quarter larger. 0 compares nothing.
        public_batch: public images in a decoder step.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.99
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.4
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1 / 30
    pruner_width: Annotated[int, Field(ge=1)] = 128
    selection: Literal["learned", "random"] = "learned"

    title = "Disco"
    adaptive: ClassVar = ("channels", "adapt")
    disabled: ClassVar = {"ratio": 0.0, "alpha": 0.0}
    unkeyed: ClassVar = {"selection": "learned"}
    variants: ClassVar = {
        "crafter": (
            "the decoder, its loss and its steps as in Crafter's code, without that code's error",
            {
                "reduction": "crafter",
                "decoder_form": "crafter",
                "decoder_lr": 3e-4,
                "decoder_steps": 1,
                "head_start": 0,
            },
        )
    }

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"ratio": Real(0.3, 0.99), "alpha": Real(0.05, 0.95)}

    def __post_init__(self) -> None:
        if self.alpha and not self.ratio:
            raise ValueError(
                f"alpha {self.alpha} trains a pruner, and ratio 0 inserts none: "
                "give a ratio above 0, or alpha 0 too"
            )
        if self.alpha and self.selection == "random":
            raise ValueError(
                f'selection = "random" learns nothing, and alpha {self.alpha} trains a pruner: '
                "set alpha to 0"
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
                "disco prunes vectors, tokens or maps of at least 2 channels, and "
                f"{target.cut!r} returns {shape}: cut after another layer"
            )
        with seeded(seed, "disco", PRUNER):
            pruner = Pruner(
                shape,
                ratio=self.ratio,
                width=self.pruner_width,
                temperature=self.temperature,
                image_shape=target.image_shape,
                random=self.selection == "random",
            ).to(device_of(target.module))
        inner = target.module.get_submodule(target.cut)
        parent, _, name = target.cut.rpartition(".")
        setattr(target.module.get_submodule(parent), name, Pruned(inner, pruner, 1 - self.alpha))
        at_head = target.head == target.cut
        return replace(
            target,
            head=f"{target.cut}.{INNER}" if at_head else _moved(target.head, target.cut),
            taps=tuple(_moved(tap, target.cut) for tap in target.taps),
        )

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        if not self.ratio:
            return []
        if problems := cut_problems(target):
            return problems
        if f"{target.head}.".startswith(f"{target.cut}."):
            return [
                f"nothing comes after {target.cut}, so that the released features are the "
                "predictions and no server is needed: cut after an earlier layer"
            ]
        weights = list(self._pruner(target).parameters())
        if weights and not any(weight.requires_grad for weight in weights):
            return [
                "another defense froze its pruner: freeze fewer layers, or cut after a later one"
            ]
        return []

    def taps(self, target: Target) -> tuple[str, ...]:
        return (f"{target.cut}.{INNER}", f"{target.cut}.{PRUNER}") if self.alpha else ()

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        if not self.alpha:
            return None
        inner, pruner = self.taps(target)
        axis = self._pruner(target).axis

        def terms(batch: Batch, decode: Decode) -> dict[str, Term]:
            # The mask before its gradient is scaled: only the pruner is trained by the decoder.
            decoded = decode(masked(batch.tapped[inner].detach(), batch.tapped[pruner], axis))
            distance = pixel_distance(decoded, batch.images, self.norm)
            return {"reconstruction": Term(-self.alpha, distance)}

        return SimulatedDecoder(self, target, public, terms, seed=seed)

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        if not self.ratio:
            return {}
        return {"cut": target.cut, "below_threshold": self._pruner(target).pruned}

    def _pruner(self, target: Target) -> Pruner:
        pruner = target.module.get_submodule(f"{target.cut}.{PRUNER}")
        assert isinstance(pruner, Pruner)
        return pruner


def _moved(name: str, cut: str) -> str:
    """Return a layer's name after the layer at the cut was wrapped."""
    return f"{cut}.{INNER}.{name.removeprefix(cut + '.')}" if name.startswith(f"{cut}.") else name
