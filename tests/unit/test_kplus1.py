"""KED-MI's GAN: shapes of the papers, minibatch discrimination and losses by hand, what it asks of the target, resuming, files."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.core.errors import AccessError, CheckpointError, ConfigError, RunError
from frostglass.core.types import Target
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.base import identity_hashes
from frostglass.priors.kplus1 import (
    Kplus1,
    MinibatchDiscrimination,
    discriminator_loss,
    entropy,
    feature_gap,
    log_made,
    log_real,
    training_scores,
)
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import generator_for, seeded
from worlds import KilledError, MemoryWork, NoWork, images, same_weights, target

SMALL = Kplus1(
    latent=5,
    width=4,
    steps=6,
    critic_steps=2,
    batch=8,
    kernels=3,
    kernel_size=2,
    checkpoint_every=2,
    average=0.5,
)
PUBLIC = images(40, 5, names="stranger")
MODES = ["eval", "train"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def shapes(module):
    return [tuple(p.shape) for p in module.parameters() if p.ndim == 4]


def test_published_shapes_at_64_pixels():
    generator, critic = Kplus1().networks((3, 64, 64), 1000)
    assert shapes(generator) == shapes(Wgan().networks((3, 64, 64))[0])
    assert shapes(critic) == [(64, 3, 5, 5), (128, 64, 5, 5), (256, 128, 5, 5), (256, 256, 3, 3)]
    assert tuple(critic.resemblance.weight.shape) == (4096, 64, 50)
    assert tuple(critic.head.weight.shape) == (1000, 4096 + 64)
    features, logits = critic.judge(torch.rand(2, 3, 64, 64, generator=rng()))
    assert features.shape == (2, 4096)
    assert logits.shape == (2, 1000)
    norms = [layer for layer in critic.features if isinstance(layer, nn.InstanceNorm2d)]
    assert [norm.affine for norm in norms] == [True] * 4


def test_published_shapes_at_32_pixels():
    generator, critic = Kplus1().networks((1, 32, 32), 5)
    assert generator.eval()(torch.zeros(1, 100)).shape == (1, 1, 32, 32)
    assert shapes(critic) == [(64, 1, 5, 5), (128, 64, 5, 5), (256, 128, 5, 5)]
    assert tuple(critic.head.weight.shape) == (5, 4096 + 64)
    assert critic.judge(torch.rand(2, 1, 32, 32, generator=rng()))[0].shape == (2, 4096)


@pytest.mark.parametrize(
    ("size", "features"), [(16, 2 * 8 * 16), (32, 4 * 8 * 16), (64, 4 * 8 * 16), (128, 4 * 8 * 16)]
)
def test_every_size_ends_at_four_by_four(size, features):
    generator, critic = Kplus1(width=4, critic_width=8, kernels=2, kernel_size=2).networks(
        (3, size, size), 3
    )
    pictures = generator.eval()(torch.randn(2, 100, generator=rng()))
    assert critic.judge(pictures)[0].shape == (2, features)
    assert critic(pictures).shape == (2, 1)


def test_networks_that_cannot_be():
    with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels, got 40×40"):
        SMALL.networks((3, 40, 40), 4)
    with pytest.raises(ConfigError, match="got 1: it needs a target of at least 2"):
        SMALL.networks((3, 16, 16), 1)


def slow_resemblance(rows, others, skip_own):
    made = torch.zeros(rows.shape[:2], dtype=rows.dtype)
    for i in range(len(rows)):
        for j in range(len(others)):
            for b in range(rows.shape[1]):
                if not (skip_own and i == j):
                    made[i, b] += math.exp(
                        -sum(
                            abs(p - q)
                            for p, q in zip(rows[i, b].tolist(), others[j, b].tolist(), strict=True)
                        )
                    )
    return made


def small_discrimination():
    layer = MinibatchDiscrimination(7, 3, 2, others=4).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(7, 3, 2, generator=rng(1)) * 0.3)
        layer.reference.copy_(torch.randn(4, 3, 2, generator=rng(2)))
    return layer, torch.randn(5, 7, dtype=torch.double, generator=rng(3))


def test_minibatch_discrimination_against_a_slow_loop():
    layer, features = small_discrimination()
    rows = torch.einsum("nf,fbs->nbs", features, layer.weight).detach()
    with torch.no_grad():
        assert torch.allclose(
            layer.train()(features), slow_resemblance(rows, rows, True), rtol=0, atol=1e-12
        )
        assert torch.allclose(
            layer.eval()(features),
            slow_resemblance(rows, layer.reference, False),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("training", [True, False])
def test_minibatch_discrimination_gradients(training):
    layer, features = small_discrimination()
    layer.train(training)
    # `gradcheck` moves its inputs in place, so the layer's own weight can be one of them
    assert torch.autograd.gradcheck(
        lambda given, _: layer(given), (features.requires_grad_(), layer.weight)
    )


def test_the_published_start_of_minibatch_discrimination_says_nothing():
    """What `Differs` tells: rows start so far apart that every exp(-distance) is zero, and so is its gradient."""
    with seeded(0, "tests", "kplus1"):
        critic = Kplus1().networks((3, 32, 32), 4)[1]
    with torch.no_grad():
        features = critic.features(images(16, 4, shape=(3, 32, 32)).floats())
        rows = critic.resemblance.project(features)
        assert (rows[0] - rows[1]).abs().sum(1).min() > 500
        assert critic.train().resemblance(features).abs().max() == 0


def logits(seed, rows=6, classes=4, scale=3.0):
    return scale * torch.randn(rows, classes, dtype=torch.double, generator=rng(seed))


def test_log_real_is_what_z_implies():
    a = logits(0)
    z = a.exp().sum(1)
    assert torch.allclose(log_real(a), (z / (1 + z)).log())
    assert torch.allclose(log_made(a), (1 / (1 + z)).log())
    lse = a.logsumexp(1)
    assert torch.allclose(log_real(a), -nn.functional.softplus(-lse))
    assert torch.allclose(log_made(a), -nn.functional.softplus(lse))
    assert torch.allclose(-log_made(a) - lse, -log_real(a))  # sp(lse) - lse = sp(-lse)
    assert log_real(torch.full((1, 3), -1e4)).item() == pytest.approx(
        -1e4 + math.log(3), rel=1e-6
    )  # no overflow either way
    assert log_real(torch.full((1, 3), 1e4)).item() == 0.0
    assert log_made(torch.full((1, 3), 1e4)).item() == pytest.approx(-1e4 - math.log(3), rel=1e-6)


def test_critic_is_log_real():
    critic = SMALL.networks((3, 16, 16), 4)[1].eval()
    pictures = PUBLIC.floats(torch.arange(6))
    z = critic.judge(pictures)[1].exp().sum(1)
    assert torch.allclose(critic(pictures)[:, 0], (z / (1 + z)).log(), atol=1e-6)


def test_discriminator_loss_against_a_slow_reference():
    soft, labelled, real, fake = logits(0).softmax(1), logits(1), logits(2), logits(3)
    slow = 0.0
    for i in range(6):
        slow -= sum(soft[i, k].item() * labelled[i].log_softmax(0)[k].item() for k in range(4)) / 6
        z_real, z_fake = real[i].exp().sum().item(), fake[i].exp().sum().item()
        slow -= 0.5 * math.log(z_real / (1 + z_real)) / 6 + 0.5 * math.log(1 / (1 + z_fake)) / 6
    assert discriminator_loss(soft, labelled, real, fake).item() == pytest.approx(slow, rel=1e-12)


def test_generator_terms_against_slow_references():
    a = logits(4)
    expected = [-sum(p * math.log(p) for p in row.softmax(0).tolist()) for row in a]
    assert entropy(a).tolist() == pytest.approx(expected, rel=1e-12)
    made, real = logits(5, 3, 4), logits(6, 5, 4)
    gaps = [made[:, j].sum().item() / 3 - real[:, j].sum().item() / 5 for j in range(4)]
    assert feature_gap(made, real, "l1").item() == pytest.approx(sum(map(abs, gaps)) / 4, rel=1e-12)
    assert feature_gap(made, real, "l2").item() == pytest.approx(
        sum(gap**2 for gap in gaps), rel=1e-12
    )


@pytest.mark.parametrize("form", ["l1", "l2"])
def test_loss_gradients(form):
    assert torch.autograd.gradcheck(
        lambda made, real: feature_gap(made, real, form),
        (logits(5).requires_grad_(), logits(6).requires_grad_()),
    )
    given = tuple(logits(seed).requires_grad_() for seed in (1, 2, 3))
    assert torch.autograd.gradcheck(lambda *a: discriminator_loss(logits(0).softmax(1), *a), given)
    assert torch.autograd.gradcheck(entropy, (logits(4).requires_grad_(),))


def one_step(monkeypatch, method):
    """The losses of a training's first step, and what its networks were then."""
    import frostglass.priors.kplus1 as module

    seen = {}

    def instead(
        name, generator, critic, schedule, *, critic_loss, generator_loss, sample, seed, work
    ):
        with torch.no_grad():
            critic.features[0].weight.mul_(3)  # something other than a fresh network's
        seen.update(generator=generator, critic=critic, critic_loss=critic_loss(rng(7)).item())
        seen["generator_loss"] = generator_loss(rng(8)).item()
        return generator.eval()

    monkeypatch.setattr(module, "train_in_turns", instead)
    classifier = target()
    method.train(PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork())
    return seen, classifier


