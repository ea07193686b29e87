"""The conditional prior of PLG-MI: public pictures sorted by whom the target takes them for, and a generator of each class."""

from dataclasses import asdict
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.core.objective import LOSSES
from frostglass.core.parameters import parameters
from frostglass.core.prior import Condition, Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.data._augment import DRAWS, viewed
from frostglass.priors._gan import SHEET, Schedule, train_in_turns
from frostglass.priors._residual import LabelledGenerator, ProjectionCritic
from frostglass.priors.base import identity_hashes, priors
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

CHUNK = 256  # public pictures shown to the target at once


@priors.register
@parameters
class Conditional:
    """A generator of each class, taught by public pictures that the target takes for that class, and by the target itself.

    Every class gets as examples the `top` public pictures x of the largest p_y(x); one picture may serve many classes. Critic: E max(0, 1 - D(x, y)) +
    E max(0, 1 + D(G(z, ỹ), ỹ)), ỹ uniform. Generator: -E D(G(z, ỹ), ỹ) + guidance · E L(T(aug G(z, ỹ)), ỹ), with random crops to 80-100 % of the area,
    flips, rotations up to 5° of half of the pictures and brightness and contrast changed by up to 20 % in half of them. The generator goes first, then
    the critic `critic_steps` times. Networks are residual: class-conditional batch norm in the generator, spectral norm and projection in the critic.

    Paper: Yuan et al., Pseudo Label-Guided Model Inversion Attack via Conditional Generative Adversarial Network (PLG-MI), AAAI 2023,
    arXiv 2302.09814; Miyato and Koyama, cGANs with Projection Discriminator, ICLR 2018, arXiv 1802.05637.
    Differs: the published generator ends in tanh, taken as it is for [0, 1]; ours ends in a sigmoid, so that no picture leaves the range the target
    knows. Published shapes are for 64 pixels; 16, 32 and 128 leave out or add stages at the wide end. Where a rotated picture ends we repeat its border
    (published: black); crop, flip and rotation are one resampling, then brightness, then contrast (published: in random order). Examples are drawn with
    replacement; real and generated pictures pass the critic together, with one power iteration. `least`, `average` and `cooldown` are options of ours.

    Args:
        latent: length of the latent vector.
        width: channels of the generator's last stage; 64 is published.
        critic_width: channels of the critic's first stage; the generator's width if not given.
        top: examples of each class.
        least: refuse a target that gives some class less than this probability on every public picture; 0 takes whatever is nearest, as published.
        steps: generator steps.
        critic_steps: critic steps after each generator step.
        batch: images a step.
        lr: Adam's step size, with betas (0, 0.9).
        guidance: weight α of the target's loss; 0 leaves the target out of the training, but not out of the choice of examples.
        loss: the target's loss L: "margin", "ce" or "poincare".
        average: decay of a running mean of the generator's weights, which becomes the prior; 0 is the published training.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the published training.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    latent: Annotated[int, Field(ge=1)] = 128
    width: Annotated[int, Field(ge=4)] = 64
    critic_width: Annotated[int, Field(ge=4)] | None = None
    top: Annotated[int, Field(ge=1)] = 30
    least: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    steps: Annotated[int, Field(ge=1)] = 30_000
    critic_steps: Annotated[int, Field(ge=1)] = 5
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    loss: Literal["margin", "ce", "poincare"] = "margin"
    average: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    tied: ClassVar[bool] = True
    needs: ClassVar[Capability] = "gradients"
    keeps_critic: ClassVar[bool] = False  # its critic is given labels, which no attack has for it
    condition: ClassVar[Condition] = "label"

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Module, nn.Module]:
        """Generator and critic of `classes` classes for one image shape, freshly initialised."""
        height, width = image_shape[1:]
        if height != width or height not in (16, 32, 64, 128):
            raise ConfigError(
                f"conditional makes square images of 16, 32, 64 or 128 pixels, got {height}×{width}: choose another data.size"
            )
        generator = LabelledGenerator(self.latent, self.width, image_shape, classes)
        return generator, ProjectionCritic(self.critic_width or self.width, image_shape, classes)

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Choose examples and train on them; resumes from the last checkpoint in `work` with the same result and the same count of queries."""
        if view is None:
            raise ConfigError(
                "conditional is fitted to one target and got no view of it: pass target.view(['gradients'])"
            )
        with seeded(seed, "conditional", "init"):
            generator, critic = (
                network.to(default_device())
                for network in self.networks(public.shape, view.classes)
            )
        before = view.queries
        with frozen(view.module):
            chosen, confidence = self.examples(public, view)
            asked = view.queries - before
            kept = self._fit(generator, critic, public, chosen, view, seed, work or Work.scratch())
        # What was asked before a kill belongs to this training, too.
        view.queries = (
            before
            + asked
            + (asked // len(public) * self.batch * self.steps if self.guidance else 0)
        )
        return Prior(
            generator=kept,
            critic=None,  # it judges pictures of a given class, and the attack has no use for it
            latent=self.latent,
            image_shape=public.shape,
            seen_identities=identity_hashes(public.names),
            info={
                "method": {"name": "conditional", "parameters": asdict(self)},  # type: ignore[call-overload]
                "examples": {
                    "mean_confidence": confidence.mean().item(),
                    "least_confidence": confidence.min().item(),
                },
            },
            tied_to=view.target_key,
            classes=view.classes,
            condition=self.condition,
        )

    def examples(self, public: Images, view: ModelView) -> tuple[Tensor, Tensor]:
        """For each class the `top` public pictures the target likes best, best first, and its probability of the class: (K, top) each."""
        if len(public) < self.top:
            raise DataError(
                f"{len(public)} public pictures are too few for prior.top = {self.top} examples of a class: lower it, or add pictures"
            )
        chunks = torch.arange(len(public)).split(CHUNK)
        scores = torch.cat(
            [view.scores(public.floats(chunk).to(default_device())).cpu() for chunk in chunks]
        )
        if not scores.isfinite().all():
            raise RunError(
                "the target's scores of some public pictures are not finite: conditional cannot rank them; look at the target"
            )
        best = scores.amax(0)
        if missing := (best < self.least).nonzero().flatten().tolist():
            named = ", ".join(f"{label} (at most {best[label]:.2g})" for label in missing[:3])
            raise RunError(
                f"{len(missing)} of {view.classes} classes have no public picture of probability {self.least} or more, such as class {named}: "
                "lower prior.least (0 takes whatever is nearest), or add public pictures"
            )
        chosen = most_liked(scores, self.top)
        return chosen, scores.T.gather(1, chosen)

    def _fit(
        self,
        generator: nn.Module,
        critic: nn.Module,
        public: Images,
        chosen: Tensor,
        view: ModelView,
        seed: int,
        work: Work,
    ) -> nn.Module:
        """Train both networks in turns and return the generator to keep."""

        def draw(rng: torch.Generator, *shape: int) -> Tensor:
            return torch.rand(shape, generator=rng).to(default_device())

        def made(network: nn.Module, labels: Tensor, rng: torch.Generator) -> Tensor:
            return network(
                torch.randn(len(labels), self.latent, generator=rng).to(device_of(network)), labels
            )

        def some_labels(rng: torch.Generator) -> Tensor:
            return torch.randint(view.classes, (self.batch,), generator=rng).to(default_device())

        def critic_loss(rng: torch.Generator) -> Tensor:
            wanted, labels = some_labels(rng), some_labels(rng)
            rows = chosen[labels.cpu(), torch.randint(self.top, (self.batch,), generator=rng)]
            real = public.floats(rows).to(default_device())
            real = (
                real + draw(rng, *real.shape) / 256
            )  # between two byte values, so that being a whole one gives nothing away
            with torch.no_grad():
                fake = made(generator, wanted, rng)
            return hinge(*critic(torch.cat([real, fake]), torch.cat([labels, wanted])).chunk(2))

        def generator_loss(rng: torch.Generator) -> Tensor:
            wanted = some_labels(rng)
            fake = made(generator, wanted, rng)
            loss = -critic(fake, wanted).mean()
            if not self.guidance:
                return loss
            logits = view.logits(viewed(fake, draw(rng, self.batch, DRAWS), jitter_share=0.5))
            return loss + self.guidance * LOSSES[self.loss](logits, wanted).mean()

        def sheet(network: nn.Module) -> Tensor:
            return made(
                network,
                torch.arange(SHEET, device=default_device()) % view.classes,
                generator_for(0, "sheet"),
            )

        schedule = Schedule(
            steps=self.steps, critic_steps=self.critic_steps, lr=self.lr, betas=(0.0, 0.9), average=self.average, cooldown=self.cooldown,
            checkpoint_every=self.checkpoint_every, generator_first=True,
        )  # fmt: skip
        return train_in_turns(
            "conditional",
            generator,
            critic,
            schedule,
            critic_loss=critic_loss,
            generator_loss=generator_loss,
            sample=sheet,
            seed=seed,
            work=work,
        )


def most_liked(scores: Tensor, count: int) -> Tensor:
    """The rows of `scores` (N, K) with the largest value of each column, largest first, (K, count); of equal ones the earlier row comes first."""
    return torch.stack(
        [column.argsort(descending=True, stable=True)[:count] for column in scores.T]
    )


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    """E max(0, 1 - D(x)) + E max(0, 1 + D(G(z))) from the critic's opinions of real and of generated pictures."""
    return (1 - real).relu().mean() + (1 + fake).relu().mean()
