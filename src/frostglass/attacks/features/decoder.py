"""Black-box inversion by a decoder."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.features._learned import Learned, Student, flipped
from frostglass.attacks.features.base import Ledger, Rebuilt, feature_attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import FeatureView, batch_invariant
from frostglass.networks.decoder import SMALLEST, DecoderForm, DecoderGame, DecoderNorm
from frostglass.runtime.seeding import seeded

CRAFTER_LEAVES_OUT: Mapping[str, Any] = {"standardize": False, "flips": False, "validation": 0.0}


@feature_attacks.register
@parameters
class Decoder(Learned):
    """Decoder inversion: a network that learns from public pictures to turn features back into the pictures they were made of.

    min over Dec of ‖Dec(Enc(x)) - x‖² - μ1 · ln D(Dec(Enc(x))) + μ2 · perceptual distance, against max over D of
    ln D(x) + ln(1 - D(Dec(Enc(x)))), x public; then x̂ = Dec(F). It asks the device for plain features and never looks inside. With `adapt`
    (A1) it goes on with min ‖Dec(F*) - x‖², F* what the device releases for public pictures.

    Paper: Xiao et al., Adversarial Learning of Privacy-Preserving and Task-Oriented Representations (AdvLearn), AAAI 2020, arXiv 1911.10143
        (equations 1 to 3: losses); Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on Deep Models,
        NDSS 2024 (appendices E and G: pixels alone, A1).
    Differs: AdvLearn prints the critic's labels swapped, which would make it the decoder's friend; here they are the right way round, and
        the decoder's part is -ln D. It does not print μ1, the optimiser and the epochs. Crafter's code compares normalised pictures, which
        its sigmoid cannot reach; ours are in [0, 1]. Its loss is the length of all differences of a batch together (`norm` "batch_norm").
        A1: the paper has 70 epochs more, the code 500 on 3,840 pictures. Mirrored pictures, standardised features, the choice of an epoch
        by held-out public pictures and the default decoder are ours. Adaptation keeps the optimiser's memory.

    Args:
        epochs: 500 in Crafter's code. batch: 128 there. width: 64 in both. adapt: 3,840 in Crafter's code. adapt_epochs: 70 in its paper.
        form: "mirrored", a residual decoder that suits any layer, or the published "adv_learn" and "crafter".
        adversarial: μ1, the weight of the critic. perceptual: μ2, the weight of the distance in the layers of the perceptual network.
        norm: how pixels are compared: "mean_square", or Crafter's "batch_norm".
    """

    form: DecoderForm = "mirrored"
    adversarial: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    perceptual: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    norm: DecoderNorm = "mean_square"

    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        "pixel": (
            "as in Crafter's code: pixels alone, its decoder, its norm, 500 epochs",
            {
                "form": "crafter",
                "width": 64,
                "norm": "batch_norm",
                "epochs": 500,
                "batch": 128,
                **CRAFTER_LEAVES_OUT,
            },
        ),
        "gan": (
            "AdvLearn's μ1 > 0: a critic makes pictures sharper, perhaps more like the person",
            {"adversarial": 0.01},
        ),
        "perceptual": (
            "AdvLearn's μ2 = 1: pictures are compared by the layers of a network as well",
            {"perceptual": 1.0},
        ),
        "adaptive": (
            "A1: goes on learning from what the protection makes of public pictures",
            {"adapt": 512, "adapt_epochs": 70},
        ),
    }

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"perceptual"} if self.perceptual else ())

    def problems(self, view: FeatureView, assets: Assets) -> list[str]:
        found = super().problems(view, assets)
        if self.adversarial and min(view.image_shape[1:]) < SMALLEST:
            found.append(
                f"{self.name}.adversarial needs pictures of at least {SMALLEST} pixels a side: set it to 0"
            )
        return found

    def untaught(
        self, view: FeatureView, assets: Assets, answer: Sequence[int]
    ) -> tuple[Student, nn.Module]:
        game = DecoderGame(
            view.feature_shape, view.image_shape, width=self.width, form=self.form, lr=self.lr, adversarial=self.adversarial,
            perceptual_weight=self.perceptual, judge=assets.perceptual, norm=self.norm, device=view.device,
        )  # fmt: skip
        return game, game.decoder

    def rebuild(
        self, view: FeatureView, features: Tensor, assets: Assets, *, seed: int, ledger: Ledger
    ) -> Rebuilt:
        public = assets.require_public()
        with seeded(seed, "decoder", "init"):
            game, decoder = self.untaught(view, assets, view.image_shape)

        def pictures(places: Tensor, mirrored: Tensor) -> Tensor:
            return view.fit(flipped(public.floats(places), mirrored))

        decode = self.taught(game, decoder, view, public, pictures, seed=seed, ledger=ledger)
        return Rebuilt(batch_invariant(decode, features)[:, None])
