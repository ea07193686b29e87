"""Generators trained against a critic: shared parameters and the training loop."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Condition, Prior
from frostglass.core.ranks import ALONE, Ranks, joint_batch_norm, together
from frostglass.core.types import Images, Shape
from frostglass.core.views import ModelView
from frostglass.priors.base import PriorMethod, PriorTask, identity_hashes
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.fused import fuse
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

M = TypeVar("M", bound="GanMethod")
SHEET = 64  # samples on a sheet
UNREAD = 16  # steps after which losses are read


@parameters
class GanMethod(PriorMethod):
    """A generator trained in turns with a critic.

    Args:
        latent: length of the latent vector.
        steps: generator steps.
        batch: images per step.
        lr: Adam's step size.
        average: decay of a running mean of the generator's weights, which becomes the prior;
            0 is the published training.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the
            published training.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    latent: Annotated[int, Field(ge=1)] = 100
    steps: Annotated[int, Field(ge=1)] = 20_000
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    betas: ClassVar[tuple[float, float]] = (0.5, 0.999)  # of Adam
    generator_first: ClassVar[bool] = False  # in each step; else the critic goes first
    keeps_critic: ClassVar[bool] = True
    condition: ClassVar[Condition] = ""
    training: ClassVar[type["GanTraining[Any]"]]
    untie: ClassVar[str] = ""  # how to train without a target, if possible

    @property
    def critic_steps(self) -> int:
        return 1

    @abstractmethod
    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Module, nn.Module]:
        """Build generator and critic for one image shape, freshly initialised."""

    def target_images(self, public: int) -> int:
        """Return how many images a training shows to the target."""
        return 0

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        return self.skeleton(image_shape, classes)

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        with seeded(0, "untrained"):
            generator, critic = self.networks(image_shape, classes)
        return self.prior(generator, critic, image_shape, classes)

    def prior(
        self, generator: nn.Module, critic: nn.Module | None, image_shape: Shape, classes: int
    ) -> Prior:
        """Return a prior of these networks that has seen nobody yet."""
        return Prior(
            generator=generator.eval(),
            critic=critic.eval() if critic is not None and self.keeps_critic else None,
            latent=self.latent,
            image_shape=image_shape,
            seen_identities=identity_hashes([]),
            info={"method": self.record()},
            classes=classes if self.tied else 0,
            condition=self.condition,
        )

    def fit(self, task: PriorTask) -> Prior:
        view, public = task.view, task.public
        if self.tied and view is None:
            raise ConfigError(
                f"{self.name} is fitted to one target and got no view of it: pass "
                f"target.view([{self.access!r}]){self.untie}"
            )
        target = view if self.tied else None
        size = 1 if task.device.type == "meta" else task.devices
        basis = task.seed, task.device
        with (
            # Frozen outside the loop: a step's backward pass needs the target's buffers unwritten.
            frozen(target.module) if target else nullcontext(),
            together(size, task.device, _train_along, self, public, *basis) as ranks,
        ):
            training = self.training(self, public, target, *basis, ranks)
            generator = train_in_turns(training, task.work)
        classes = target.classes if target else 0
        prior = self.prior(generator, training.critic, public.shape, classes)
        return training.finish(
            replace(
                prior,
                seen_identities=identity_hashes(public.names),
                tied_to=target.target_key if target else None,
            ),
            task.work,
        )

    def lr_at(self, step: int) -> float:
        left = (self.steps - step) / self.steps
        return self.lr * (min(1.0, left / self.cooldown) if self.cooldown else 1.0)

    def brief(self) -> Self:
        return replace(self, steps=min(2, self.steps), checkpoint_every=1)

    def budget(self, size: AuditSize) -> Budget:
        return Budget(
            f"{self.steps:,} steps of {self.critic_steps} × {self.batch} images",
            evaluations=self.target_images(size.public),
            trained=self.steps * self.critic_steps * self.batch,
        )


@parameters
class ConvGanMethod(GanMethod):
    """A GAN of convolutions whose critic takes several steps for each of the generator.

    Args:
        width: channels of the generator's last hidden stage; 64 is published.
        critic_width: channels of the critic's first stage; the generator's width if not given.
        critic_steps: critic steps for each generator step.
    """

    width: Annotated[int, Field(ge=4)] = 64
    critic_width: Annotated[int, Field(ge=4)] | None = None
    critic_steps: Annotated[int, Field(ge=1)] = 5

    def brief(self) -> Self:
        return replace(super().brief(), critic_steps=1)