def test_the_losses_of_a_step_are_the_published_ones(monkeypatch):
    seen, classifier = one_step(monkeypatch, replace(SMALL, entropy_weight=0.5))
    generator, critic = seen["generator"].train(), seen["critic"].train()
    classifier.module.eval()
    with torch.no_grad():
        numbers = rng(7)
        labelled = PUBLIC.floats(torch.randint(40, (8,), generator=numbers))
        fake = generator(torch.randn(8, 5, generator=numbers))
        real = PUBLIC.floats(torch.randint(40, (8,), generator=numbers))
        soft = classifier.module(labelled).softmax(1)
        slow = discriminator_loss(
            soft, *(critic.judge(pictures)[1] for pictures in (labelled, real, fake))
        )
        assert seen["critic_loss"] == pytest.approx(slow.item(), rel=1e-5)
        numbers = rng(8)
        made, said = critic.judge(generator(torch.randn(8, 5, generator=numbers)))
        real = critic.judge(PUBLIC.floats(torch.randint(40, (8,), generator=numbers)))[0]
        slow = (made.mean(0) - real.mean(0)).abs().mean() + 0.5 * sum(
            entropy(said[i : i + 1])[0] for i in range(8)
        )
        assert seen["generator_loss"] == pytest.approx(slow.item(), rel=1e-5)


