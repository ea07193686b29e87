"""Tests of KED-MI."""

from dataclasses import replace

import pytest
import torch

from frostglass.attacks.model.kedmi import Kedmi
from frostglass.core.errors import ConfigError
from frostglass.priors.kplus1 import Kplus1
from frostglass.runtime.seeding import generator_for, seeded
from worlds import SHAPE, prior, run_attack, target


def taught():
    """A prior with the discriminator of KED-MI as its critic."""
    with seeded(0, "tests", "kplus1"):
        _, critic = Kplus1(width=4, batch=4, kernels=2, kernel_size=2).networks(SHAPE, 4)
    return replace(prior(), critic=critic.eval())


def test_defaults_are_the_published_ones():
    ked = Kedmi()
    assert (ked.loss, ked.weight, ked.critic_weight, ked.optimizer, ked.lr, ked.steps) == (
        "ce",
        100,
        1,
        "adam",
        0.02,
        2400,
    )
    assert (ked.candidates, ked.draws, ked.keep, ked.log_variance, ked.mean, ked.clamp) == (
        1,
        5,
        5,
        1,
        "zero",
        "off",
    )


def by_hand(known, label, steps, *, log_variance=1.0, clamp=None, lr=0.02, critic_weight=1.0):
    """μ and s of one person after some steps of Adam, written out, one image at a time."""
    module, generator, critic = target().module.eval(), known.generator.eval(), known.critic
    state = torch.stack([torch.zeros(6), torch.full((6,), log_variance)])
    slow, fast, rng = (
        torch.zeros_like(state),
        torch.zeros_like(state),
        generator_for(0, "search", label, 0),
    )
    for step in range(1, steps + 1):
        state.requires_grad_()
        z = state[0] + (state[1] / 2).exp() * torch.randn(
            1, 6, generator=rng
        )  # a fresh ε each time
        if clamp:
            z = z.clamp(-clamp, clamp)
        images = generator(z)
        logits = critic.outputs(images)[1][0] if hasattr(critic, "outputs") else None
        real = (
            critic(images)[0, 0]
            if logits is None
            else (logits.exp().sum() / (1 + logits.exp().sum())).log()
        )
        loss = (-100 * module(images)[0].softmax(0)[label].log() - critic_weight * real) / 60
        (gradient,) = torch.autograd.grad(loss, state)
        slow, fast = 0.9 * slow + 0.1 * gradient, 0.999 * fast + 0.001 * gradient**2
        state = state.detach() - lr * (slow / (1 - 0.9**step)) / (
            (fast / (1 - 0.999**step)).sqrt() + 1e-8
        )
    return state.detach()


def drawn(state, label, draws, clamp=None):
    """What is read from (μ, s) at the end."""
    z = state[0] + (state[1] / 2).exp() * torch.randn(
        draws, 6, generator=generator_for(0, "read", label, 0)
    )
    return z.clamp(-clamp, clamp) if clamp else z


@pytest.mark.parametrize("known", [prior(), taught()], ids=["critic", "discriminator"])
@pytest.mark.parametrize(
    "options",
    [{}, {"log_variance": 0.0, "clamp": "forward", "bound": 0.8}],
    ids=["published", "tl-dmi"],
)
@pytest.mark.parametrize("critic_weight", [1.0, 300.0])
def test_a_few_steps_by_hand(known, options, critic_weight):
    some = run_attack(
        Kedmi(steps=4, draws=3, keep=3, critic_weight=critic_weight, **options), known
    )
    clamp = options.get("bound")
    state = by_hand(
        known,
        2,
        4,
        log_variance=options.get("log_variance", 1.0),
        clamp=clamp,
        critic_weight=critic_weight,
    )
    assert not torch.allclose(state[0], torch.zeros(6), atol=0.01)
    expected = drawn(state, 2, 3, clamp)
    assert sorted(some.draws[0].tolist()) == [0, 1, 2]
    assert torch.allclose(some.latents[0], expected[some.draws[0]], atol=1e-4)