def check_square(name: str, image_shape: Shape) -> None:
    """Refuse images that are not square or of another size than the networks are made for."""
    _, height, width = image_shape
    if height != width or height not in (16, 32, 64, 128):
        raise ConfigError(
            f"{name} makes square images of 16, 32, 64 or 128 pixels, got {height}×{width}: "
            "choose another data.size"
        )


class GanTraining(ABC, Generic[M]):
    """One training: its networks and data, and the loss of each network.

    `view` shows the target; it is None unless the method is tied. The losses of a method that
    `shares_batches` are means over the rows that this process draws.
    """

    generator: nn.Module
    critic: nn.Module
    step = 0  # the current one

    def __init__(
        self,
        method: M,
        public: Images,
        view: ModelView | None,
        seed: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ):
        self.method, self.public, self.view = method, public, view
        self.seed, self.device, self.ranks = seed, ranks.device(device), ranks
        with seeded(seed, method.name, "init"):
            networks = method.networks(public.shape, view.classes if view else 0)
        self.generator, self.critic = (network.to(self.device) for network in networks)
        self.prepare()

    def prepare(self) -> None:
        """Compute what the losses need; called once the networks are built."""

    @property
    def target(self) -> ModelView:
        """The view of a tied method."""
        assert self.view is not None  # as `GanMethod.train` checked
        return self.view

    def indices(self, rng: torch.Generator) -> Tensor:
        """Draw a batch of public images with replacement."""
        return self.own(torch.randint(len(self.public), (self.method.batch,), generator=rng))

    def own(self, rows: Tensor) -> Tensor:
        """Return this process's part of what is drawn for a whole batch."""
        return rows[self.ranks.part(self.method.batch)]

    def images(self, index: Tensor) -> Tensor:
        return self.public.floats(index).to(self.device)

    def latents(self, rng: torch.Generator) -> Tensor:
        return self.own(draw(self.generator, self.method.batch, self.method.latent, rng))

    def shares(self, rng: torch.Generator) -> Tensor:
        """Draw a number in [0, 1) for each image of a batch, (N, 1, 1, 1)."""
        return self.own(torch.rand(self.method.batch, 1, 1, 1, generator=rng))

    @abstractmethod
    def critic_loss(self, rng: torch.Generator) -> Tensor:
        """Return the critic's loss on the draws of one step."""

    @abstractmethod
    def generator_loss(self, rng: torch.Generator) -> Tensor:
        """Return the generator's loss on the draws of one step."""

    def sample(self, generator: nn.Module) -> Tensor:
        """Return the images of a sheet."""
        return generator(draw(generator, SHEET, self.method.latent, generator_for(0, "sheet")))

    def finish(self, prior: Prior, work: Work) -> Prior:
        """Return the trained prior, completed by what this training knows or adds."""
        return prior


def draw(generator: nn.Module, count: int, latent: int, rng: torch.Generator) -> Tensor:
    """Draw standard normal latents (count, latent) on the generator's device."""
    return torch.randn(count, latent, generator=rng).to(device_of(generator))


def train_in_turns(training: GanTraining[Any], work: Work | None) -> nn.Module:
    """Train both networks in place; return the generator to keep, or its running mean.

    The random draws of a step depend on nothing but seed and step, so a resumed training has the
    same result. A sheet of samples is written beside every checkpoint. Of several processes only
    the first has a `work`.
    """
    method, generator, critic = training.method, training.generator, training.critic
    mean = copy.deepcopy(generator)
    kept = mean if method.average else generator
    networks = {"generator": generator, "critic": critic, "mean": mean}
    optimizers = {
        name: fuse(torch.optim.Adam(module.parameters(), lr=method.lr, betas=method.betas))
        for name, module in (("opt_g", generator), ("opt_c", critic))
    }
    turns = [("opt_c", training.critic_loss)] * method.critic_steps
    turns.insert(0 if method.generator_first else len(turns), ("opt_g", training.generator_loss))
    saved = training.ranks.broadcast(work.load(method.name) if work else None)
    unread: list[Tensor] = []
    text = ""
    for step in range(_restore(saved, networks, optimizers), method.steps):
        training.step, rng = step, generator_for(training.seed, method.name, step)
        losses = {}
        for name, loss in turns:
            for group in optimizers[name].param_groups:
                group["lr"] = method.lr_at(step)
            losses[name] = _descend(training, optimizers[name], loss, rng)
        _update_mean(mean, generator, method.average)
        unread.append(torch.stack([losses["opt_c"], losses["opt_g"]]))
        last = step + 1 == method.steps
        due = last or (step + 1) % method.checkpoint_every == 0
        if due or len(unread) == UNREAD:
            text = _read(method.name, step, unread, networks.values() if due else ())
            unread = []
        if work:
            if due and not last:
                _save(work, method.name, networks, optimizers, step + 1)
                work.sheet("samples", _sampled(kept, training))
            work.progress(step + 1, method.steps, text + work.sheets)
    return kept.eval()


