"""MID against known values, and its repeatable noise."""

import pytest
import torch

from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, TrainingProgress
from frostglass.defenses.training.mid import (
    Mid,
    VariationalHead,
    kl_to_standard_normal,
    noise_of,
    spread,
)
from frostglass.runtime.seeding import generator_for
from worlds import prior, target


def draws(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=generator_for(seed, "test"), dtype=dtype)


def test_spread_starts_small_and_never_vanishes():
    assert spread(torch.zeros(1)).item() == pytest.approx(0.0067153, abs=1e-7)
    assert spread(torch.tensor([-1e4])).item() == pytest.approx(1e-6)


@pytest.mark.parametrize(("k", "value"), [(1, 4.50338), (256, 1152.87), (1024, 4611.46)])
def test_kl_at_the_start(k, value):
    assert kl_to_standard_normal(torch.zeros(3, 2 * k)).item() == pytest.approx(value, rel=1e-5)


def test_kl_agrees_with_the_library():
    encoded = draws(6, 10) + 3
    mean, raw = encoded.chunk(2, 1)
    ours = torch.distributions.Normal(mean, spread(raw))
    slow = (
        torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    )
    assert kl_to_standard_normal(encoded).item() == pytest.approx(slow.item(), rel=1e-5)


def test_kl_gradient():
    def double(
        encoded,
    ):  # the function itself works in single precision, as it must next to autocast
        mean, raw = encoded.chunk(2, 1)
        sigma = torch.nn.functional.softplus(raw - 5)
        return (-0.5 * (1 + 2 * sigma.log() - mean.square() - sigma.square())).sum(1).mean()

    encoded = draws(4, 6, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(double, encoded)
    ours = encoded.detach().float().requires_grad_()
    kl_to_standard_normal(ours).backward()
    double(encoded).backward()
    assert torch.allclose(ours.grad.double(), encoded.grad, rtol=1e-3, atol=1e-5)


def test_noise_is_standard_normal_and_belongs_to_the_row():
    rows = draws(2000, 50)
    noise = noise_of(rows, 0)
    # Six standard errors: other last bits of `rows` are other noise.
    assert noise.mean().abs() < 0.02
    assert noise.std() == pytest.approx(1.0, abs=0.015)
    assert (noise**4).mean() == pytest.approx(3.0, abs=0.2)
    correlation = torch.corrcoef(
        torch.stack(
            [
                noise.flatten(),
                noise_of(rows, 1).flatten(),
                rows.flatten(),
                noise.roll(1, 0).flatten(),
            ]
        )
    )
    assert (correlation - torch.eye(4)).abs().max() < 0.02
    assert torch.equal(noise_of(rows[7:9], 0), noise[7:9])
    nudged = rows.clone()
    nudged[:, 0] = torch.nextafter(nudged[:, 0], torch.tensor(9.0))  # the last bit of one number
    assert (noise_of(nudged, 0) - noise).abs().mean() > 1


def head(inference="sample"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VariationalHead(8, 4, 3, inference=inference)
        with torch.no_grad():
            model.encode.bias[4:] += 6  # noise worth noticing
        return model.eval()


def test_the_average_over_draws_tends_to_the_mean_code():
    noisy, features = head(), draws(5, 8)
    logits = []
    for draw in range(3000):
        noisy.draw = draw
        logits.append(noisy(features))
    seen, exact = torch.stack(logits), head("mean")(features)
    assert seen.std(0).min() > 0.1
    assert ((seen.mean(0) - exact).abs() < 4.5 * seen.std(0) / 3000**0.5).all()
    assert ((seen[0] - exact).abs() > 4.5 * seen.std(0) / 3000**0.5).any()


def test_training_always_draws_and_every_step_draws_anew():
    model, features = head("mean").train(), draws(5, 8)
    before = model(features)
    assert (before - model.eval()(features)).abs().mean() > 0.1
    with torch.no_grad():
        model.encode.weight += 1e-6
    assert (before - model.train()(features)).abs().mean() > 0.1


def test_it_replaces_the_head_and_pays_for_its_code():
    prepared = Mid(weight=0.5).prepare(target(), seed=0)
    assert prepared.head == "6.decode"
    assert prepared.module[6].encode.weight.shape == (128, 128)  # twice k = d / 2
    assert prepared.module[6].decode.weight.shape == (4, 64)
    assert Mid().taps(prepared) == ("6.encode",)
    batch = Batch(
        torch.zeros(1),
        torch.zeros(1).long(),
        torch.zeros(1, 4),
        {"6.encode": torch.zeros(1, 512)},
        TrainingProgress(0, 1),
    )
    (term,) = Mid(weight=0.5).losses(batch).values()
    assert (term.weight, term.value.item()) == (0.5, pytest.approx(1152.87, rel=1e-5))


def test_a_view_averages_the_noise_out_and_counts_every_pass():
    model = Mid().prepare(target(), seed=0)
    with torch.no_grad():
        model.module[6].encode.bias[64:] += 6
    model.module.eval()
    images = torch.rand(4, 3, 16, 16, generator=generator_for(0, "test"))
    view = model.view(["gradients"])
    once, often = view.logits(images), view.averaged(200).logits(images)
    assert torch.equal(once, view.logits(images))  # the same image, the same noise
    model.module[6].inference = "mean"
    exact = view.logits(images)
    assert (often - exact).abs().mean() < 0.3 * (once - exact).abs().mean()
    assert view.queries == 4 * 203
    assert model.module[6].draw == 0


def test_an_attack_on_noise_does_not_depend_on_its_batches():
    model = Mid().prepare(target(), seed=0)
    results = [
        invert(
            Gmi(steps=5, candidates=3, keep=3, batch=batch, critic_weight=0.0, samples=samples),
            model.view(["gradients"]),
            Assets(prior=prior()),
            seed=0,
        )
        for batch, samples in ((3, 1), (64, 1), (64, 2))
    ]
    assert torch.equal(results[0].images, results[1].images)
    assert not torch.equal(results[1].images, results[2].images)
    assert results[2].queries == 2 * results[1].queries


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"width": 1.5}, "width"),
        ({"inference": "off"}, "inference"),
        ({"width": 0.0}, r"weight 0.01 needs a code"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Mid(**bad)


def test_a_code_of_no_dimension_is_refused():
    with pytest.raises(
        ConfigError, match=r"mid.width must leave at least one of 128 dimensions, got 0.001"
    ):
        Mid(width=0.001).prepare(target(), seed=0)


def test_an_attack_keeps_the_averaging_of_the_view_it_is_given():
    model = Mid().prepare(target(), seed=0)
    attack = Gmi(steps=2, candidates=1, keep=1, critic_weight=0.0)
    plain, averaged = (
        invert(attack, view, Assets(prior=prior()), seed=0).queries
        for view in (model.view(["gradients"]), model.view(["gradients"]).averaged(8))
    )
    assert averaged == 8 * plain
    view = model.view(["labels"])
    assert view.averaged(2).averaged(3).key == f"{view.key}×6"


def test_a_label_view_of_noise_takes_the_commonest_label():
    model = Mid().prepare(target(), seed=0)
    with torch.no_grad():
        model.module[6].encode.bias[64:] += 9
    model.module.eval()
    images = torch.rand(6, 3, 16, 16, generator=generator_for(0, "test"))
    seen = []
    for draw in range(5):
        model.module[6].draw = draw
        seen.append(model.module(images).argmax(1))
    model.module[6].draw = 0
    assert len({tuple(labels.tolist()) for labels in seen}) > 1
    assert torch.equal(
        model.view(["labels"]).averaged(5).labels(images), torch.stack(seen).mode(0).values
    )
