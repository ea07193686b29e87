"""Two networks trained in turns: the loop that every generator of ours is trained by, with checkpoints and sheets of samples."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostglass.core.errors import RunError
from frostglass.runtime.seeding import generator_for
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

Loss = Callable[[torch.Generator], Tensor]
SHEET = 64  # samples on a sheet


@dataclass(frozen=True)
class Schedule:
    """How long and how fast two networks train.

    `order` says who goes first in a step, the critic with its `critic_steps` or the generator with its one. `average` is the decay of a running mean of the
    generator's weights, `cooldown` the share of the steps over which lr falls to zero at the end.
    """

    steps: int
    critic_steps: int
    lr: float
    betas: tuple[float, float]
    average: float = 0.0
    cooldown: float = 0.0
    checkpoint_every: int = 200
    generator_first: bool = False

    def lr_at(self, step: int) -> float:
        left = (self.steps - step) / self.steps
        return self.lr * (min(1.0, left / self.cooldown) if self.cooldown else 1.0)


def train_in_turns(
    name: str,
    generator: nn.Module,
    critic: nn.Module,
    schedule: Schedule,
    *,
    critic_loss: Loss,
    generator_loss: Loss,
    sample: Callable[[nn.Module], Tensor],
    seed: int,
    work: Work,
) -> nn.Module:
    """Train both in place and return the generator to keep: itself, or the running mean of its weights.

    Each loss is given the random numbers of its step, so a training that was killed goes on from its last checkpoint with the same result.
    `sample(generator)` makes the pictures of a sheet, which is written beside every checkpoint.
    """
    mean = copy.deepcopy(generator)
    networks = {"generator": generator, "critic": critic, "mean": mean}
    opt_g, opt_c = (
        torch.optim.Adam(m.parameters(), lr=schedule.lr, betas=schedule.betas)
        for m in (generator, critic)
    )
    start = 0
    if saved := work.load(name):
        tensors, values = saved
        start = values["step"]
        for part, module in networks.items():
            module.load_state_dict(under_prefix(part, tensors))
        restore_optimizer(opt_g, under_prefix("opt_g", tensors))
        restore_optimizer(opt_c, under_prefix("opt_c", tensors))
    for step in range(start, schedule.steps):
        rng = generator_for(seed, name, step)
        for group in opt_g.param_groups + opt_c.param_groups:
            group["lr"] = schedule.lr_at(step)
        turns = [(opt_c, critic_loss)] * schedule.critic_steps
        turns.insert(0 if schedule.generator_first else len(turns), (opt_g, generator_loss))
        losses = {play: _descend(optimizer, play(rng)) for optimizer, play in turns}
        _follow(mean, generator, schedule.average)
        judged, made = losses[critic_loss].item(), losses[generator_loss].item()
        last = step + 1 == schedule.steps
        due = last or (step + 1) % schedule.checkpoint_every == 0
        if not torch.tensor([judged, made]).isfinite().all() or (
            due and not _sound(networks.values())
        ):
            raise RunError(
                f"{name}: the loss is not finite at step {step} (critic {judged}, generator {made}): lower prior.lr; the last good checkpoint is kept"
            )
        if due and not last:
            tensors = with_prefix("opt_g", optimizer_tensors(opt_g)) | with_prefix(
                "opt_c", optimizer_tensors(opt_c)
            )
            for part, module in networks.items():
                tensors |= with_prefix(part, module.state_dict())
            work.save(name, tensors, {"step": step + 1})
            work.sheet("samples", _sampled(mean if schedule.average else generator, sample))
        work.progress(
            step + 1, schedule.steps, f"critic {judged:.2f}, generator {made:.2f}{work.sheets}"
        )
    return (mean if schedule.average else generator).eval()


def _sound(networks: Iterable[nn.Module]) -> bool:
    return all(
        tensor.isfinite().all() for network in networks for tensor in network.state_dict().values()
    )


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _follow(mean: nn.Module, module: nn.Module, decay: float) -> None:
    """Move the running mean of the weights (and of batch norm's statistics) towards the module."""
    with torch.no_grad():
        for ours, theirs in zip(
            mean.state_dict().values(), module.state_dict().values(), strict=True
        ):
            if ours.is_floating_point():
                ours.lerp_(theirs, 1 - decay)
            else:
                ours.copy_(theirs)


def _sampled(generator: nn.Module, sample: Callable[[nn.Module], Tensor]) -> Tensor:
    """Pictures of a generator as it will be used; its mode is as before afterwards, and no statistic has moved."""
    training = generator.training
    with torch.no_grad():
        pictures = sample(generator.eval())
    generator.train(training)
    return pictures
