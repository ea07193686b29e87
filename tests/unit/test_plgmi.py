"""Tests of PLG-MI."""

from dataclasses import replace

import pytest
import torch

from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.plgmi import Plgmi
from frostglass.core.errors import ConfigError
from frostglass.data._augment import DRAWS, viewed
from frostglass.runtime.seeding import generator_for
from worlds import conditional_prior, prior, run_attack, target

SMALL = {"candidates": 2, "keep": 2}


def test_defaults_are_the_published_ones():
    plg = Plgmi()
    assert (
        plg.loss,
        plg.weight,
        plg.critic_weight,
        plg.coupling,
        plg.optimizer,
        plg.lr,
        plg.steps,
    ) == (
        "margin",
        1,
        0,
        1,
        "adam",
        0.1,
        600,
    )
    assert (plg.candidates, plg.keep, plg.shown) == (5, 5, 2)


@pytest.mark.parametrize("shown", [1, 2, 3])
@pytest.mark.parametrize(
    "known", [prior(), conditional_prior("label")], ids=["plain", "conditional"]
)
@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.1), ("momentum", 0.01)])
def test_a_few_steps_by_hand(known, shown, optimizer, lr):
    """Adam on the sum of the margins of independent views, without box or critic.

    Adam cannot tell a sum from a mean, so another optimiser is tested too.
    """
    attack = Plgmi(steps=3, shown=shown, optimizer=optimizer, lr=lr, **SMALL)
    some, begun = run_attack(attack, known), run_attack(replace(attack, steps=0), known)
    module, label = target().module.eval(), torch.tensor([2])
    known.generator.eval()
    for draw in range(2):
        z, rng = (
            begun.latents[0][begun.draws[0] == draw].clone().requires_grad_(),
            generator_for(0, "search", 2, draw),
        )
        rule = (
            torch.optim.Adam([z], lr=lr)
            if optimizer == "adam"
            else torch.optim.SGD([z], lr=lr, momentum=0.9)
        )
        for _ in range(3):
            images = known.generator(z, label) if known.condition else known.generator(z)
            loss = 0.0
            for _ in range(shown):
                logits = module(viewed(images, torch.rand(DRAWS, generator=rng)[None]))[0]
                loss = loss + max(logits[other] for other in (0, 1, 3)) - logits[2]
            (z.grad,) = torch.autograd.grad(loss, z)
            rule.step()
        assert torch.allclose(some.latents[0][some.draws[0] == draw], z, atol=1e-4)


def test_it_starts_at_latents_of_the_generator():
    begun = run_attack(Plgmi(steps=0, **SMALL))
    expected = torch.stack(
        [torch.randn(6, generator=generator_for(0, "plgmi", 2, draw)) for draw in range(2)]
    )
    assert torch.equal(begun.latents[0], expected[begun.draws[0]])


def test_without_views_it_is_plain_descent(monkeypatch):
    from frostglass.attacks._search import descent

    draw = descent.fresh
    monkeypatch.setattr(
        descent, "fresh", lambda *given, purpose, **more: draw(*given, purpose="equal", **more)
    )
    plain = Gmi(
        steps=12,
        loss="margin",
        weight=1.0,
        critic_weight=0.0,
        coupling=1,
        optimizer="adam",
        lr=0.1,
        clamp=0.0,
        **SMALL,
    )
    assert torch.equal(
        run_attack(Plgmi(steps=12, shown=0, **SMALL)).latents, run_attack(plain).latents
    )
    assert not torch.allclose(
        run_attack(Plgmi(steps=12, **SMALL)).latents, run_attack(plain).latents
    )


def test_candidates_are_ranked_by_the_image_itself():
    some = run_attack(Plgmi(steps=4, **SMALL))
    with torch.no_grad():
        sure = target().module.eval()(some.images[0]).softmax(1)[:, 2]
    assert torch.allclose(some.confidence[0], sure, atol=1e-4)


@pytest.mark.parametrize(("shown", "samples"), [(0, 1), (1, 1), (2, 1), (2, 3)])
def test_every_view_is_a_query(shown, samples):
    attack = Plgmi(steps=7, shown=shown, samples=samples, **SMALL)
    assert run_attack(attack, labels=(0, 1)).queries == samples * (7 * 4 * max(1, shown) + 4)
    assert attack.search_effort[1] == 7 * max(1, shown) * samples


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"keep .9. must not exceed candidates .5."):
        Plgmi(keep=9)
    with pytest.raises(ConfigError, match="shown"):
        Plgmi(shown=-1)
    with pytest.raises(ConfigError, match=r"plgmi\.critic_weight is 1, but .* has no critic"):
        run_attack(Plgmi(steps=1, critic_weight=1.0), prior(critic=False))
    run_attack(Plgmi(steps=1), prior(critic=False))  # published: no critic is asked


@pytest.mark.parametrize("condition", ["label", "hint"])
def test_a_pool_needs_a_generator_without_condition(condition):
    with pytest.raises(ConfigError, match=f"gmi scores random draws .* needs a {condition}"):
        run_attack(Gmi(steps=1, pool=20), conditional_prior(condition))
    run_attack(Gmi(steps=1, **SMALL), conditional_prior(condition))
