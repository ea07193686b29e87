"""T-ACGAN, the prior of LOKT: a generator of each class that learns from the target's labels."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.parameters import parameters
from frostglass.core.prior import Condition, Prior
from frostglass.core.types import Shape
from frostglass.core.views import Capability
from frostglass.priors._gan import SHEET, ConvGanMethod, GanTraining, check_square, draw
from frostglass.priors._labelled_dcgan import ClassifyingDcgan, LabelledDcgan
from frostglass.priors._residual import ClassifyingCritic, LabelledGenerator
from frostglass.priors._start import read_start
from frostglass.priors.base import priors
from frostglass.priors.pretrained import Pretrained
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import Work

NETWORKS: dict[str, tuple[Any, Any]] = {
    "residual": (LabelledGenerator, ClassifyingCritic),
    "dcgan": (LabelledDcgan, ClassifyingDcgan),
}


class TacganTraining(GanTraining["Tacgan"]):
    """The losses of `Tacgan`."""

    queries_per_image = 1

    def prepare(self) -> None:
        self.queries_before = self.target.queries
        self.started_from = self.method.starting_prior(self.public.shape)
        if self.started_from:
            assert isinstance(self.generator, LabelledDcgan)  # as `Tacgan` checks
            assert isinstance(self.critic, ClassifyingDcgan)
            self.generator.adopt(self.started_from.generator)
            if self.started_from.critic is not None:
                self.critic.adopt(self.started_from.critic)

    @property
    def guided(self) -> bool:
        """Whether the step is past the warm-up, in which classes have no part."""
        return self.step >= self.method.warmup

    def generated(self, generator: nn.Module, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return generated images and the classes that they were made for."""
        method = self.method
        latents = draw(generator, method.batch, method.latent, rng)
        labels = torch.randint(self.target.classes, (method.batch,), generator=rng)
        labels = labels.to(self.device)
        return generator(latents, labels), labels

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        real = self.images(self.indices(rng))
        with torch.no_grad():
            fake, _ = self.generated(self.generator, rng)
        scores, logits = self.critic(torch.cat([fake, real]))
        fakes, reals = scores.chunk(2)
        loss = F.softplus(fakes).mean() + F.softplus(-reals).mean()
        if not self.guided:
            return loss
        before = self.target.queries
        said = self.target.labels(fake)
        self.queries_per_image = (self.target.queries - before) // len(fake)
        return loss + self.method.guidance * F.cross_entropy(logits[: len(fake)], said)

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        fake, labels = self.generated(self.generator, rng)
        scores, logits = self.critic(fake)
        loss = F.softplus(-scores).mean()
        if not self.guided:
            return loss
        return loss + self.method.guidance * F.cross_entropy(logits, labels)

    def sample(self, generator: nn.Module) -> Tensor:
        labels = torch.arange(SHEET, device=self.device) % self.target.classes
        latents = draw(generator, SHEET, self.method.latent, generator_for(0, "sheet"))
        return generator(latents, labels)

    def finish(self, prior: Prior, work: Work) -> Prior:
        # A resumed training also counts the queries of the steps before it was stopped.
        asked = self.queries_per_image * self.method.target_images(len(self.public))
        self.target.queries = self.queries_before + asked
        prior = replace(prior, info={**prior.info, "queries": asked})
        if self.started_from is None:
            return prior
        seen = torch.cat([prior.seen_identities, self.started_from.seen_identities])
        return replace(prior, seen_identities=seen.unique())


class ClassHead(nn.Module):
    """The classes that a critic sees in images, as logits (N, K)."""

    def __init__(self, critic: nn.Module):
        super().__init__()
        self.critic = critic

    def forward(self, images: Tensor) -> Tensor:
        return self.critic(images)[1]


