"""KED-MI's inversion-specific GAN: the target labels the public images for the discriminator."""

import itertools
from dataclasses import replace
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
from frostglass.networks.dcgan import build_generator
from frostglass.priors._gan import ConvGanMethod, GanTraining, draw
from frostglass.priors._start import read_start
from frostglass.priors.base import priors
from frostglass.priors.pretrained import Pretrained
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

Matching = Literal["l1", "l2"]
CHUNK = 256  # public images shown to the target at a time


class Kplus1Training(GanTraining["Kplus1"]):
    """The losses of `Kplus1`."""

    critic: "Discriminator"

    def prepare(self) -> None:
        self.start = self.method.starting_prior(self.public.shape)
        if self.start:
            self.generator.load_state_dict(self.start.generator.state_dict())
        self.scores = deployed_scores(self.target, self.public, self.device)

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        self.critic.requires_grad_(True)
        index = self.indices(rng)
        labelled = self.images(index)
        soft = (
            self.scores[index.to(self.scores.device)]
            if self.method.target_mode == "eval"
            else training_scores(self.target, labelled, rng)
        )
        with torch.no_grad():
            fake = self.generator(self.latents(rng))
        batches = (labelled, self.images(self.indices(rng)), fake)
        return discriminator_loss(soft, *(self.critic.outputs(batch)[1] for batch in batches))

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        self.critic.requires_grad_(False)  # its gradients would be most of the work, and unused
        features, logits = self.critic.outputs(self.generator(self.latents(rng)))
        with torch.no_grad():
            real = self.critic.features(self.images(self.indices(rng)))
        gap = feature_gap(features, real, self.method.matching)
        return gap + self.method.entropy_weight * entropy(logits).sum()

    def finish(self, prior: Prior, work: Work) -> Prior:
        """Fix the images that the discriminator compares with."""
        self.critic.requires_grad_(True).eval()
        method, rng = self.method, generator_for(self.seed, "kplus1", "reference")
        with torch.no_grad():
            latents = draw(prior.generator, method.batch - 1, method.latent, rng)
            self.critic.remember(prior.generator(latents))
        if self.start is None:
            return prior
        seen = torch.cat([prior.seen_identities, self.start.seen_identities])
        return replace(prior, seen_identities=seen.unique())