def test_training_mode_uses_the_batch_and_draws_dropout():
    classifier = target()
    view, pictures = classifier.view(["scores"]), PUBLIC.floats(torch.arange(8))
    made = training_scores(view, pictures, rng(0))
    assert torch.equal(made, training_scores(view, pictures, rng(0)))
    assert not torch.equal(made, training_scores(view, pictures, rng(1)))  # dropout
    classifier.module[3].p = 0.0
    whole, half = (
        training_scores(view, pictures, rng(0)),
        training_scores(view, pictures[:4], rng(0)),
    )
    assert not torch.allclose(whole[:4], half, atol=1e-3)  # batch statistics


@pytest.mark.parametrize("mode", MODES)
def test_the_target_is_left_as_it_was_and_queries_are_counted(mode):
    classifier = target()
    classifier.module[1].eval()  # a mixture of modes
    before = {name: tensor.clone() for name, tensor in classifier.module.state_dict().items()}
    modes = [part.training for part in classifier.module.modules()]
    view, rng = classifier.view(["scores"]), torch.get_rng_state()
    made = replace(SMALL, target_mode=mode).train(PUBLIC, view, seed=0, work=NoWork())
    assert all(
        torch.equal(before[name], tensor) for name, tensor in classifier.module.state_dict().items()
    )
    assert [part.training for part in classifier.module.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in classifier.module.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    assert view.queries == 40 + (6 * 2 * 8 if mode == "train" else 0)
    assert (made.tied_to, made.classes, made.condition) == ("target", 4, "")


def test_the_two_modes_differ():
    classifier = target()
    made = [
        replace(SMALL, target_mode=mode).train(
            PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork()
        )
        for mode in MODES
    ]
    assert not same_weights(made[0].critic, made[1].critic)


@pytest.mark.parametrize("mode", MODES)
def test_resumes_to_the_same_bytes(mode, tmp_path):
    method, classifier = replace(SMALL, target_mode=mode), target()
    whole = method.train(PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork())
    write_prior(whole, tmp_path / "whole.safetensors")
    for died_after in (1, 2):
        work = MemoryWork(saves_before_death=died_after)
        with pytest.raises(KilledError):
            method.train(PUBLIC, classifier.view(["scores"]), seed=0, work=work)
        work.left = None
        resumed = method.train(PUBLIC, classifier.view(["scores"]), seed=0, work=work)
        write_prior(resumed, tmp_path / "resumed.safetensors")
        assert (tmp_path / "whole.safetensors").read_bytes() == (
            tmp_path / "resumed.safetensors"
        ).read_bytes()


def test_file_round_trip(tmp_path):
    made = SMALL.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork())
    write_prior(made, tmp_path / "p.safetensors")
    read = read_prior(tmp_path / "p.safetensors")
    assert same_weights(made.generator, read.generator)
    assert same_weights(made.critic, read.critic)
    assert read.critic.resemblance.reference.abs().sum() > 0
    assert (read.tied_to, read.classes, read.latent) == ("target", 4, 5)
    pictures = PUBLIC.floats(torch.arange(16))
    assert torch.equal(made.realism(pictures), read.realism(pictures))