def test_the_start_is_a_wide_gaussian_around_zero_or_around_a_latent():
    many = run_attack(Kedmi(steps=0, draws=400, keep=400, critic_weight=0.0)).latents[0]
    assert many.mean().item() == pytest.approx(0, abs=0.1)
    assert many.std().item() == pytest.approx(torch.tensor(0.5).exp().item(), rel=0.05)
    around = run_attack(
        Kedmi(steps=0, draws=400, keep=400, mean="normal", log_variance=-10.0)
    ).latents[0]
    centre = torch.randn(6, generator=generator_for(0, "kedmi", 2, 0))
    assert torch.allclose(around.mean(0), centre, atol=0.01)


def test_a_clamp_of_what_is_printed_changes_nothing_and_one_of_the_latents_does():
    off, log, forward = (
        run_attack(Kedmi(steps=12, lr=0.2, clamp=clamp)) for clamp in ("off", "log", "forward")
    )
    assert torch.equal(off.latents, log.latents)
    assert off.latents.abs().max() > 1
    assert forward.latents.abs().max() <= 1
    assert not torch.allclose(
        off.latents.clamp(-1, 1), forward.latents
    )  # it is felt while searching, not only at the end
    assert run_attack(Kedmi(steps=2, clamp="forward", bound=0.3)).latents.abs().max() <= 0.3


def test_adam_does_not_see_how_large_the_batch_is():
    """Duplicates beside a row, or a coupling of twice the size, leave its steps as they are."""
    alone, doubled = run_attack(Kedmi(steps=10)), run_attack(Kedmi(steps=10), labels=(2, 2, 2, 2))
    assert torch.allclose(doubled.latents, alone.latents.expand_as(doubled.latents), atol=1e-4)
    assert torch.allclose(
        run_attack(Kedmi(steps=10, coupling=120)).latents, alone.latents, atol=1e-4
    )


def test_images_are_ordered_by_the_margin_and_none_is_left_out():
    some = run_attack(Kedmi(steps=5, candidates=2, draws=4, keep=8))
    assert sorted(some.draws[0].tolist()) == list(range(8))
    with torch.no_grad():
        logits = target().module.eval()(some.images[0])
    rest = torch.cat([logits[:, :2], logits[:, 3:]], 1).amax(1)
    margin = logits[:, 2] - rest
    assert (margin.diff() <= 1e-3).all()
    assert torch.allclose(some.confidence[0], logits.softmax(1)[:, 2], atol=1e-4)


def test_queries_are_counted():
    assert run_attack(Kedmi(steps=7, draws=3, keep=1), labels=(0, 1)).queries == 2 * 7 + 2 * 3
    assert Kedmi(steps=7, draws=3, keep=1, samples=2).search_effort == ("7 steps of 2 images", 14)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"keep .6. must not exceed candidates · draws .5."):
        Kedmi(keep=6)
    with pytest.raises(
        ConfigError, match="clamp: expected 'off', 'log' or 'forward', got 'backward'"
    ):
        Kedmi(clamp="backward")
    with pytest.raises(ConfigError, match="log_variance"):
        Kedmi(log_variance=5)
    with pytest.raises(ConfigError, match=r"kedmi\.critic_weight is 1, but .* has no critic"):
        run_attack(Kedmi(steps=1), prior(critic=False))
    run_attack(Kedmi(steps=1, critic_weight=0), prior(critic=False))


@pytest.mark.parametrize(
    ("variant", "clamp", "steps"), [("bido", "log", 5000), ("tl-dmi", "forward", 3000)]
)
def test_variants_are_as_other_codes_run_it(variant, clamp, steps):
    attack = Kedmi(**Kedmi.variants[variant][1])
    assert (attack.log_variance, attack.clamp, attack.steps) == (0, clamp, steps)
