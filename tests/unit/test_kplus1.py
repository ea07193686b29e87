"""KED-MI's GAN: what it asks of the target, resuming, files, starts, and that it learns."""

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
    discriminator_loss,
    entropy,
    training_scores,
)
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import generator_for
from worlds import (
    PUBLIC,
    SMALL_GAN,
    KilledError,
    MemoryWork,
    NoWork,
    images,
    rng,
    same_weights,
    target,
)

SMALL = Kplus1(**SMALL_GAN, kernels=3, kernel_size=2)
MODES = ["eval", "train"]


def one_step(monkeypatch, method):
    """The losses of a training's first step, and what its networks were then."""
    seen = {}

    def one_step_only(training, work):
        with torch.no_grad():
            training.critic.features[0].weight.mul_(3)  # other than a fresh network's
        seen.update(generator=training.generator, critic=training.critic)
        seen["critic_loss"] = training.critic_loss(rng(7)).item()
        seen["generator_loss"] = training.generator_loss(rng(8)).item()
        return training.generator.eval()

    monkeypatch.setattr("frostglass.priors._gan.train_in_turns", one_step_only)
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
            soft, *(critic.outputs(images)[1] for images in (labelled, real, fake))
        )
        assert seen["critic_loss"] == pytest.approx(slow.item(), rel=1e-5)
        numbers = rng(8)
        made, said = critic.outputs(generator(torch.randn(8, 5, generator=numbers)))
        real = critic.outputs(PUBLIC.floats(torch.randint(40, (8,), generator=numbers)))[0]
        slow = (made.mean(0) - real.mean(0)).abs().mean() + 0.5 * sum(
            entropy(said[i : i + 1])[0] for i in range(8)
        )
        assert seen["generator_loss"] == pytest.approx(slow.item(), rel=1e-5)


def test_training_mode_uses_the_batch_and_draws_dropout():
    classifier = target()
    view, images = classifier.view(["scores"]), PUBLIC.floats(torch.arange(8))
    made = training_scores(view, images, rng(0))
    assert torch.equal(made, training_scores(view, images, rng(0)))
    assert not torch.equal(made, training_scores(view, images, rng(1)))  # dropout
    classifier.module[3].p = 0.0
    whole, half = (
        training_scores(view, images, rng(0)),
        training_scores(view, images[:4], rng(0)),
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
    images = PUBLIC.floats(torch.arange(16))
    assert torch.equal(made.realism(images), read.realism(images))


def test_the_trained_critic_does_not_look_at_company():
    method = replace(SMALL, steps=2, kernels=16, kernel_size=1)
    critic = method.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork()).critic

    def opinions_and_slopes(images):
        images = images.clone().requires_grad_()
        opinions = critic(images)
        return opinions.detach(), torch.autograd.grad(opinions.sum(), images)[0]

    images = PUBLIC.floats(torch.arange(32))
    assert critic.resemblance(critic.features(images)).abs().max() > 1e-3  # the comparison is alive
    halves = [
        torch.cat(parts)
        for parts in zip(
            opinions_and_slopes(images[:16]), opinions_and_slopes(images[16:]), strict=True
        )
    ]
    for whole in (
        opinions_and_slopes(images),
        [part.flip(0) for part in opinions_and_slopes(images.flip(0))],
    ):
        assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))
    critic.train()
    assert not torch.allclose(
        critic(images)[:16], critic(images[:16]), atol=1e-4
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
    told = (
        "the wgan generator of latent 5, width 8 and images of 3×16×16, expected latent 5, "
        "width 4 and images of 3×16×16: set prior.latent"
    )
    with pytest.raises(ConfigError, match=told):
        replace(SMALL, start=str(path)).train(
            PUBLIC, target().view(["scores"]), seed=0, work=NoWork()
        )
    with pytest.raises(ConfigError, match=r"latent 5, width 8 .*, expected latent 6, width 8"):
        replace(SMALL, start=str(path), width=8, latent=6).starting_prior((3, 16, 16))
    with pytest.raises(
        CheckpointError, match="faces32 makes images of 32×32 pixels, the data has 16×16"
    ):
        Kplus1(start="faces32", width=48).starting_prior((3, 16, 16))
    with pytest.raises(ConfigError, match="no embedded prior named 'faces3'"):
        Kplus1(start="faces3").files()
    assert Kplus1(start="faces32", width=48).starting_prior((3, 32, 32)) is not None
    write_prior(SMALL.train(PUBLIC, target().view(["scores"]), seed=0, work=NoWork()), path)
    with pytest.raises(CheckpointError, match="fitted to one target"):
        replace(SMALL, start=str(path)).starting_prior((3, 16, 16))


def test_targets_that_cannot_be_used():
    with pytest.raises(ConfigError, match="kplus1 is fitted to one target"):
        SMALL.train(PUBLIC, None, seed=0, work=NoWork())
    with pytest.raises(AccessError, match="not scores"):
        SMALL.train(PUBLIC, target().view(["labels"]), seed=0, work=NoWork())
    classifier = target()
    with torch.no_grad():
        classifier.module[6].bias[2] += 1e4
    for mode in MODES:
        with pytest.raises(RunError, match="the target gives class 2 to all 40 public images"):
            replace(SMALL, target_mode=mode).train(
                PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork()
            )


def test_images_of_another_size_than_the_targets():
    classifier = target(shape=(1, 32, 32))
    made = replace(SMALL, steps=1).train(PUBLIC, classifier.view(["scores"]), seed=0, work=NoWork())
    assert made.image_shape == (3, 16, 16)


def test_learns_what_the_target_tells_apart():
    """The target's classes are bright bands: only a trained generator's images show them all."""
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
    assert entropy(said).mean() < 0.8 * entropy(before).mean()  # ten seeds: 0.32 to 0.54
    assert said.argmax(1).bincount(minlength=4).min() >= 3  # ten seeds: 10 to 47
    real, noise = public.floats(torch.arange(16)), torch.rand(16, 3, 16, 16, generator=rng())
    assert trained.realism(real).mean() > trained.realism(noise).mean() + 1  # 3.5 to 5.0


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