@priors.register
@parameters
class Kplus1(ConvGanMethod):
    """A generator trained against a discriminator of K classes and "fake", labelled by the target.

    The discriminator gives features f(x) and K logits a(x), which imply D(x) = Z / (1 + Z),
    Z = Σₖ exp aₖ. With T the target's probabilities, x, u and v three draws of public images, its
    loss is -E Σₖ T(x)ₖ log softmax(a(x))ₖ - ½ E log D(u) - ½ E log(1 - D(G(z))). The generator's is
    meanⱼ |E fⱼ(G(z)) - E fⱼ(v)| + entropy_weight · Σᵢ H(softmax a(G(zᵢ))), the sum over the batch.
    As `prior.critic` the discriminator gives log D. Generator: the wgan prior's. Discriminator:
    strided convolutions with instance norm down to 4×4, those of the KED-MI code at 64 pixels and
    of the BiDO code's MNIST version at 32; then minibatch discrimination,
    o_b(i) = Σ_{j≠i} exp(-‖M_ib - M_jb‖₁), and one linear layer. Adam's betas are (0.5, 0.999). The
    discriminator steps come before each generator step.

    Use: the prior of `kedmi`; trained again for every model.
    Paper: Chen et al., Knowledge-Enriched Distributional Model Inversion Attacks (KED-MI), ICCV
    2021, arXiv 2010.04092; Salimans et al., Improved Techniques for Training GANs, 2016.
    Differs: feature matching is a mean absolute difference as in the released code, a squared
    Euclidean distance in the paper (`matching`). The entropy is summed over the batch as in the
    code, a mean in the paper. The code leaves the target in training mode, so that its batch norm
    uses the public batch's statistics and its dropout is active; we ask the target as it is
    deployed, once for all public images, unless `target_mode` says otherwise. Outside training,
    minibatch discrimination compares each image with `batch` - 1 fixed draws of the trained
    generator instead of with the rest of the batch: in an attack the published form lets images of
    different people change each other, and results depend on the batch size. With the published
    N(0, 1) start its distances are near 2,000, so that its outputs and gradients begin at exactly
    zero. Public images are drawn with replacement, not shuffled. The published length is 120 epochs
    of the public images for the discriminator, a fifth of that for the generator. 16 and 128
    pixels, more or fewer classes, colour at 32 pixels, `start`, `average` and `cooldown` are our
    choices.

    Args:
        kernels: outputs b of minibatch discrimination.
        kernel_size: length of the rows M_ib it compares.
        matching: how generated and public features are compared: "l1", the released code's, or
            "l2", the paper's.
        entropy_weight: weight of the entropy of the discriminator's classes of generated images.
        target_mode: "eval" asks the target as it is deployed, "train" is the released code's
            behaviour.
        start: an embedded prior's name or the path of a prior file, from whose generator training
            starts; the published training starts from random weights.
    """

    steps: Annotated[int, Field(ge=1)] = 11_000
    kernels: Annotated[int, Field(ge=1)] = 64
    kernel_size: Annotated[int, Field(ge=1)] = 50
    matching: Matching = "l1"
    entropy_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    target_mode: Literal["eval", "train"] = "eval"
    start: str | None = None

    title: ClassVar[str] = "K+1 GAN (KED-MI)"
    tied: ClassVar[bool] = True
    access: ClassVar[Capability] = "scores"
    training: ClassVar = Kplus1Training

    def networks(
        self, image_shape: Shape, classes: int = 0
    ) -> tuple[nn.Sequential, "Discriminator"]:
        if classes < 2:
            raise ConfigError(
                f"kplus1 tells the classes of a target apart, and got {classes}: it needs a target "
                "of at least 2"
            )
        generator = build_generator(self.latent, self.width, image_shape)
        convolutions, features = build_convolutions(self.critic_width or self.width, image_shape)
        resemblance = MinibatchDiscrimination(
            features, self.kernels, self.kernel_size, others=self.batch - 1
        )
        head = nn.Linear(features + self.kernels, classes)
        return generator, Discriminator(convolutions, resemblance, head)

    def files(self) -> list[Path]:
        return [] if self.start is None else Pretrained(weights=self.start).files()

    def target_images(self, public: int) -> int:
        trained = self.steps * self.critic_steps * self.batch
        return public + (trained if self.target_mode == "train" else 0)

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        self.starting_prior(image_shape)
        return super().untrained(image_shape, classes)

    def starting_prior(self, image_shape: Shape) -> Prior | None:
        """Read the prior named by `start`; refuse it if its generator has another shape."""
        if self.start is None:
            return None
        return read_start(self.start, self.latent, self.width, image_shape)


class MinibatchDiscrimination(nn.Module):
    """How many others each row resembles, once for every kernel: (N, F) features to (N, kernels).

    In training the others are the rest of the batch. Otherwise they are `reference`, projections of
    images of the trained generator, so that a row's result does not depend on its batch; a fresh
    network has zeros there.
    """

    reference: Tensor

    def __init__(self, features: int, kernels: int, size: int, others: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(features, kernels, size)))
        self.register_buffer("reference", torch.zeros(others, kernels, size))

    def project(self, features: Tensor) -> Tensor:
        """Return the rows that are compared, (N, kernels, size)."""
        return (features @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:])

    def forward(self, features: Tensor) -> Tensor:
        rows = self.project(features)
        if self.training:
            return _resemblance(rows, rows) - 1  # each row is its own copy
        return _resemblance(rows, self.reference)


def _resemblance(rows: Tensor, others: Tensor) -> Tensor:
    """Return Σⱼ exp(-‖rows_ib - others_jb‖₁), (N, kernels)."""
    # Without a (N, N, kernels, size) tensor this is seven times as fast on a CPU.
    return torch.cdist(rows.transpose(0, 1), others.transpose(0, 1), p=1).neg().exp().sum(2).T


