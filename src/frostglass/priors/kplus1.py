"""KED-MI's inversion-specific GAN: the target labels the public pictures, and the discriminator learns its classes beside what is real."""

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.priors._gan import SHEET, Schedule, train_in_turns
from frostglass.priors.base import identity_hashes, priors
from frostglass.priors.pretrained import Pretrained
from frostglass.priors.wgan import build_generator, draw
from frostglass.runtime.device import default_device
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

Matching = Literal["l1", "l2"]
CHUNK = 256  # public pictures shown to the target at a time


@priors.register
@parameters
class Kplus1:
    """A generator trained against a discriminator of K classes and "made", with soft labels from the target under attack.

    The discriminator gives features f(x) and K logits a(x), which imply D(x) = Z / (1 + Z), Z = Σₖ exp aₖ. With T the target's probabilities, x, u and v three
    draws of public pictures, its loss is -E Σₖ T(x)ₖ log softmax(a(x))ₖ - ½ E log D(u) - ½ E log(1 - D(G(z))). The generator's is
    meanⱼ |E fⱼ(G(z)) - E fⱼ(v)| + entropy_weight · Σᵢ H(softmax a(G(zᵢ))), the sum over the batch. As `prior.critic` the discriminator gives log D.
    Generator: the wgan prior's. Discriminator: strided convolutions with instance norm down to 4×4, those of the KED-MI code at 64 pixels and of the
    BiDO code's MNIST version at 32; then minibatch discrimination, o_b(i) = Σ_{j≠i} exp(-‖M_ib - M_jb‖₁), and one linear layer.

    Paper: Chen et al., Assets-Enriched Distributional Model Inversion Attacks (KED-MI), ICCV 2021, arXiv 2010.04092; Salimans et al., Improved
    Techniques for Training GANs, 2016.
    Differs: feature matching is a mean absolute difference as in the released code, a squared Euclidean distance in the paper (`matching`). The entropy is
    summed over the batch as in the code, a mean in the paper. The code leaves the target in training mode, so that its batch norm uses the public
    batch's statistics and its dropout is active; we ask the target as it is deployed, once for all public pictures, unless `target_mode` says
    otherwise. Outside training, minibatch discrimination compares each picture with `batch` - 1 fixed draws of the trained generator instead of with
    its company in the batch: in an attack the published form lets pictures of different people change each other, and results depend on the batch
    size. With the published N(0, 1) start its distances are near 2,000, so that its outputs and gradients begin at exactly zero. Public pictures are drawn
    with replacement, not shuffled. 16 and 128 pixels, more or fewer classes, colour at 32 pixels, `start`, `average` and `cooldown` are choices of ours.

    Args:
        latent: length of the latent vector.
        width: channels of the generator's last hidden stage; 64 is published.
        critic_width: channels of the discriminator's first stage, up to four times as many later; the generator's width if not given.
        steps: generator steps; published are 120 epochs of the public pictures for the discriminator, a fifth of that for the generator.
        critic_steps: discriminator steps before each generator step.
        batch: images a step.
        lr: Adam's step size, with betas (0.5, 0.999).
        kernels: outputs b of minibatch discrimination.
        kernel_size: length of the rows M_ib it compares.
        matching: how the generator's features are held against the public ones: "l1", the released code's, or "l2", the paper's.
        entropy_weight: weight of the entropy of what the discriminator says of the made pictures.
        target_mode: "eval" asks the target as it is deployed, "train" is the released code's behaviour.
        start: an embedded prior's name or the path of a prior file, from whose generator the training begins; the published training begins from nothing.
        average: decay of a running mean of the generator's weights, which becomes the prior; 0 is the published training.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the published training.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    latent: Annotated[int, Field(ge=1)] = 100
    width: Annotated[int, Field(ge=4)] = 64
    critic_width: Annotated[int, Field(ge=4)] | None = None
    steps: Annotated[int, Field(ge=1)] = 11_000
    critic_steps: Annotated[int, Field(ge=1)] = 5
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    kernels: Annotated[int, Field(ge=1)] = 64
    kernel_size: Annotated[int, Field(ge=1)] = 50
    matching: Matching = "l1"
    entropy_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    target_mode: Literal["eval", "train"] = "eval"
    start: str | None = None
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    tied: ClassVar[bool] = True
    needs: ClassVar[Capability] = "scores"

    def networks(
        self, image_shape: Shape, classes: int = 2
    ) -> tuple[nn.Sequential, "Discriminator"]:
        """Generator and discriminator for one image shape and number of classes, freshly initialised."""
        if classes < 2:
            raise ConfigError(
                f"kplus1 tells the classes of a target apart, and got {classes}: it needs a target of at least 2"
            )
        generator = build_generator(self.latent, self.width, image_shape)
        convolutions, features = build_convolutions(self.critic_width or self.width, image_shape)
        resemblance = MinibatchDiscrimination(
            features, self.kernels, self.kernel_size, others=self.batch - 1
        )
        return generator, Discriminator(
            convolutions, resemblance, nn.Linear(features + self.kernels, classes)
        )

    def files(self) -> list[Path]:
        """Files this prior reads."""
        return [] if self.start is None else Pretrained(weights=self.start).files()

    def beginning(self, image_shape: Shape) -> Prior | None:
        """The prior named by `start`, if its generator has the shape of ours."""
        if self.start is None:
            return None
        given = Pretrained(weights=self.start).read(image_shape)
        with seeded(0, "kplus1", "shape"):  # the weights drawn here are not used
            ours = build_generator(self.latent, self.width, image_shape)
        if _shapes(given.generator) != _shapes(ours):
            method = given.info["method"]
            sizes = ["×".join(map(str, shape)) for shape in (given.image_shape, image_shape)]
            raise ConfigError(
                f"prior.start: {self.start} holds the {method['name']} generator of latent {given.latent}, width {method['parameters'].get('width')} and "
                f"pictures of {sizes[0]}, expected latent {self.latent}, width {self.width} and pictures of {sizes[1]}: "
                "set prior.latent and prior.width to its values, or leave prior.start out"
            )
        return given

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Train on public images as the target behind `view` sees them; resumes from the last checkpoint in `work` with the same result."""
        if view is None:
            raise ConfigError(
                "kplus1 is fitted to one target: train it with that target's view, which must grant scores"
            )
        work, begun = work or Work.scratch(), self.beginning(public.shape)
        with seeded(seed, "kplus1", "init"):
            generator, critic = self.networks(public.shape, view.classes)
        for network in (generator, critic):
            network.to(default_device())
        if begun:
            generator.load_state_dict(begun.generator.state_dict())
        opinions = deployed_scores(view, public)

        def some(rng: torch.Generator) -> Tensor:
            return torch.randint(len(public), (self.batch,), generator=rng)

        def pictures(index: Tensor) -> Tensor:
            return public.floats(index).to(default_device())

        def critic_loss(rng: torch.Generator) -> Tensor:
            critic.requires_grad_(True)
            index = some(rng)
            labelled = pictures(index)
            soft = (
                opinions[index.to(opinions.device)]
                if self.target_mode == "eval"
                else training_scores(view, labelled, rng)
            )
            with torch.no_grad():
                fake = generator(draw(generator, self.batch, self.latent, rng))
            judged = [critic.judge(batch)[1] for batch in (labelled, pictures(some(rng)), fake)]
            return discriminator_loss(soft, *judged)

        def generator_loss(rng: torch.Generator) -> Tensor:
            critic.requires_grad_(
                False
            )  # its gradients would be most of the work of this step, and thrown away
            features, logits = critic.judge(
                generator(draw(generator, self.batch, self.latent, rng))
            )
            with torch.no_grad():
                real = critic.features(pictures(some(rng)))
            return (
                feature_gap(features, real, self.matching)
                + self.entropy_weight * entropy(logits).sum()
            )

        schedule = Schedule(
            steps=self.steps, critic_steps=self.critic_steps, lr=self.lr, betas=(0.5, 0.999), average=self.average,
            cooldown=self.cooldown, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip
        kept = train_in_turns(
            "kplus1", generator, critic, schedule, critic_loss=critic_loss, generator_loss=generator_loss, seed=seed, work=work,
            sample=lambda network: network(draw(network, SHEET, self.latent, generator_for(0, "sheet"))),
        )  # fmt: skip
        critic.requires_grad_(True).eval()
        with torch.no_grad():
            critic.remember(
                kept(
                    draw(
                        kept,
                        self.batch - 1,
                        self.latent,
                        generator_for(seed, "kplus1", "reference"),
                    )
                )
            )
        seen = identity_hashes(public.names)
        return Prior(
            generator=kept,
            critic=critic,
            latent=self.latent,
            image_shape=public.shape,
            seen_identities=torch.cat([seen, begun.seen_identities]).unique() if begun else seen,
            info={"method": {"name": "kplus1", "parameters": asdict(self)}},  # type: ignore[call-overload]
            tied_to=view.target_key,
            classes=view.classes,
        )


class MinibatchDiscrimination(nn.Module):
    """How many others each row resembles, once for every kernel: (N, F) features to (N, kernels).

    In training the others are the rest of the batch. Otherwise they are `reference`, the projections of pictures made by the trained generator, so
    that a row's result does not depend on its company; a fresh network has zeros there.
    """

    reference: Tensor

    def __init__(self, features: int, kernels: int, size: int, others: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(features, kernels, size)))
        self.register_buffer("reference", torch.zeros(others, kernels, size))

    def project(self, features: Tensor) -> Tensor:
        """The rows that are compared, (N, kernels, size)."""
        return (features @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])

    def forward(self, features: Tensor) -> Tensor:
        rows = self.project(features)
        if self.training:
            return _resemblance(rows, rows) - 1  # each row is its own copy
        return _resemblance(rows, self.reference)