def _train_along(
    ranks: Ranks, method: GanMethod, public: Images, seed: int, device: torch.device
) -> None:
    """Train with the first process, which alone saves."""
    train_in_turns(method.training(method, public, None, seed, device, ranks), None)


def _read(name: str, step: int, losses: list[Tensor], networks: Iterable[nn.Module]) -> str:
    """Return the last losses as a text; refuse those of the last steps that are not finite.

    Reading waits until the device has computed the losses, so that is not done in each step.
    """
    for back, row in zip(range(len(losses) - 1, -1, -1), torch.stack(losses).cpu(), strict=True):
        text = "critic {:.2f}, generator {:.2f}".format(*row.tolist())
        if not row.isfinite().all() or (back == 0 and not _finite(networks)):
            raise RunError(
                f"{name}: the loss is not finite at step {step - back} ({text}): lower prior.lr; "
                "the last good checkpoint is kept"
            )
    return text


def _restore(
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None,
    networks: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Adam],
) -> int:
    """Load a checkpoint, if there is one, and return the step to go on from."""
    if not saved:
        return 0
    tensors, values = saved
    for part, module in networks.items():
        module.load_state_dict(under_prefix(part, tensors))
    for part, optimizer in optimizers.items():
        restore_optimizer(optimizer, under_prefix(part, tensors))
    return values["step"]


def _save(
    work: Work,
    name: str,
    networks: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Adam],
    step: int,
) -> None:
    tensors: dict[str, Tensor] = {}
    for part, optimizer in optimizers.items():
        tensors |= with_prefix(part, optimizer_tensors(optimizer))
    for part, module in networks.items():
        tensors |= with_prefix(part, module.state_dict())
    work.save(name, tensors, {"step": step})


def _finite(networks: Iterable[nn.Module]) -> bool:
    return all(t.isfinite().all() for network in networks for t in network.state_dict().values())


def _descend(
    training: GanTraining[Any],
    optimizer: torch.optim.Optimizer,
    loss: Callable[[torch.Generator], Tensor],
    rng: torch.Generator,
) -> Tensor:
    """Take a step down the mean loss of all processes; return that loss."""
    ranks, count = training.ranks, training.method.batch
    part = ranks.part(count)
    with joint_batch_norm(ranks, training.generator, training.critic):
        value = loss(rng)
    optimizer.zero_grad(set_to_none=True)
    if ranks.size > 1:  # parts of unequal size count by their size
        value = value * ((part.stop - part.start) * ranks.size / count)
    value.backward()
    ranks.average(weight for group in optimizer.param_groups for weight in group["params"])
    optimizer.step()
    return ranks.total(value.detach()) / ranks.size


def _update_mean(mean: nn.Module, module: nn.Module, decay: float) -> None:
    """Move the running mean of weights and of batch norm's statistics towards the module."""
    states = zip(mean.state_dict().values(), module.state_dict().values(), strict=True)
    with torch.no_grad():
        for average, current in states:
            if average.is_floating_point():
                average.lerp_(current, 1 - decay)
            else:
                average.copy_(current)


def _sampled(generator: nn.Module, training: GanTraining[Any]) -> Tensor:
    """Return samples in evaluation mode; the generator's own mode is restored afterwards."""
    mode = generator.training
    with torch.no_grad():
        images = training.sample(generator.eval())
    generator.train(mode)
    return images
