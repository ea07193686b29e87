"""Black-box inversion by a decoder."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.base import View, attacks
from frostglass.attacks.features._training import TrainedAttack, Trainer, flip
from frostglass.attacks.features.base import QueryLedger, RawReconstructions
from frostglass.core.assets import Asset, Assets
from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.views import FeatureView, batch_invariant
from frostglass.networks.decoder import SMALLEST, DecoderForm, DecoderGame, DecoderNorm
from frostglass.runtime.seeding import seeded

NOT_IN_CRAFTER: Mapping[str, Any] = {"standardize": False, "flips": False, "validation": 0.0}


@attacks.register
@parameters
class Decoder(TrainedAttack):
    """Decoder inversion: a network trained on public images to turn features back into images.

    min over Dec of ‖Dec(Enc(x)) - x‖² - μ1 · ln D(Dec(Enc(x))) + μ2 · perceptual distance, against
    max over D of ln D(x) + ln(1 - D(Dec(Enc(x)))), x public; then x̂ = Dec(F). It queries the device
    for plain features and does not use the encoder's weights. With `adapt` (A1) it continues with
    min ‖Dec(F*) - x‖², F* being what the device releases for public images.

    Use: the first attack on features: it needs images of its own and their features, not the
        encoder.
    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations
        (AdvLearn), AAAI 2020, arXiv 1911.10143 (equations 1 to 3: losses); Wang et al., Crafter:
        Facial Feature Crafting against Inversion-based Identity Theft on Deep Models, NDSS 2024
        (appendices E and G: pixels alone, A1).
    Differs: AdvLearn prints the critic's labels swapped, so that critic and decoder would
        cooperate; here they are the right way round, and the decoder's part is -ln D. It does not
        print μ1, the optimizer and the epochs. Crafter's code compares normalised images, which its
        sigmoid cannot reach; ours are in [0, 1]. Its loss is the norm of all differences of a batch
        (`norm` "batch_norm"). A1: the paper has 70 more epochs, the code 500 on 3,840 images.
        Mirrored images, standardised features, the choice of an epoch by held-out public images and
        the default decoder are ours. Adaptation keeps the optimizer's state.

    Args:
        epochs: 500 in Crafter's code. batch: 128 there. width: 64 in both. adapt: 3,840 in
            Crafter's code. adapt_epochs: 70 in its paper.
        form: "mirrored", a residual decoder that suits any layer, or the published "adv_learn" and
            "crafter".
        adversarial: μ1, the weight of the critic. perceptual: μ2, the weight of the distance in the
            layers of the perceptual network.
        norm: how pixels are compared: "mean_square", or Crafter's "batch_norm".
    """

    form: DecoderForm = "mirrored"
    adversarial: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    perceptual: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    norm: DecoderNorm = "mean_square"

    variants: ClassVar[Variants] = {
        "pixel": (
            "as in Crafter's code: pixels alone, its decoder, its norm, 500 epochs",
            {
                "form": "crafter",
                "width": 64,
                "norm": "batch_norm",
                "epochs": 500,
                "batch": 128,
                **NOT_IN_CRAFTER,
            },
        ),
        "gan": (
            "AdvLearn's μ1 > 0: a critic makes images sharper, perhaps more like the person",
            {"adversarial": 0.01},
        ),
        "perceptual": (
            "AdvLearn's μ2 = 1: images are also compared by the layers of a network",
            {"perceptual": 1.0},
        ),
        "adaptive": (
            "A1: continues training on what the protection releases for public images",
            {"adapt": 512, "adapt_epochs": 70},
        ),
        "channels": (
            "for a device that weakens channels, as Disco does: their size does not count",
            {"unit_channels": True},
        ),
    }

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"perceptual"} if self.perceptual else ())

    def problems(self, view: View, assets: Assets) -> list[str]:
        problems = super().problems(view, assets)
        if self.adversarial and min(view.image_shape[1:]) < SMALLEST:
            side = min(view.image_shape[1:])
            problems.append(
                f"{self.name}.adversarial needs images of at least {SMALLEST} pixels a side, "
                f"got {side}. Set it to 0."
            )
        return problems

    def build_network(
        self, view: FeatureView, assets: Assets, target_shape: Sequence[int]
    ) -> tuple[Trainer, nn.Module]:
        game = DecoderGame(
            view.feature_shape,
            view.image_shape,
            width=self.width,
            form=self.form,
            lr=self.lr,
            adversarial=self.adversarial,
            perceptual_weight=self.perceptual,
            perceptual=assets.perceptual,
            norm=self.norm,
            device=view.device,
        )
        return game, game.decoder

    def reconstruct(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: QueryLedger
    ) -> RawReconstructions:
        public = assets.require_public()
        with seeded(seed, "decoder", "init"):
            game, decoder = self.build_network(view, assets, view.image_shape)

        def images(rows: Tensor, mirrored: Tensor) -> Tensor:
            return view.fit(flip(public.floats(rows), mirrored))

        decode = self.train_network(game, decoder, view, public, images, seed=seed, ledger=ledger)
        return RawReconstructions(batch_invariant(decode, features)[:, None])