class Discriminator(nn.Module):
    """The K-way discriminator; as a critic, log D(x), (N, 1), larger for more realistic images."""

    def __init__(
        self, convolutions: nn.Sequential, resemblance: MinibatchDiscrimination, head: nn.Linear
    ):
        super().__init__()
        self.features = convolutions
        self.resemblance = resemblance
        self.head = head

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features f (N, F), before minibatch discrimination, and logits a (N, K)."""
        features = self.features(images)
        return features, self.head(torch.cat([features, self.resemblance(features)], dim=1))

    def forward(self, images: Tensor) -> Tensor:
        return log_real(self.outputs(images)[1])[:, None]

    def remember(self, images: Tensor) -> None:
        """Compare with these images outside training; as many as `reference` has rows."""
        self.resemblance.reference.copy_(self.resemblance.project(self.features(images)))


def build_convolutions(width: int, image_shape: Shape) -> tuple[nn.Sequential, int]:
    """Build the discriminator's layers from images to flat features; also return their number.

    32 pixels: 5×5 convolutions to `width`, 2 and 4 times as many channels (BiDO's MNIST version);
    64: a 3×3 one more (KED-MI). 16 has one 5×5 less than 32, 128 one more than 64. All end at 4×4:
    instance norm cannot work on a single pixel.
    """
    channels, height, _ = image_shape
    stages = height.bit_length() - 3
    widths = [channels, *(width * min(2**stage, 4) for stage in range(stages))]
    layers: list[nn.Module] = []
    for stage, (narrow, wide) in enumerate(itertools.pairwise(widths)):
        size = 3 if stage == stages - 1 and stages > 3 else 5
        convolution = nn.Conv2d(narrow, wide, size, 2, size // 2)
        layers += [convolution, nn.InstanceNorm2d(wide, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten()), widths[-1] * 16


def log_real(logits: Tensor) -> Tensor:
    """Return log D = log(Z / (1 + Z)), Z = Σ exp aₖ, for each row."""
    # On a CPU `softplus` rounds by a row's place in the batch, `logsigmoid` does not.
    return F.logsigmoid(logits.logsumexp(1))


def log_fake(logits: Tensor) -> Tensor:
    """Return log(1 - D) for each row."""
    return F.logsigmoid(-logits.logsumexp(1))


def discriminator_loss(soft: Tensor, labelled: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """Return the discriminator's loss from the target's soft labels and logits of three batches."""
    classification = -(soft * labelled.log_softmax(1)).sum(1).mean()
    return classification - (log_real(real).mean() + log_fake(fake).mean()) / 2


def feature_gap(fake: Tensor, real: Tensor, form: Matching) -> Tensor:
    """Compare the mean features of two batches: mean absolute or squared Euclidean distance."""
    gap = fake.mean(0) - real.mean(0)
    return gap.abs().mean() if form == "l1" else gap.square().sum()


def entropy(logits: Tensor) -> Tensor:
    """Return H(softmax a) of each row, in nats."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def deployed_scores(view: ModelView, public: Images, device: torch.device) -> Tensor:
    """Return the target's probabilities (N, K) for all public images.

    A target that gives one class to all of them is refused.
    """
    if not len(public):
        raise ConfigError("kplus1: there are no public images to learn from: give the data some")
    chunks = torch.arange(len(public)).split(CHUNK)
    with frozen(view.module):
        scores = torch.cat([view.scores(public.floats(rows).to(device)) for rows in chunks])
    if not scores.isfinite().all():
        raise RunError(
            "kplus1: the target's scores of some public images are not finite, so they teach "
            "nothing: look at the target"
        )
    predicted = scores.argmax(1).unique()
    if len(predicted) < 2:
        raise RunError(
            f"kplus1: the target gives class {predicted[0]} to all {len(public)} public images, "
            "which tells the prior nothing: check that the target is trained and that the public "
            "images are of its kind, or use the wgan prior"
        )
    return scores


def training_scores(view: ModelView, images: Tensor, rng: torch.Generator) -> Tensor:
    """Return the target's probabilities in training mode: batch statistics, with dropout."""
    number = int(torch.randint(2**62, (1,), generator=rng))
    with frozen(view.module), seeded(number, "kplus1", "target"):
        view.module.train()
        return view.scores(images)
