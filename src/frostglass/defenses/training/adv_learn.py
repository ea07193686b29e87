"""AdvLearn: features trained against a decoder that reconstructs images from them."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.base import (
    Batch,
    Opponent,
    Part,
    Stage,
    Term,
    TrainingSize,
    defenses,
    task_loss,
)
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._simulated import (
    Decode,
    DecoderDefense,
    SimulatedDecoder,
    cut_problems,
)
from frostglass.networks.decoder import pixel_distance
from frostglass.networks.perceptual import perceptual_distance

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@defenses.register
@parameters
class AdvLearn(DecoderDefense):
    """Adversarial reconstruction learning: train features from which a decoder reconstructs badly.

    Network: min L_u - λ1 L_p - λ2 L_perc on private images x, with the decoder Dec fixed; L_u is
    the loss of the task, L_p = |Dec(Enc(x)) - x|² and L_perc the same in the layers of another
    network. Decoder: min L_p + μ1 L_adv + μ2 L_perc on public images, with the network fixed, and
    against a critic D if μ1 > 0. Both take turns. The decoder is discarded afterwards: an audit
    trains new ones. A network that withstands this decoder need not withstand a stronger one.

    Use: features that leave a device, where the network may be trained; a baseline. Audit it with
        `hybrid` and, at deep cuts, `latent`, and look at the images: dark faces vanished first.
    Cost: a decoder is trained beside the network, and a fresh one after it: some 7 times the time
        of an undefended training with the variant "converging" in faces/trained-protections.
    Paper: Xiao, Tsai, Sohn, Chandraker, Yang, Adversarial Learning of Privacy-Preserving and
        Task-Oriented Representations, AAAI 2020, arXiv 1911.10143.
    Differs: equations 7 and 8 average over private images for both networks; figure and text train
        the decoder on public ones, as we do. Equation 3 swaps the labels of real and reconstructed
        images; here the critic maximises ln D(x) + ln(1 - D(x̂)), and the decoder minimises
        -ln D(x̂). The paper does not say whether |·|² sums or averages over pixels, nor how the
        networks are optimised; the mean, Adam and the numbers of steps are ours. Its images are in
        [-1, 1], ours in [0, 1]: the same L_p is 4 times smaller. Its L_perc uses an ImageNet VGG,
        in that network's units; ours uses any network you name, in units of each layer's mean
        square. The decoder sees features standardised in each channel over the batch: L_p is
        bounded, because the decoder's images are, but the network could still win by scaling its
        features, which any attacker undoes. Batch statistics prevent that, and make the loss
        depend on several samples together. Fixed networks are in evaluation mode. Only epochs of
        the second half may be selected: before, the decoder has learned little. The decoder of
        the plain game can end behind a fresh one (`facts`, `fresh_share`): `pretrain`, `epoch_turn`
        and the variant "converging" are additions for that. Crafter's code has
        another form, the variant "crafter"; it begins from a plain training (target.start) and
        normalises its images beyond the range of its decoder.

    Args:
        pixel: λ1, published 1 for images in [-1, 1], which is 4 here.
        perceptual: λ2, published 1 to 10; above 0 it needs a perceptual network.
        weighting: "sum" as above; "share" for (1 - λ1) L_u - λ1 L_p, as in Crafter's code, with λ1
            below 1.
        reduction: "mean" over pixels; "crafter": the norm of the whole batch's difference, without
            a square, divided by the pixels of an image for the network and undivided for the
            decoder.
        decoder_form: "mirrored", "adv_learn" (published, needs wide layers) or "crafter"; see
            `networks/decoder.py`.
        decoder_width: channels of the decoder's last stage; 64 is published.
        decoder_lr: Adam's step size for decoder and critic.
        decoder_steps: decoder steps before each step of the network.
        decoder_adversarial: μ1, the weight of the critic's term; above 0 is published, without the
            value.
        decoder_perceptual: μ2, published 0 and 1; above 0 it needs a perceptual network.
        head_start: additional steps of a new decoder, so that the network never trains against
            noise.
        epoch_turn: before each epoch of the network, train the decoder until its loss settles, at
            most on as many images as are public.
        restart_every: epochs after which a new decoder begins; 0 keeps the first.
        fresh_share: steps of a fresh decoder that is trained on the finished network, as a share
            of those the opponent took; its error stands beside the opponent's in the target's
            `facts`, with a warning if the opponent's is a quarter larger. 0 compares nothing.
        pretrain: epochs of a plain training on the private images to begin from; 0 begins from
            target.start, or from random weights.
        public_batch: public images in a decoder step.
    """

    pixel: Weight = 1.0
    perceptual: Weight = 0.0
    weighting: Literal["sum", "share"] = "sum"
    decoder_adversarial: Weight = 0.0
    decoder_perceptual: Weight = 0.0
    pretrain: Annotated[int, Field(ge=0)] = 0

    title = "AdvLearn"
    adaptive: ClassVar = ("adapt",)
    disabled: ClassVar = {"pixel": 0.0, "perceptual": 0.0}
    variants: ClassVar = {
        "published": (
            "the paper's weight and decoder, one step each",
            {"pixel": 4.0, "decoder_form": "adv_learn", "decoder_steps": 1, "head_start": 0},
        ),
        "converging": (
            "a game that comes nearer to its end: a trained network, a decoder that keeps up",
            {
                "pretrain": 12,
                "epoch_turn": True,
                "decoder_lr": 2e-3,
                "decoder_steps": 4,
                "restart_every": 8,
            },
        ),
        "crafter": (
            "the form in Crafter's code, at the weight of its figures",
            {
                "pixel": 0.5,
                "weighting": "share",
                "reduction": "crafter",
                "decoder_form": "crafter",
                "decoder_steps": 1,
                "head_start": 0,
                "public_batch": 32,
            },
        ),
    }

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"pixel": Real(0.5, 500, log=True)}

    def __post_init__(self) -> None:
        if self.weighting == "share" and self.pixel >= 1:
            raise ValueError(
                'weighting = "share" gives the task the weight 1 - pixel: '
                f"set pixel below 1, got {self.pixel}"
            )

    @property
    def active(self) -> bool:
        return self.pixel > 0 or self.perceptual > 0

    @property
    def needs(self) -> frozenset[Asset]:
        compares = self.active and (self.perceptual or self.decoder_perceptual)
        return frozenset({"perceptual"}) if compares else frozenset()

    def replaces(self) -> frozenset[Part]:
        parts: dict[Part, bool] = {
            "training of the encoder": True,
            "classification loss": self.weighting == "share",
            "starting weights": bool(self.pretrain),
        }
        return frozenset(part for part, replaced in parts.items() if self.active and replaced)

    def non_gradient_leakage(self) -> str | None:
        return "trains on private images first" if self.stage() else None

    def stage(self) -> Stage | None:
        begins = self.active and self.pretrain
        return Stage("private", {"epochs": self.pretrain}) if begins else None

    def brief(self) -> Self:
        return replace(super().brief(), pretrain=min(self.pretrain, 1))

    def couples_samples(self) -> bool:
        return self.active

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        return cut_problems(target) if self.active else []

    def taps(self, target: Target) -> tuple[str, ...]:
        return (target.cut,) if self.active else ()

    def losses(self, batch: Batch) -> dict[str, Term]:
        if "classification loss" not in self.replaces():
            return {}
        return {"cross_entropy": Term(1 - self.pixel, task_loss(batch.logits, batch.labels))}

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        if not self.active:
            return None
        if self.needs and perceptual is None:
            raise ConfigError(
                "adv_learn compares images by a perceptual network, got none: "
                "pass perceptual=..., or set its weights to 0"
            )
        network = _fixed_copy(perceptual) if self.needs and perceptual else None

        def terms(batch: Batch, decode: Decode) -> dict[str, Term]:
            decoded = decode(batch.tapped[target.cut])
            terms = {}
            if self.pixel:
                terms["reconstruction"] = Term(-self.pixel, self._distance(decoded, batch.images))
            if self.perceptual and network:
                distance = perceptual_distance(network, decoded, batch.images).mean()
                terms["perceptual"] = Term(-self.perceptual, distance)
            return terms

        return SimulatedDecoder(
            self,
            target,
            public,
            terms,
            seed=seed,
            adversarial=self.decoder_adversarial,
            perceptual_weight=self.decoder_perceptual,
            perceptual=network,
        )

    def _distance(self, decoded: Tensor, images: Tensor) -> Tensor:
        distance = pixel_distance(decoded, images, self.norm)
        return distance if self.reduction == "mean" else distance / images[0, 0].numel()

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        return {"cut": target.cut} if self.active else {}


def _fixed_copy(network: Target) -> Target:
    """Return a copy in evaluation mode without gradients; the caller's network stays unchanged."""
    return replace(network, module=copy.deepcopy(network.module).eval().requires_grad_(False))