def test_the_trained_critic_does_not_look_at_company():
    method = replace(SMALL, steps=2, kernels=16, kernel_size=1)
    critic = method.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork()).critic

    def opinions_and_slopes(pictures):
        pictures = pictures.clone().requires_grad_()
        opinions = critic(pictures)
        return opinions.detach(), torch.autograd.grad(opinions.sum(), pictures)[0]

    pictures = PUBLIC.floats(torch.arange(32))
    assert (
        critic.resemblance(critic.features(pictures)).abs().max() > 1e-3
    )  # the comparison is alive
    halves = [
        torch.cat(parts)
        for parts in zip(
            opinions_and_slopes(pictures[:16]), opinions_and_slopes(pictures[16:]), strict=True
        )
    ]
    for whole in (
        opinions_and_slopes(pictures),
        [part.flip(0) for part in opinions_and_slopes(pictures.flip(0))],
    ):
        assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))
    critic.train()
    assert not torch.allclose(
        critic(pictures)[:16], critic(pictures[:16]), atol=1e-4
    )  # as published, it looks


def test_reference_is_what_the_trained_generator_makes():
    made = SMALL.train(PUBLIC, target().view(["scores"]), seed=3, work=NoWork())
    latents = torch.randn(7, 5, generator=generator_for(3, "kplus1", "reference"))
    with torch.no_grad():
        rows = torch.einsum(
            "nf,fbs->nbs",
            made.critic.features(made.images(latents)),
            made.critic.resemblance.weight,
        )
    assert torch.allclose(made.critic.resemblance.reference, rows, rtol=1e-4, atol=1e-4)


def test_starts_from_a_prior_file(tmp_path):
    path = tmp_path / "begun.safetensors"
    others = images(10, 2, names="elsewhere")
    begun = Wgan(latent=5, width=4, steps=2, critic_steps=1, batch=8).train(
        others, None, seed=0, work=NoWork()
    )
    write_prior(begun, path)
    method = replace(SMALL, start=str(path), steps=1, lr=1e-9, average=0.0)
    assert method.files() == [path]
    assert SMALL.files() == []
    made = method.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork())
    assert all(
        torch.allclose(p, q, atol=1e-6)
        for p, q in zip(made.generator.parameters(), begun.generator.parameters(), strict=True)
    )
    known = {f"elsewhere {i}" for i in range(2)} | {f"stranger {i}" for i in range(5)}
    assert torch.equal(made.seen_identities, identity_hashes(known))  # the people of both trainings
    assert made.tied_to == "target"


