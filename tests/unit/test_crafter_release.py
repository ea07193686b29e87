"""A release of Crafter and Crafter-z: it can be resumed, leaves networks alone, and refuses."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from torch import nn

from crafting_worlds import METHODS, drawn, encoder, first_state, linear_world, release, tiny
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.crafter_z import CrafterZ
from frostglass.runtime.freezing import frozen
from worlds import KilledError, MemoryWork, NoWork, conditional_prior, prior


@pytest.mark.parametrize("method", METHODS)
def test_disabled_parameters_release_the_plain_features(method):
    network, images = encoder(), drawn()
    disabled = method(**method.disabled)
    result = disabled.release(network, images, Assets(), seed=0, work=NoWork())
    with frozen(network), torch.no_grad():
        assert torch.equal(result.features, network(images))
    assert result.facts == ()
    assert disabled.needs == frozenset()
    assert disabled.release_problems((3, 17, 19), 1, None) == []
    assert disabled.budget(AuditSize(9)).images == 9


@pytest.mark.parametrize("method", METHODS)
def test_networks_and_global_rng_are_left_as_they_were(method):
    network, world = encoder(), prior()
    network[1].weight.grad = torch.ones(6)
    modules = (network, *world.modules)
    before = [{k: t.clone() for k, t in module.state_dict().items()} for module in modules]
    images, rng = drawn(), torch.random.get_rng_state()
    result = release(tiny(method), images, network=network, world=world)
    assert torch.equal(torch.random.get_rng_state(), rng)
    for module, tensors in zip(modules, before, strict=True):
        assert module.training
        assert all(p.requires_grad for p in module.parameters())
        assert all(torch.equal(t, tensors[k]) for k, t in module.state_dict().items())
    assert torch.equal(network[1].weight.grad, torch.ones(6))
    assert network[0].weight.grad is None
    with frozen(network), torch.no_grad():
        plain = network(images)
    assert not result.features.requires_grad
    assert result.features.shape == plain.shape
    assert (result.features - plain).abs().mean() > 1e-4


@cache
def uninterrupted(method):
    return release(tiny(method, checkpoint_every=2, batch=3), drawn(6))


def assert_same(one, other):
    assert torch.equal(one.features, other.features)
    assert one.facts == other.facts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("saves", [1, 2, 3, 5])  # each of two batches saves three times
def test_a_killed_release_resumes_with_the_same_result(method, saves):
    chosen, images, work = (
        tiny(method, checkpoint_every=2, batch=3),
        drawn(6),
        MemoryWork(saves_before_death=saves),
    )
    with pytest.raises(KilledError):
        release(chosen, images, work=work)
    work.left = None
    assert_same(release(chosen, images, work=work), uninterrupted(method))
    assert len(uninterrupted(method).facts) == 2


def test_a_release_killed_between_two_checks_resumes_with_the_same_result():
    short = {"critic_steps": 1, "inner_steps": 1, "terms": 1}
    chosen = tiny(Crafter, steps=24, checkpoint_every=7, lr=0.05, tolerance=0.3, **short)
    work = MemoryWork(saves_before_death=3)
    with pytest.raises(KilledError):
        release(chosen, drawn(3), work=work)
    assert work.kept["crafter"][1]["steps"] == 14
    work.left = None
    assert_same(release(chosen, drawn(3), work=work), release(chosen, drawn(3)))


@pytest.mark.parametrize("method", METHODS)
def test_every_part_of_the_state_is_restored(method):
    linear, network, _ = linear_world()
    chosen, plain = tiny(method), torch.randn(3, 7, generator=torch.Generator().manual_seed(4))
    state = first_state(chosen, linear, network, plain)
    for number in range(3):
        chosen._step(state, torch.Generator().manual_seed(number), "")
    state.anchor, state.direction, state.converged = state.anchor + 1, state.direction + 1, True
    other = chosen._new_state(state.inversion, Assets(), plain, 0)
    work = MemoryWork()
    work.save("state", *state.checkpoint(0))
    other.restore(*work.load("state"), chosen.lr)
    for part in fields(state):
        one, two = getattr(state, part.name), getattr(other, part.name)
        if part.name not in ("critic", "optimizer"):  # compared by the next step
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, part.name
    assert other.steps == 3
    chosen._step(state, torch.Generator().manual_seed(3), "")
    chosen._step(other, torch.Generator().manual_seed(3), "")
    assert torch.equal(state.latents, other.latents)


@pytest.mark.parametrize("method", METHODS)
def test_batches_are_near_equal_and_independent(method):
    chosen, images = tiny(method, batch=3), drawn(7)
    result = release(chosen, images)
    assert [row["images"] for row in result.facts] == [3, 2, 2]
    first = release(chosen, images[:3])
    assert torch.allclose(result.features[:3], first.features, atol=1e-4)
    assert [row["images"] for row in first.facts] == [3]  # no batch of one image
    assert not torch.equal(release(chosen, images, seed=1).features, result.features)


@pytest.mark.parametrize("method", METHODS)
def test_facts_can_be_measured_from_outside(method):
    network, images = encoder(), drawn(5)
    result = release(tiny(method), images, network=network)
    (row,) = result.facts
    with frozen(network), torch.no_grad():
        difference = result.features - network(images)
    deviation = difference.square().flatten(1).sum(1).mean().item() / difference[0].numel()
    assert row["deviation"] == pytest.approx(deviation, rel=1e-4)
    assert row["images"] == 5
    assert row["steps"] == 4
    own = {"residual_end", "gradient_end", "terms", "fewest_terms"} if method is Crafter else set()
    start = {"emd_start", "residual_start", "gradient_start"}
    assert set(row) == {"images", "steps", "emd_end", "deviation"} | start | own
    assert all(isinstance(value, float | int) for value in row.values())


def test_progress_counts_the_steps_of_all_batches():
    reported = []

    class Reporting(NoWork):
        def progress(self, done, total, note=""):
            reported.append((done, total, note.split()[0]))

    release(tiny(CrafterZ, batch=3), drawn(6), work=Reporting())
    assert reported == [(done, 8, "distance") for done in range(1, 9)]


class Detached(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        return self.inner(images.detach())


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_work_is_refused(method):
    images, chosen, name = drawn(), tiny(method), method.name
    with pytest.raises(ConfigError, match=rf"{name} needs assets\.prior, got none"):
        chosen.release(encoder(), images, Assets(), seed=0, work=NoWork())
    for changes, given, more, problem in (
        ({}, images[:1], {}, f"{name} compares sets of images and needs at least 2, got 1"),
        ({"amortized": True}, images, {}, rf"{name} needs assets\.amortizer, got none"),
        ({}, images, {"world": prior((3, 32, 32))}, "images of 3×32×32, the encoder takes 3×16×16"),
        ({}, images[:, :, :12, :12], {"world": prior((3, 12, 12))}, "needs square images .* 12×12"),
        ({}, images, {"world": conditional_prior("label")}, "got one that also takes a label"),
        ({"realism": 1.0}, images, {"world": prior(critic=False)}, rf"{name}\.realism must be 0"),
        ({}, images, {"network": Detached(encoder())}, "the encoder detaches its input"),
    ):
        with pytest.raises(ConfigError, match=problem):
            release(replace(chosen, **changes), given, **more)
    with pytest.raises(ConfigError, match=r"batch: expected at least 2, got 1"):
        method(batch=1)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (Crafter, {"inner_lr": 1e30, "first_steps": 20}),
        (CrafterZ, {"inner_lr": 1e30, "first_steps": 20}),
        (Crafter, {"inner_lr": 1e30, "first_steps": 0}),
        (Crafter, {"critic_lr": 1e30}),
        (CrafterZ, {"critic_lr": 1e30}),
        (CrafterZ, {"lr": 1e36}),
    ],
)
def test_values_that_are_not_finite_are_an_error(method, wrong):
    linear, network, _ = linear_world()  # nothing here is bounded
    problem = rf"{method.name}: .*not finite.* Lower inner_lr, alpha, lr or critic_lr\. The last go"
    with pytest.raises(RunError, match=problem):
        release(tiny(method, **wrong), drawn(4, linear, 4), network=network, world=linear)
