"""MID: mutual information regularisation through a variational bottleneck."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.defenses.base import Batch, Defense, Part, Term, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._heads import linear_head, with_head
from frostglass.runtime.seeding import seeded

ENCODER, DECODER = "encode", "decode"


def spread(raw: Tensor) -> Tensor:
    """Return σ = softplus(s - 5), which starts near 0.0067; clamped, because its log is taken."""
    return F.softplus(raw.float() - 5).clamp(min=1e-6)


def kl_to_standard_normal(encoded: Tensor) -> Tensor:
    """Return Σ_k -½ (1 + 2 ln σ - μ² - σ²), averaged over the batch; `encoded` holds μ, then s."""
    mean, raw = encoded.float().chunk(2, 1)
    sigma = spread(raw)
    return (-0.5 * (1 + 2 * sigma.log() - mean.square() - sigma.square())).sum(1).mean()


def noise_of(rows: Tensor, draw: int) -> Tensor:
    """Return standard normal noise that is a function of each row and of `draw`.

    The same image gets the same noise in any batch.
    """
    place = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    bits = rows.detach().float().contiguous().view(torch.int32).to(torch.int64)
    key = _scrambled(bits + place * _signed(0x9E3779B97F4A7C15)).sum(1, keepdim=True)
    first = _scrambled(
        key + place * _signed(0xD1342543DE82EF95) + _signed((draw + 1) * 0xA0761D6478BD642F % 2**64)
    )
    u, v = (
        ((x >> 11) & (2**53 - 1)).double().add(0.5) / 2**53 for x in (first, _scrambled(first + 1))
    )
    return ((-2 * u.log()).sqrt() * (2 * math.pi * v).cos()).to(rows.dtype)


def _signed(constant: int) -> int:
    """Return a 64-bit constant as the signed integer torch takes; products wrap around."""
    return constant - 2**64 if constant >= 2**63 else constant


def _scrambled(x: Tensor) -> Tensor:
    """Apply the finaliser of the SplitMix64 generator, which mixes every bit of the input."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


class VariationalHead(nn.Module):
    """logits = decode(μ + σ ε) with (μ, s) = encode(features).

    `draw` numbers the noise; see `ModelView.averaged`.
    """

    replaces_head = True

    def __init__(self, features: int, width: int, classes: int, *, inference: str):
        super().__init__()
        self.encode = nn.Linear(features, 2 * width)
        self.decode = nn.Linear(width, classes)
        self.inference = inference
        self.draw = 0

    def forward(self, features: Tensor) -> Tensor:
        mean, raw = self.encode(features.flatten(1)).chunk(2, 1)
        if not self.training and self.inference == "mean":
            return self.decode(mean)
        return self.decode(mean + spread(raw).to(mean.dtype) * noise_of(mean, self.draw))


@defenses.register
@parameters
class Mid(Defense):
    """Mutual information regularisation: a noisy code with a cost per bit limits what gets through.

    Head: one linear layer gives μ and s of k = width · d dimensions each, σ = softplus(s - 5),
    ζ = μ + σ ε, logits = linear(ζ). Loss: cross-entropy + λ · KL with
    KL = Σ_k -½ (1 + 2 ln σ - μ² - σ²), averaged over the batch. The noise stays at inference, as
    published, so an audit should also try the view that averages it out (`attack.samples`).

    Use: a baseline of the papers; in our trials it hid nobody under the best loss. Attacks by
        gradients found as much without averaging its noise (`variant = "noise"`); try that too.
    Cost: an epoch takes 1.03 times as long (a small `cnn`).
    Paper: Wang et al., Improving Robustness to Model Inversion Attacks via Mutual Information
        Regularization, AAAI 2021, arXiv 2009.05241.
    Differs: the noise is a function of the code's bits instead of fresh at every call. In training
        the weights move and with them the noise; afterwards the same image gets the same output,
        so an audit gives the same result in any batch and after any restart. A white-box attacker
        who wants other draws gets them through `ModelView.averaged`. Published code has no
        deterministic switch; `inference = "mean"` is one. The published models drop the batch norm
        before the head of VGG16 (`feature_norm = false` there). σ is clamped at 1e-6.

    Args:
        weight: λ; published 0.003 to 0.02 (CelebA, VGG16), 0.2 (MNIST), 0.15 (CIFAR-10), 0.1 and
            0.005 (FaceScrub). At 0 the noise has no cost but is still there, which is not the
            undefended model.
        width: dimensions of the code as a share of the feature's, published 0.5; 0 leaves the head
            as it is.
        inference: "sample" (published) or "mean", which uses μ.
    """

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    width: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    inference: Literal["sample", "mean"] = "sample"

    title = "MID"
    disabled: ClassVar = {"weight": 0.0, "width": 0.0}
    adaptive: ClassVar = ("noise",)

    def __post_init__(self) -> None:
        if self.weight and not self.width:
            raise ValueError(
                f"weight {self.weight} needs a code: give a width above 0, or weight 0 too"
            )

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"weight": Real(0.001, 0.3, log=True)}

    def replaces(self) -> frozenset[Part]:
        return frozenset({"head"}) if self.width else frozenset()

    def prepare(self, target: Target, *, seed: int) -> Target:
        if not self.width:
            return target
        classes, features = linear_head(target, self.name).weight.shape
        width = int(self.width * features)
        if width < 1:
            raise ConfigError(
                f"mid.width must leave at least one of {features} dimensions, got {self.width}: "
                "raise it"
            )
        with seeded(seed, "mid", "head"):
            head = VariationalHead(features, width, classes, inference=self.inference)
        return with_head(target, head, DECODER)

    def taps(self, target: Target) -> tuple[str, ...]:
        return (f"{target.head.removesuffix(DECODER)}{ENCODER}",) if self.width else ()

    def losses(self, batch: Batch) -> dict[str, Term]:
        if not self.width:
            return {}
        (encoded,) = batch.tapped.values()
        return {"mid_kl": Term(self.weight, kl_to_standard_normal(encoded))}