def test_starts_that_do_not_fit(tmp_path):
    path = tmp_path / "begun.safetensors"
    write_prior(
        Wgan(latent=5, width=8, steps=1, critic_steps=1, batch=8).train(
            PUBLIC, None, seed=0, work=NoWork()
        ),
        path,
    )
    told = "the wgan generator of latent 5, width 8 and pictures of 3×16×16, expected latent 5, width 4 and pictures of 3×16×16: set prior.latent"
    with pytest.raises(ConfigError, match=told):
        replace(SMALL, start=str(path)).train(
            PUBLIC, target().view(["scores"]), seed=0, work=NoWork()
        )
    with pytest.raises(ConfigError, match=r"latent 5, width 8 .*, expected latent 6, width 8"):
        replace(SMALL, start=str(path), width=8, latent=6).beginning((3, 16, 16))
    with pytest.raises(
        CheckpointError, match="faces32 makes pictures of 32×32 pixels, the data has 16×16"
    ):
        Kplus1(start="faces32", width=48).beginning((3, 16, 16))
    with pytest.raises(ConfigError, match="no embedded prior named 'faces3'"):
        Kplus1(start="faces3").files()
    assert Kplus1(start="faces32", width=48).beginning((3, 32, 32)) is not None
    write_prior(SMALL.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork()), path)
    with pytest.raises(CheckpointError, match="fitted to one target"):
        replace(SMALL, start=str(path)).beginning((3, 16, 16))


def test_targets_that_cannot_be_used():
    with pytest.raises(ConfigError, match="kplus1 is fitted to one target"):
        SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    with pytest.raises(AccessError, match="not scores"):
        SMALL.train(PUBLIC, target().view(["labels"]), seed=0, work=NoWork())
    classifier = target()
    with torch.no_grad():
        classifier.module[6].bias[2] += 1e4
    for mode in MODES:
        with pytest.raises(RunError, match="the target says class 2 of all 40 public pictures"):
            replace(SMALL, target_mode=mode).train(
                PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork()
            )


def test_pictures_of_another_size_than_the_targets():
    classifier = target(shape=(1, 32, 32))
    made = replace(SMALL, steps=1).train(PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork())
    assert made.image_shape == (3, 16, 16)


def test_learns_what_the_target_tells_apart():
    """Bright bands are the classes of a target made by hand: a fresh generator's pictures say nothing to it, a trained one's do, in every class."""
    public = images(80, 4, names="stranger")
    module = nn.Sequential(nn.AvgPool2d((4, 16)), nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():  # twenty times the brightness of each band
        module[2].weight.copy_(torch.eye(4).repeat(1, 3) * 20 / 3)
        module[2].bias.zero_()
    view = Target(
        module=module, classes=("a", "b", "c", "d"), image_shape=(3, 16, 16), head="2", key="bands"
    ).view(["scores"])
    assert (view.labels(public.floats()) == public.labels).all()
    method = Kplus1(
        latent=5, width=8, steps=60, critic_steps=2, batch=16, lr=2e-3, kernels=2, kernel_size=2
    )
    trained = method.train(public, view, seed=0, work=NoWork())
    fresh = replace(method, steps=1, lr=1e-9).train(public, view, seed=0, work=NoWork())
    with torch.no_grad():
        said, before = (
            module(prior.images(torch.randn(200, 5, generator=rng()))) for prior in (trained, fresh)
        )
    assert entropy(before).mean() > 1.3  # ln 4 = 1.386
    assert entropy(said).mean() < 0.7 * entropy(before).mean()
    assert said.argmax(1).bincount(minlength=4).min() >= 10
    real, noise = public.floats(torch.arange(16)), torch.rand(16, 3, 16, 16, generator=rng())
    assert trained.realism(real).mean() > trained.realism(noise).mean() + 1


def test_bad_parameters():
    for wrong in (
        {"matching": "l3"},
        {"entropy_weight": float("nan")},
        {"batch": 1},
        {"kernels": 0},
        {"lr": float("inf")},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Kplus1(**wrong)
    assert Kplus1().tied
