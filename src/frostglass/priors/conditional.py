"""The conditional prior of PLG-MI: a generator of each class, whose examples the target chooses."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import DataError, RunError
from frostglass.core.objective import LOSSES
from frostglass.core.parameters import parameters
from frostglass.core.prior import Condition, Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.data._augment import DRAWS, viewed
from frostglass.priors._gan import SHEET, ConvGanMethod, GanTraining, check_square, draw
from frostglass.priors._residual import LabelledGenerator, ProjectionCritic
from frostglass.priors.base import priors
from frostglass.runtime.device import default_device
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import Work

CHUNK = 256  # public images shown to the target at once


class ConditionalTraining(GanTraining["Conditional"]):
    """The losses of `Conditional`."""

    def prepare(self) -> None:
        view, public = self.target, self.public
        self.queries_before = view.queries
        self.examples, self.confidence = self.method.examples(public, view, self.device)
        self.queries_per_image = (view.queries - self.queries_before) // len(public)

    def labels(self, rng: torch.Generator) -> Tensor:
        shape = (self.method.batch,)
        return torch.randint(self.target.classes, shape, generator=rng).to(self.device)

    def generated(self, generator: nn.Module, labels: Tensor, rng: torch.Generator) -> Tensor:
        return generator(draw(generator, len(labels), self.method.latent, rng), labels)

    def uniform(self, rng: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(shape, generator=rng).to(self.device)

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        fake_labels, labels = self.labels(rng), self.labels(rng)
        places = torch.randint(self.method.top, (self.method.batch,), generator=rng)
        real = self.images(self.examples[labels.cpu(), places])
        # Noise between two byte values: the critic must not tell real images by their whole values.
        real = real + self.uniform(rng, *real.shape) / 256
        with torch.no_grad():
            fake = self.generated(self.generator, fake_labels, rng)
        images, all_labels = torch.cat([real, fake]), torch.cat([labels, fake_labels])
        return hinge(*self.critic(images, all_labels).chunk(2))

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        method, labels = self.method, self.labels(rng)
        fake = self.generated(self.generator, labels, rng)
        loss = -self.critic(fake, labels).mean()
        if not method.guidance:
            return loss
        augmented = viewed(fake, self.uniform(rng, method.batch, DRAWS), jitter_share=0.5)
        logits = self.target.logits(augmented)
        return loss + method.guidance * LOSSES[method.loss](logits, labels).mean()

    def sample(self, generator: nn.Module) -> Tensor:
        labels = torch.arange(SHEET, device=self.device) % self.target.classes
        return self.generated(generator, labels, generator_for(0, "sheet"))

    def finish(self, prior: Prior, work: Work) -> Prior:
        # A resumed training also counts the queries of the steps before it was stopped.
        images = self.method.target_images(len(self.public))
        self.target.queries = self.queries_before + self.queries_per_image * images
        examples = {
            "mean_confidence": self.confidence.mean().item(),
            "least_confidence": self.confidence.min().item(),
        }
        return replace(prior, info={**prior.info, "examples": examples})


@priors.register
@parameters
class Conditional(ConvGanMethod):
    """A generator of each class, trained on the public images that the target gives that class.

    Every class gets as examples the `top` public images x of the largest p_y(x); one image may
    serve many classes. Critic: E max(0, 1 - D(x, y)) + E max(0, 1 + D(G(z, ỹ), ỹ)), ỹ uniform.
    Generator: -E D(G(z, ỹ), ỹ) + guidance · E L(T(aug G(z, ỹ)), ỹ), with random crops to 80-100 %
    of the area, flips, rotations up to 5° of half of the images and brightness and contrast changed
    by up to 20 % in half of them. The critic steps come after each generator step. Networks are
    residual: class-conditional batch norm in the generator, spectral norm and projection in the
    critic. Adam's betas are (0, 0.9).

    Use: the prior of `plgmi`; needs a pass of the target over the public images.
    Paper: Yuan et al., Pseudo Label-Guided Model Inversion Attack via Conditional Generative
    Adversarial Network (PLG-MI), AAAI 2023, arXiv 2302.09814; Miyato and Koyama, cGANs with
    Projection Discriminator, ICLR 2018, arXiv 1802.05637.
    Differs: the published generator ends in tanh, taken as it is for [0, 1]; ours ends in a
    sigmoid, so that no image leaves the range the target knows. Published shapes are for 64 pixels;
    16, 32 and 128 leave out or add stages at the wide end. Where a rotated image ends we repeat its
    border (published: black); crop, flip and rotation are one resampling, then brightness, then
    contrast (published: in random order). Examples are drawn with replacement; real and generated
    images pass the critic together, with one power iteration. `least`, `average` and `cooldown` are
    our options.

    Args:
        top: examples of each class.
        least: refuse a target that gives some class less than this probability on every public
            image; 0 takes whatever is nearest, as published.
        guidance: weight α of the target's loss; 0 leaves the target out of the training, but not
            out of the choice of examples.
        loss: the target's loss L: "margin", "ce" or "poincare".
    """

    latent: Annotated[int, Field(ge=1)] = 128
    top: Annotated[int, Field(ge=1)] = 30
    least: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    steps: Annotated[int, Field(ge=1)] = 30_000
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    loss: Literal["margin", "ce", "poincare"] = "margin"

    title: ClassVar[str] = "Conditional GAN (PLG-MI)"
    tied: ClassVar[bool] = True
    access: ClassVar[Capability] = "gradients"
    betas: ClassVar[tuple[float, float]] = (0.0, 0.9)
    generator_first: ClassVar[bool] = True
    keeps_critic: ClassVar[bool] = False  # it takes labels, which no attack passes to a critic
    condition: ClassVar[Condition] = "label"
    training: ClassVar = ConditionalTraining

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Module, nn.Module]:
        check_square(self.name, image_shape)
        generator = LabelledGenerator(self.latent, self.width, image_shape, classes)
        return generator, ProjectionCritic(self.critic_width or self.width, image_shape, classes)

    def target_images(self, public: int) -> int:
        return public + (self.steps * self.batch if self.guidance else 0)

    def problems(self, public: int) -> list[str]:
        if self.top <= public:
            return []
        return [
            f"conditional.top ({self.top}) is more than the {public} public images there are: "
            "lower it"
        ]

    def examples(
        self, public: Images, view: ModelView, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return each class's `top` public images, best first, and their probability: (K, top)."""
        if problems := self.problems(len(public)):
            raise DataError(problems[0])
        device = device or default_device()
        chunks = torch.arange(len(public)).split(CHUNK)
        scores = torch.cat([view.scores(public.floats(rows).to(device)).cpu() for rows in chunks])
        if not scores.isfinite().all():
            raise RunError(
                "the target's scores of some public images are not finite: conditional cannot rank "
                "them; look at the target"
            )
        best = scores.amax(0)
        if missing := (best < self.least).nonzero().flatten().tolist():
            named = ", ".join(f"{label} (at most {best[label]:.2g})" for label in missing[:3])
            raise RunError(
                f"{len(missing)} of {view.classes} classes have no public image of probability "
                f"{self.least} or more, such as class {named}: lower prior.least (0 takes whatever "
                "is nearest), or add public images"
            )
        chosen = most_confident(scores, self.top)
        return chosen, scores.T.gather(1, chosen)


def most_confident(scores: Tensor, count: int) -> Tensor:
    """Return for each column of `scores` (N, K) the rows of its largest values, (K, count).

    Largest first; the earlier of equal rows comes first.
    """
    return torch.stack(
        [column.argsort(descending=True, stable=True)[:count] for column in scores.T]
    )


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    """Return E max(0, 1 - D(x)) + E max(0, 1 + D(G(z))) from the critic's outputs."""
    return (1 - real).relu().mean() + (1 + fake).relu().mean()
