"""A step of Crafter over the bare passes it needs, and the search steps that an amortizer saves."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.measured import Measured
from benchmarks.timing import ratio
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.data.faces import photograph
from frostglass.defenses.release._inversion import Inversion
from frostglass.defenses.release._state import CraftState
from frostglass.defenses.release.crafter import Crafter
from frostglass.models.build import build
from frostglass.models.cut import cut
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.pretrained import Pretrained
from frostglass.priors.wgan import gradient_penalty
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import channels_last
from frostglass.store.files import Work

SHAPE, LIMIT = (3, 32, 32), 1.2
# The start of a search does not change the cost of a step.
PUBLISHED = Crafter(**{**Crafter.variants["published"][1], "amortized": False})
CASES = {"published": (128, PUBLISHED), "default": (40, Crafter())}
AMORTIZER = Amortizer(width=32, steps=300)
COMPARED_AT = (0, 10, 25, 50)  # steps after the amortizer's prediction
MOST_STEPS = 400  # from a random latent


def measure() -> Iterator[Measured]:
    prior = Pretrained().read(SHAPE)
    module = build("cnn", classes=2, image_shape=SHAPE, seed=0).eval()
    encoder = cut(module, "stage1", SHAPE).encoder
    people = torch.arange(128)
    images = photograph(0, people, torch.zeros_like(people), SHAPE[1])[0].float() / 255
    with frozen(encoder, *prior.modules), torch.no_grad():
        features = encoder(images)
    yield from _steps(prior, encoder, features)
    yield from _saved(prior, encoder, features[:24])


def _steps(prior: Prior, encoder: nn.Module, features: Tensor) -> Iterator[Measured]:
    fixed = (encoder, *prior.modules)
    for name, (count, method) in CASES.items():
        with frozen(*fixed), channels_last(*fixed), folded(*fixed):
            inversion = Inversion(encoder, prior, method.scale, method.realism)
            state = method._new_state(inversion, Assets(), features[:count], 0)
            method._first_inversion(state, 0)
            step, search, search_and_critic = _work(method, state)
            times, mine, theirs = ratio(step, search_and_critic, rounds=3)
            bare = ratio(step, search, rounds=3)[0]
        yield Measured(
            f"crafter step, {name}, over search and products",
            bare,
            f"{count} images; {times:.3f} × those and the critic's, {mine:.2f} s against "
            f"{theirs:.2f} s",
            most=LIMIT if name == "published" else None,
        )


def _work(method: Crafter, state: CraftState) -> tuple[Callable[[], None], ...]:
    """Return a step, the bare passes of its search, and those with the passes of its critic."""
    rng = torch.Generator().manual_seed(0)
    search = _search_passes(method, state)

    def step() -> None:
        method._step(state, rng, "")

    def search_and_critic() -> None:
        search()
        _critic_passes(method, state, rng)

    return step, search, search_and_critic


def _search_passes(method: Crafter, state: CraftState) -> Callable[[], None]:
    """Return the passes of one search, and one product per term on an existing graph."""
    leaf = state.latents.clone().requires_grad_()
    loss = state.inversion.losses(state.plain, leaf).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    rows = torch.ones_like(leaf)

    def run() -> None:
        for _ in range(method.inner_steps):
            start = state.latents.clone().requires_grad_()
            torch.autograd.grad(state.inversion.losses(state.plain, start).sum(), start)
        for _ in range(method.terms):
            torch.autograd.grad(gradient, leaf, rows, retain_graph=True)

    return run


def _critic_passes(method: Crafter, state: CraftState, rng: torch.Generator) -> None:
    network = state.critic.network
    real = state.critic.real[:1].expand(method.critic_batch, *SHAPE).contiguous()
    for _ in range(method.critic_steps):
        loss = network(torch.cat([real, real])).mean() + gradient_penalty(network, real, real, rng)
        torch.autograd.grad(loss, list(network.parameters()))


def _saved(prior: Prior, encoder: nn.Module, features: Tensor) -> Iterator[Measured]:
    """Compare searches from the amortizer's prediction and from a random latent."""
    amortizer = AMORTIZER.train(encoder, prior, seed=0, work=Work.scratch())
    fixed = (encoder, *prior.modules, amortizer)
    rng = torch.Generator().manual_seed(0)
    with frozen(*fixed), channels_last(*fixed), folded(*fixed):
        inversion = Inversion(encoder, prior, 1.0, 0.0)
        random = torch.randn(len(features), prior.latent, generator=rng)
        with torch.no_grad():
            predicted = amortizer(features)
        from_prediction = _errors(inversion, features, predicted, max(COMPARED_AT))
        from_random = _errors(inversion, features, random, MOST_STEPS)
    for steps in COMPARED_AT:
        error = from_prediction[steps]
        reached = (n for n, other in enumerate(from_random) if other <= error)
        yield Measured(
            f"steps saved by an amortizer, then {steps} steps",
            next(reached, MOST_STEPS) - steps,
            f"feature error {error:.4f}, from a random start after at most {MOST_STEPS} steps",
        )


def _errors(inversion: Inversion, features: Tensor, latents: Tensor, steps: int) -> list[float]:
    """Return the mean error of heavy-ball descent before each step and after the last.

    The step size is the smaller of those for the curvature at the start and near the end.
    """
    rate = _rate(inversion, features, latents)
    end = inversion.descend(features, latents, 50, rate, 0.9)
    rate = torch.minimum(rate, _rate(inversion, features, end))
    velocity, errors = torch.zeros_like(latents), []
    for _ in range(steps + 1):
        leaf = latents.detach().requires_grad_()
        losses = inversion.losses(features, leaf)
        errors.append(losses.mean().item())
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        velocity = 0.9 * velocity + gradient
        latents = leaf.detach() - rate[:, None] * velocity
    return errors


def _rate(inversion: Inversion, features: Tensor, latents: Tensor) -> Tensor:
    return 1 / inversion.curvature(features, latents, torch.ones_like(latents), 12)[0]