def _resemblance(rows: Tensor, others: Tensor) -> Tensor:
    """Σⱼ exp(-‖rows_ib - others_jb‖₁), (N, kernels). `cdist` keeps no (N, N, kernels, size) tensor and is seven times as fast as one on a CPU."""
    return torch.cdist(rows.transpose(0, 1), others.transpose(0, 1), p=1).neg().exp().sum(2).T


class Discriminator(nn.Module):
    """The K-way discriminator; as a critic, log D(x), (N, 1): larger for pictures that look more real."""

    def __init__(
        self, convolutions: nn.Sequential, resemblance: MinibatchDiscrimination, head: nn.Linear
    ):
        super().__init__()
        self.features = convolutions
        self.resemblance = resemblance
        self.head = head

    def judge(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features f (N, F), before minibatch discrimination, and logits a (N, K)."""
        features = self.features(images)
        return features, self.head(torch.cat([features, self.resemblance(features)], dim=1))

    def forward(self, images: Tensor) -> Tensor:
        return log_real(self.judge(images)[1])[:, None]

    def remember(self, images: Tensor) -> None:
        """Compare with these pictures from now on, outside training; as many as `reference` has room for."""
        self.resemblance.reference.copy_(self.resemblance.project(self.features(images)))


def build_convolutions(width: int, image_shape: Shape) -> tuple[nn.Sequential, int]:
    """The discriminator's layers from pictures to flat features, and how many features there are.

    32 pixels: 5×5 convolutions to `width`, 2 and 4 times as many channels (BiDO's MNIST version); 64: a 3×3 one more (KED-MI). 16 has one 5×5 less than
    32, 128 one more than 64. All end at 4×4: instance norm cannot work on a single pixel.
    """
    channels, height, _ = image_shape
    stages = height.bit_length() - 3
    widths = [channels, *(width * min(2**stage, 4) for stage in range(stages))]
    layers: list[nn.Module] = []
    for stage, (narrow, wide) in enumerate(itertools.pairwise(widths)):
        last_of_many = stage == stages - 1 and stages > 3
        convolution = (
            nn.Conv2d(narrow, wide, 3, 2, 1) if last_of_many else nn.Conv2d(narrow, wide, 5, 2, 2)
        )
        layers += [convolution, nn.InstanceNorm2d(wide, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten()), widths[-1] * 16


def log_real(logits: Tensor) -> Tensor:
    """log D = log(Z / (1 + Z)), Z = Σ exp aₖ, for each row. (On a CPU `softplus` rounds by a row's place in the batch, `logsigmoid` does not.)"""
    return F.logsigmoid(logits.logsumexp(1))


def log_made(logits: Tensor) -> Tensor:
    """log(1 - D) for each row."""
    return F.logsigmoid(-logits.logsumexp(1))


def discriminator_loss(soft: Tensor, labelled: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """Cross entropy to the target's soft labels, and half of what real and made pictures cost; the last three are logits."""
    naming = -(soft * labelled.log_softmax(1)).sum(1).mean()
    return naming - (log_real(real).mean() + log_made(fake).mean()) / 2


def feature_gap(made: Tensor, real: Tensor, form: Matching) -> Tensor:
    """How far the mean features of two batches are apart: mean absolute difference or squared Euclidean distance."""
    gap = made.mean(0) - real.mean(0)
    return gap.abs().mean() if form == "l1" else gap.square().sum()


def entropy(logits: Tensor) -> Tensor:
    """H(softmax a) of each row, in nats."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def deployed_scores(view: ModelView, public: Images) -> Tensor:
    """The target's probabilities for every public picture, (N, K); a target that sees one class everywhere is refused."""
    if not len(public):
        raise ConfigError("kplus1: there are no public pictures to learn from: give the data some")
    with frozen(view.module):
        parts = [
            view.scores(public.floats(rows).to(default_device()))
            for rows in torch.arange(len(public)).split(CHUNK)
        ]
    scores = torch.cat(parts)
    if not scores.isfinite().all():
        raise RunError(
            "kplus1: the target's scores of some public pictures are not finite, so they teach nothing: look at the target"
        )
    named = scores.argmax(1).unique()
    if len(named) < 2:
        raise RunError(
            f"kplus1: the target says class {named[0]} of all {len(public)} public pictures, which tells the prior nothing: "
            "check that the target is trained and that the public pictures are of its kind, or use the wgan prior"
        )
    return scores


def training_scores(view: ModelView, images: Tensor, rng: torch.Generator) -> Tensor:
    """The probabilities a target gives that was left in training mode: by the batch's own statistics, with dropout."""
    number = int(torch.randint(2**62, (1,), generator=rng))
    with frozen(view.module), seeded(number, "kplus1", "target"):
        view.module.train()
        return view.scores(images)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
