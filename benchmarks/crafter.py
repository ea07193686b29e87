"""An outer step of Crafter over the bare passes of its search and its products, and what an amortizer saves that search."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.timing import ratio
from frostglass.core.prior import Prior
from frostglass.data.faces import photograph
from frostglass.defenses.release._crafting import Craft, Inversion
from frostglass.defenses.release.crafter import Crafter
from frostglass.models.build import build
from frostglass.models.cut import cut
from frostglass.networks.amortizer import Amortizer
from frostglass.priors.pretrained import Pretrained
from frostglass.priors.wgan import gradient_penalty
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import channels_last, frozen
from frostglass.store.files import Work

SHAPE, LIMIT = (3, 32, 32), 1.2
PUBLISHED = Crafter(
    **{**Crafter.variants["published"][1], "amortized": False}
)  # where a search begins does not change what a step costs
STEPS = {"published": (128, PUBLISHED), "default": (40, Crafter())}
AMORTIZER = Amortizer(width=32, steps=300)
LOOKS = (0, 10, 25, 50)  # steps after the guess at which it is compared
PATIENCE = 400  # steps from a random latent, at most


def measure() -> Iterator[str]:
    prior = Pretrained().read(SHAPE)
    encoder = cut(
        build("cnn", classes=2, image_shape=SHAPE, seed=0).eval(), "stage1", SHAPE
    ).encoder
    who = torch.arange(128)
    pictures = photograph(0, who, torch.zeros_like(who), SHAPE[1])[0].float() / 255
    with frozen(encoder, *prior.modules), torch.no_grad():
        features = encoder(pictures)
    yield from _steps(prior, encoder, features)
    yield from _saved(prior, encoder, features[:24])


def _steps(prior: Prior, encoder: nn.Module, features: Tensor) -> Iterator[str]:
    fixed = (encoder, *prior.modules)
    for name, (count, method) in STEPS.items():
        with frozen(*fixed), channels_last(*fixed), folded(*fixed):
            craft = method._untouched(
                Inversion(encoder, prior, method.scale, method.realism), None, features[:count], 0
            )
            method._open(craft, 0)
            rng = torch.Generator().manual_seed(0)
            floor = _floor(method, craft)

            def ours(method=method, craft=craft, rng=rng) -> None:
                method._step(craft, rng, "")

            def with_critic(floor=floor, method=method, craft=craft, rng=rng) -> None:
                floor()
                _critic(method, craft, rng)

            times, mine, theirs = ratio(ours, with_critic, rounds=3)
            bare = ratio(ours, floor, rounds=3)[0]
            told = f"{bare:.3f} × the passes of search and products (limit {LIMIT} as published); {times:.3f} × those and the critic's"
            yield f"crafter step, {name}, {count} pictures: {told}, {mine:.2f} s against {theirs:.2f} s"


def _floor(method: Crafter, craft: Craft) -> Callable[[], None]:
    """The passes of one search, and one product for each term on a graph that is already there."""
    leaf = craft.latents.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        craft.inversion.losses(craft.originals, leaf).sum(), leaf, create_graph=True
    )
    rows = torch.ones_like(leaf)

    def run() -> None:
        for _ in range(method.inner_steps):
            start = craft.latents.clone().requires_grad_()
            torch.autograd.grad(craft.inversion.losses(craft.originals, start).sum(), start)
        for _ in range(method.terms):
            torch.autograd.grad(slope, leaf, rows, retain_graph=True)

    return run


def _critic(method: Crafter, craft: Craft, rng: torch.Generator) -> None:
    """The passes of the critic's steps."""
    network, real = (
        craft.judge.network,
        craft.judge.real[:1].expand(method.critic_batch, *SHAPE).contiguous(),
    )
    for _ in range(method.critic_steps):
        loss = network(torch.cat([real, real])).mean() + gradient_penalty(network, real, real, rng)
        torch.autograd.grad(loss, list(network.parameters()))


def _saved(prior: Prior, encoder: nn.Module, features: Tensor) -> Iterator[str]:
    """How many steps from a random latent reach the feature error that the amortizer's guess, and some steps from it, have."""
    amortizer = AMORTIZER.train(encoder, prior, seed=0, work=Work.scratch())
    fixed = (encoder, *prior.modules, amortizer)
    with frozen(*fixed), channels_last(*fixed), folded(*fixed):
        inversion = Inversion(encoder, prior, 1.0, 0.0)
        random = torch.randn(
            len(features), prior.latent, generator=torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            guessed = _errors(inversion, features, amortizer(features), max(LOOKS))
        plain = _errors(inversion, features, random, PATIENCE)
    for steps in LOOKS:
        needed = next(
            (str(n) for n, error in enumerate(plain) if error <= guessed[steps]),
            f"more than {PATIENCE}",
        )
        yield f"amortizer of {AMORTIZER.steps} steps, then {steps}: feature error {guessed[steps]:.4f}, for which a random start needs {needed}"


def _errors(inversion: Inversion, features: Tensor, latents: Tensor, steps: int) -> list[float]:
    """The mean error before each of some steps of heavy-ball descent, and after the last; the rate is that of the curvature at its end."""
    with torch.enable_grad():
        at_full_strength = inversion.descend(
            features, latents, 50, _rate(inversion, features, latents), 0.9
        )
        rate = torch.minimum(
            _rate(inversion, features, latents), _rate(inversion, features, at_full_strength)
        )
        speed, errors = torch.zeros_like(latents), []
        for _ in range(steps + 1):
            leaf = latents.detach().requires_grad_()
            losses = inversion.losses(features, leaf)
            errors.append(losses.mean().item())
            (slope,) = torch.autograd.grad(losses.sum(), leaf)
            speed = 0.9 * speed + slope
            latents = leaf.detach() - rate[:, None] * speed
    return errors


def _rate(inversion: Inversion, features: Tensor, latents: Tensor) -> Tensor:
    return 1 / inversion.curvature(features, latents, torch.ones_like(latents), 12)[0]