@priors.register
@parameters
class Tacgan(ConvGanMethod):
    """A generator of each class, taught by the target's labels of generated images alone.

    The critic also has a head C of classes, which learns what the target T says of generated
    images; the generator has to make C see the class it was asked for. With σ the softplus:
    Critic: E σ(D(G(z, y))) + E σ(-D(x)) + α · E CE(C(G(z, y)), T(G(z, y))), y uniform.
    Generator: E σ(-D(G(z, y))) + α · E CE(C(G(z, y)), y). In the `warmup` α is 0.
    C ∘ D imitates the target, and comes with the prior as its student. The critic steps come after
    each generator step. Networks are those of PLG-MI, or of GMI; the critic's two heads are
    linear. Adam's betas are (0, 0.9).

    Use: the base of `surrogates`, or alone the prior of `lokt`.
    Paper: Nguyen et al., Label-Only Model Inversion Attacks via Knowledge Transfer (LOKT), NeurIPS
    2023, arXiv 2310.19342.
    Differs: D ends in a logit, where the published one ends in a sigmoid whose cross-entropy is
    the same loss. Generated and real images pass the critic together, with one power iteration of
    its spectral norms. The published generator ends in tanh; ours in a sigmoid. `average`,
    `cooldown` and `start` are our options. The published settings ask the target for 12 million
    labels.

    Args:
        guidance: α, the weight of classes.
        network: "residual", PLG-MI's networks, published; "dcgan", GMI's with class-conditional
            batch norm, which the published code has too.
        start: for "dcgan": an embedded prior's name or the path of a prior file, from whose
            generator training starts, and from whose critic if it has the same width.
        warmup: first steps without classes; 1,000 published for CelebA, 2,000 for FFHQ, 3,000 for
            FaceScrub, 6,000 for PubFig.
    """

    latent: Annotated[int, Field(ge=1)] = 128
    steps: Annotated[int, Field(ge=1)] = 20_000
    batch: Annotated[int, Field(ge=2)] = 128
    guidance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5
    warmup: Annotated[int, Field(ge=0)] = 1_000
    network: Literal["residual", "dcgan"] = "residual"
    start: str | None = None

    title: ClassVar[str] = "T-ACGAN (LOKT)"
    tied: ClassVar[bool] = True
    access: ClassVar[Capability] = "labels"
    betas: ClassVar[tuple[float, float]] = (0.0, 0.9)
    generator_first: ClassVar[bool] = True
    keeps_critic: ClassVar[bool] = False  # it is kept as a student
    condition: ClassVar[Condition] = "label"
    training: ClassVar = TacganTraining

    def __post_init__(self) -> None:
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup ({self.warmup}) must be less than steps ({self.steps}): the target would "
                "never be asked"
            )
        if self.start is not None and self.network != "dcgan":
            raise ValueError(
                f'start: {self.start} holds the networks of network = "dcgan", got '
                f"{self.network!r}: set it, or leave start out"
            )

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Module, nn.Module]:
        check_square(self.name, image_shape)
        generator, critic = NETWORKS[self.network]
        width = self.critic_width or self.width
        return (
            generator(self.latent, self.width, image_shape, classes),
            critic(width, image_shape, classes),
        )

    def files(self) -> list[Path]:
        return [] if self.start is None else Pretrained(weights=self.start).files()

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        self.starting_prior(image_shape)
        return super().untrained(image_shape, classes)

    def starting_prior(self, image_shape: Shape) -> Prior | None:
        """Read the prior named by `start`; refuse it if its generator has another shape."""
        if self.start is None:
            return None
        return read_start(self.start, self.latent, self.width, image_shape)

    def prior(
        self, generator: nn.Module, critic: nn.Module | None, image_shape: Shape, classes: int
    ) -> Prior:
        assert critic is not None  # as `networks` makes one
        made = super().prior(generator, critic, image_shape, classes)
        return replace(made, students=(ClassHead(critic).eval(),))

    def target_images(self, public: int) -> int:
        return (self.steps - self.warmup) * self.critic_steps * self.batch

    def brief(self) -> Self:
        steps = min(2, self.steps)
        return replace(self, steps=steps, warmup=0, critic_steps=1, checkpoint_every=1)
