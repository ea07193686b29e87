"""AdvLearn: features learned against a decoder that rebuilds pictures from them."""

import copy
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from frostglass.core.assets import Asset
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.base import (
    Batch,
    Defense,
    Opponent,
    Part,
    Size,
    Term,
    TrainingProgress,
    defenses,
    task_loss,
)
from frostglass.defenses.training._simulated import Rebuild, SimulatedDecoder, cut_problems
from frostglass.networks.decoder import DecoderForm, DecoderGame, pixel_distance
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.device import device_of

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@defenses.register
@parameters
class AdvLearn(Defense):
    """Adversarial reconstruction learning: features are trained so that a decoder, trained beside them, rebuilds pictures badly.

    Network: min L_u - λ1 L_p - λ2 L_perc on private pictures x, decoder Dec fixed; L_u is the task's loss, L_p = |Dec(Enc(x)) - x|² and
    L_perc the same in the layers of another network. Decoder: min L_p + μ1 L_adv + μ2 L_perc on public pictures, network fixed, and against
    a critic D where μ1 > 0. Both take turns. Afterwards the decoder is thrown away: an audit trains fresh ones. A network that hides from
    this decoder need not hide from a stronger one.

    Paper: Xiao, Tsai, Sohn, Chandraker, Yang, Adversarial Learning of Privacy-Preserving and Task-Oriented Representations, AAAI 2020,
        arXiv 1911.10143.
    Differs: equations 7 and 8 average over private pictures for both; figure and text train the decoder on public ones, and so do we.
        Equation 3 has the labels of real and rebuilt swapped; here the critic maximises ln D(x) + ln(1 - D(x̂)), and the decoder minimises
        -ln D(x̂). The paper does not say whether |·|² sums or averages over pixels, nor how anything is optimised; the mean, Adam and the
        numbers of steps are ours. Its pictures are in [-1, 1], ours in [0, 1]: the same L_p is 4 times smaller. Its L_perc is by an
        ImageNet VGG, in that network's units; ours is by any network you name, in units of each layer's mean square. The decoder sees
        features standardised in each channel over the batch: L_p is bounded, for its pictures are, but a network could still win by mere
        scale, which any attacker undoes; statistics of the batch leave it nothing to win there, and so the loss looks at several samples
        together. Networks that stand still are in evaluation mode. Only epochs of the second half may be selected: before, the network has
        met a decoder that knows little. Crafter's code has another form of it, the variant "crafter"; it begins from a plain training
        (target.start) and normalises its pictures beyond what its decoder can make.

    Args:
        pixel: λ1, published 1 for pictures in [-1, 1], which is 4 here.
        perceptual: λ2, published 1 to 10; above 0 it needs a perceptual network.
        weighting: "sum" as above; "share" for (1 - λ1) L_u - λ1 L_p, as in Crafter's code, with λ1 below 1.
        reduction: "mean" over pixels; "crafter": the length of the whole batch's difference, without a square, divided by the pixels of a
            picture for the network and undivided for the decoder.
        decoder_form: "mirrored", "adv_learn" (published, needs wide layers) or "crafter"; see `priors/decoder.py`.
        decoder_width: channels of the decoder's last stage; 64 is published.
        decoder_lr: Adam's step size for decoder and critic.
        decoder_steps: decoder steps before each step of the network.
        decoder_adversarial: μ1, the weight of the critic's opinion; above 0 is published, without the value.
        decoder_perceptual: μ2, published 0 and 1; above 0 it needs a perceptual network.
        head_start: decoder steps more when the decoder is new, so that the network never learns against noise.
        restart_every: epochs after which a new decoder begins; 0 keeps the first.
        public_batch: public pictures in a decoder step.
    """

    pixel: Weight = 1.0
    perceptual: Weight = 0.0
    weighting: Literal["sum", "share"] = "sum"
    reduction: Literal["mean", "crafter"] = "mean"
    decoder_form: DecoderForm = "mirrored"
    decoder_width: Annotated[int, Field(ge=1)] = 64
    decoder_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    decoder_steps: Annotated[int, Field(ge=1)] = 2
    decoder_adversarial: Weight = 0.0
    decoder_perceptual: Weight = 0.0
    head_start: Annotated[int, Field(ge=0)] = 50
    restart_every: Annotated[int, Field(ge=0)] = 0
    public_batch: Annotated[int, Field(ge=2)] = 64

    off = {"pixel": 0.0, "perceptual": 0.0}  # noqa: RUF012
    takes_attributes = True
    variants = {  # noqa: RUF012
        "published": (
            "the paper's weight and decoder, one step each",
            {"pixel": 4.0, "decoder_form": "adv_learn", "decoder_steps": 1, "head_start": 0},
        ),
        "crafter": (
            "the form in Crafter's code, at the weight of its figures",
            {
                "pixel": 0.5, "weighting": "share", "reduction": "crafter", "decoder_form": "crafter", "decoder_steps": 1, "head_start": 0,
                "public_batch": 32,
            },
        ),
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.weighting == "share" and self.pixel >= 1:
            raise ValueError(
                f'weighting = "share" leaves the task 1 - pixel: give a pixel below 1, got {self.pixel}'
            )

    @property
    def active(self) -> bool:
        return self.pixel > 0 or self.perceptual > 0

    @property
    def needs(self) -> frozenset[Asset]:
        return (
            frozenset({"perceptual"})
            if self.active and (self.perceptual or self.decoder_perceptual)
            else frozenset()
        )

    def replaces(self) -> frozenset[Part]:
        if not self.active:
            return frozenset()
        shared: frozenset[Part] = frozenset(
            {"classification loss"} if self.weighting == "share" else ()
        )
        return shared | {"training of the encoder"}

    def couples_samples(self) -> bool:
        return self.active

    def problems(self, target: Target, size: Size) -> list[str]:
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
                "adv_learn compares pictures by a perceptual network, and none is given: pass perceptual=..., or set its weights to 0"
            )
        judge = _still(perceptual) if self.needs and perceptual else None

        def new_game(feature_shape: tuple[int, ...]) -> DecoderGame:
            return DecoderGame(
                feature_shape, target.image_shape, width=self.decoder_width, form=self.decoder_form, lr=self.decoder_lr,
                adversarial=self.decoder_adversarial, perceptual_weight=self.decoder_perceptual, judge=judge,
                norm="mean_square" if self.reduction == "mean" else "batch_norm", device=device_of(target.module),
            )  # fmt: skip

        def felt(batch: Batch, rebuild: Rebuild) -> dict[str, Term]:
            made = rebuild(batch.tapped[target.cut])
            terms = {}
            if self.pixel:
                terms["reconstruction"] = Term(-self.pixel, self._distance(made, batch.images))
            if self.perceptual and judge:
                terms["perceptual"] = Term(
                    -self.perceptual, perceptual_distance(judge, made, batch.images).mean()
                )
            return terms

        return SimulatedDecoder(
            target, public, new_game, felt, steps=self.decoder_steps, batch=self.public_batch, head_start=self.head_start,
            restart_every=self.restart_every, seed=seed,
        )  # fmt: skip

    def _distance(self, made: Tensor, images: Tensor) -> Tensor:
        if self.reduction == "mean":
            return pixel_distance(made, images, "mean_square")
        return pixel_distance(made, images, "batch_norm") / images[0, 0].numel()

    def at_full_strength(self, progress: TrainingProgress) -> bool:
        return not self.active or 2 * (progress.epoch + 1) > progress.epochs

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        return {"cut": target.cut} if self.active else {}


def _still(judge: Target) -> Target:
    """A copy that stands still for a whole training: nothing of the caller's own network may change."""
    return replace(judge, module=copy.deepcopy(judge.module).eval().requires_grad_(False))
