"""The conditional prior: losses by hand, the choice of examples, guidance, resuming, files."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from frostglass.core.errors import AccessError, ConfigError, DataError, RunError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target
from frostglass.data._augment import DRAWS, viewed
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.base import priors
from frostglass.priors.conditional import Conditional, hinge, most_confident
from frostglass.runtime.seeding import generator_for, seeded
from worlds import (
    PUBLIC,
    SHAPE,
    SMALL_GAN,
    KilledError,
    MemoryWork,
    NoWork,
    images,
    rng,
    same_weights,
    target,
)

SMALL = Conditional(**SMALL_GAN, top=4)


@pytest.fixture(autouse=True)
def networks_begin_alike():
    """Seed initialisers, which draw from the global generator: tests must not depend on order."""
    with seeded(0, "tests", "conditional"):
        yield


def bands(classes: int = 4) -> Target:
    """A target that is surest of class k where band k of the image is brighter than the rest."""
    pick = nn.Linear(classes, classes)
    with torch.no_grad():
        pick.weight.copy_(20 * torch.eye(classes) - 20 / classes)
        pick.bias.zero_()
    module = nn.Sequential(nn.AdaptiveAvgPool2d((classes, 1)), Grey(), nn.Flatten(), pick)
    return Target(
        module=module,
        classes=tuple(map(str, range(classes))),
        image_shape=SHAPE,
        head="3",
        key="bands",
    )


class Grey(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.fixture(scope="module")
def trained() -> tuple[Prior, Target, Images]:
    """A prior trained on images of bright bands, for a target that tells them apart."""
    public = images(60, 4, names="stranger")
    victim = bands()
    method = Conditional(
        latent=4, width=4, top=8, steps=60, critic_steps=1, batch=16, lr=1e-2, guidance=1.0
    )
    return method.train(public, victim.view(["gradients"]), seed=0, work=NoWork()), victim, public


# Losses and examples


def test_hinge_against_a_slow_reference():
    real, fake = torch.tensor([2.0, 0.5, -1.0, 1.0]), torch.tensor([-2.0, -0.5, 3.0, -1.0])
    slow = (
        sum(max(0.0, 1 - r) for r in real.tolist()) / 4
        + sum(max(0.0, 1 + f) for f in fake.tolist()) / 4
    )
    assert hinge(real, fake).item() == pytest.approx(slow)
    assert slow == (0.5 + 2) / 4 + (0.5 + 4) / 4
    points = [torch.randn(5, generator=rng(s), dtype=torch.double).requires_grad_() for s in (0, 1)]
    assert torch.autograd.gradcheck(hinge, points)


def test_most_confident_against_a_slow_reference():
    scores = torch.rand(30, 4, generator=rng()).mul(8).round().div(8)  # full of ties
    slow = [
        sorted(range(30), key=lambda row, k=k: (-scores[row, k].item(), row))[:7] for k in range(4)
    ]
    assert most_confident(scores, 7).tolist() == slow


def test_examples_are_what_the_target_likes_best(monkeypatch):
    monkeypatch.setattr("frostglass.priors.conditional.CHUNK", 16)  # the last chunk is smaller
    victim = target()
    view = victim.view(["scores"])
    victim.module.eval()
    chosen, confidence = SMALL.examples(PUBLIC, view)
    assert view.queries == 40
    assert chosen.shape == confidence.shape == (4, 4)
    with torch.no_grad():
        scores = torch.cat(
            [victim.module(PUBLIC.floats(slice(i, i + 1))).softmax(1) for i in range(40)]
        )
    for label in range(4):
        best = sorted(range(40), key=lambda row, label=label: -scores[row, label].item())[:4]
        assert chosen[label].tolist() == best
        torch.testing.assert_close(confidence[label], scores[best, label])


def test_one_image_may_serve_every_class():
    chosen, _ = Conditional(top=40).examples(PUBLIC, target().view(["scores"]))
    assert all(sorted(row) == list(range(40)) for row in chosen.tolist())


def test_too_few_images():
    with pytest.raises(
        DataError,
        match=r"conditional\.top \(41\) is more than the 40 public images there are: lower it",
    ):
        Conditional(top=41).examples(PUBLIC, target().view(["scores"]))


def test_classes_that_nothing_resembles():
    victim = bands(5)
    with torch.no_grad():
        victim.module[3].bias[1:] -= 50
    view = victim.view(["gradients"])
    with pytest.raises(
        RunError,
        match=(
            r"4 of 5 classes have no public image of probability 0.5 or more, such as class 1 "
            r"\(at most .*\), 2 .*, 3 \(.*\): lower"
        ),
    ):
        replace(SMALL, least=0.5).train(PUBLIC, view, work=NoWork())
    with torch.no_grad():
        confidence = SMALL.examples(PUBLIC, view)[1]  # published: whatever is nearest
    assert confidence[1:].max() < 1e-6


def test_scores_that_are_not_finite_are_refused():
    victim = target()
    with torch.no_grad():
        victim.module[6].bias[2] = torch.inf
    with pytest.raises(RunError, match="scores of some public images are not finite"):
        SMALL.train(PUBLIC, victim.view(["gradients"]), work=NoWork())


class Spy:
    """Stands in for the training loop: keeps what it was given."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr("frostglass.priors._gan.train_in_turns", self)

    def __call__(self, training, work):
        self.training, self.generator, self.critic = training, training.generator, training.critic
        self.critic.eval()  # no power iteration, so that the losses can be computed again
        self.losses = {
            "critic_loss": training.critic_loss(generator_for(0, "critic_loss")).detach(),
            "generator_loss": training.generator_loss(generator_for(0, "generator_loss")).detach(),
        }
        return copy.deepcopy(self.generator)  # the prior's is put into evaluation mode


@pytest.mark.parametrize("loss", ["margin", "ce", "poincare"])
def test_generator_loss_against_a_slow_reference(monkeypatch, loss):
    spy, victim = Spy(monkeypatch), target()
    method = replace(SMALL, loss=loss, guidance=0.3)
    method.train(PUBLIC, victim.view(["gradients"]), seed=0, work=NoWork())
    roll = generator_for(0, "generator_loss")
    labels = torch.randint(4, (8,), generator=roll)
    latents = torch.randn(8, 5, generator=roll)
    draws = torch.rand(8, DRAWS, generator=roll)
    victim.module.eval()
    with torch.no_grad():
        images = spy.generator(latents, labels)
        logits = victim.module(viewed(images, draws, jitter_share=0.5))
        judged = spy.critic(images, labels)
    slow = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        rest = torch.cat([row[:label], row[label + 1 :]])
        u, v = row / row.abs().sum(), (torch.eye(4)[label] - 1e-4).clamp(0, 1)
        slow.append(
            {
                "margin": rest.max() - row[label],
                "ce": row.exp().sum().log() - row[label],
                "poincare": torch.acosh(
                    1 + 2 * (u - v).pow(2).sum() / ((1 - u.pow(2).sum()) * (1 - v.pow(2).sum()))
                ),
            }[loss]
        )
    expected = -judged.mean() + 0.3 * torch.stack(slow).mean()
    assert spy.losses["generator_loss"].item() == pytest.approx(expected.item(), rel=1e-4)


def test_critic_loss_against_a_slow_reference(monkeypatch):
    spy, victim = Spy(monkeypatch), target()
    view = victim.view(["gradients"])
    SMALL.train(PUBLIC, view, seed=0, work=NoWork())
    roll = generator_for(0, "critic_loss")
    wanted, labels = (torch.randint(4, (8,), generator=roll) for _ in range(2))
    places = torch.randint(4, (8,), generator=roll)
    victim.module.eval()
    chosen = SMALL.examples(PUBLIC, view)[0]
    rows = torch.stack([chosen[y, place] for y, place in zip(labels, places, strict=True)])
    noise = torch.rand(8, *SHAPE, generator=roll) / 256
    latents = torch.randn(8, 5, generator=roll)
    with torch.no_grad():
        real = spy.critic(PUBLIC.floats(rows) + noise, labels)
        fake = spy.critic(spy.generator(latents, wanted), wanted)
    expected = (
        sum(max(0.0, 1 - r) for r in real.tolist()) / 8
        + sum(max(0.0, 1 + f) for f in fake.tolist()) / 8
    )
    assert spy.losses["critic_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_the_schedule_is_the_published_one(monkeypatch):
    spy, victim = Spy(monkeypatch), target()
    Conditional(latent=5, width=4, batch=4).train(PUBLIC, victim.view(["gradients"]), work=NoWork())
    method = spy.training.method
    published = (30_000, 5, 2e-4, (0.0, 0.9))
    assert (method.steps, method.critic_steps, method.lr, method.betas) == published
    assert method.generator_first
    assert (method.average, method.cooldown) == (0, 0)


def test_the_critic_is_not_taught_to_move_the_generator(monkeypatch):
    spy = Spy(monkeypatch)
    SMALL.train(PUBLIC, target().view(["gradients"]), work=NoWork())
    spy.training.critic_loss(rng()).backward()
    assert all(p.grad is None for p in spy.generator.parameters())
    assert all(p.grad is not None for p in spy.critic.parameters())
    spy.training.generator_loss(rng()).backward()
    assert all(p.grad is not None for p in spy.generator.parameters())


# Training


@pytest.mark.parametrize("died_after", [1, 2])
def test_resumes_to_the_same_bytes_and_queries(died_after):
    untouched, killed = target().view(["gradients"]), target().view(["gradients"])
    whole = SMALL.train(PUBLIC, untouched, seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        SMALL.train(PUBLIC, killed, seed=0, work=work)
    assert any(
        "parametrizations.weight.0._u" in name for name in work.kept["conditional"][0]
    )  # power iterations go on where they were
    work.left, fresh = None, target().view(["gradients"])
    resumed = SMALL.train(PUBLIC, fresh, seed=0, work=work)
    assert same_weights(whole.generator, resumed.generator)
    assert whole.info == resumed.info
    assert fresh.queries == untouched.queries


def test_queries_are_the_public_images_and_one_batch_a_step():
    for guidance, samples, expected in (
        (0.2, 1, 40 + 6 * 8),
        (0.2, 3, 3 * (40 + 6 * 8)),
        (0.0, 1, 40),
    ):
        view = target().view(["gradients"])
        view.queries = 7
        replace(SMALL, guidance=guidance).train(PUBLIC, view.averaged(samples), work=NoWork())
        assert view.queries == 7 + expected


def test_the_target_and_the_global_generator_are_left_alone():
    victim = target()
    before = {name: tensor.clone() for name, tensor in victim.module.state_dict().items()}
    modes = [part.training for part in victim.module.modules()]
    random = torch.random.get_rng_state()
    SMALL.train(PUBLIC, victim.view(["gradients"]), seed=0, work=NoWork())
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in victim.module.state_dict().items()
    )
    assert [part.training for part in victim.module.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in victim.module.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_the_seed_matters():
    one, again, other = (
        SMALL.train(PUBLIC, target().view(["gradients"]), seed=seed, work=NoWork())
        for seed in (0, 0, 1)
    )
    assert same_weights(one.generator, again.generator)
    assert not same_weights(one.generator, other.generator)


def test_what_it_needs():
    assert Conditional.tied
    assert priors.get("conditional") is Conditional
    with pytest.raises(
        ConfigError,
        match=r"conditional is fitted to one target and got no view of it: pass target\.view",
    ):
        SMALL.train(PUBLIC, None, work=NoWork())
    with pytest.raises(AccessError, match="not gradients"):
        SMALL.train(PUBLIC, target().view(["scores"]), work=NoWork())
    with pytest.raises(
        ConfigError, match="loss: expected 'margin', 'ce' or 'poincare', got 'logit'"
    ):
        Conditional(loss="logit")
    with pytest.raises(ConfigError, match="least: expected at most 1"):
        Conditional(least=1.5)


def test_divergence_is_reported():
    with pytest.raises(RunError, match="conditional: the loss is not finite at step"):
        replace(SMALL, steps=50, lr=1e30, average=0.0).train(
            PUBLIC, target().view(["gradients"]), work=NoWork()
        )


def test_what_is_returned_and_read_back(trained, tmp_path):
    made, _, public = trained
    assert (made.condition, made.classes, made.tied_to, made.latent, made.critic) == (
        "label",
        4,
        "bands",
        4,
        None,
    )
    assert made.image_shape == public.shape
    assert json.loads(json.dumps(dict(made.info))) == made.info
    confidence = made.info["examples"]
    assert 0 < confidence["least_confidence"] <= confidence["mean_confidence"] <= 1
    write_prior(made, tmp_path / "p.safetensors")
    read = read_prior(tmp_path / "p.safetensors")
    assert same_weights(made.generator, read.generator)
    assert not read.generator.training
    assert read.critic is None
    assert (read.condition, read.classes, read.tied_to, read.info) == (
        "label",
        4,
        "bands",
        made.info,
    )
    latents, labels = torch.randn(16, 4, generator=rng()), torch.arange(16) % 4
    assert torch.equal(made.images(latents, labels), read.images(latents, labels))
    with pytest.raises(ConfigError, match="got no labels"):
        read.images(latents)


def test_it_learns_the_classes_of_the_target(trained):
    made, victim, _ = trained
    labels = torch.arange(4).repeat_interleave(32)
    latents = torch.randn(128, 4, generator=rng(3))
    with torch.no_grad():
        images = made.images(latents, labels)
        liked = victim.view(["scores"]).scores(images).gather(1, labels[:, None]).mean()
        others = (
            victim.view(["scores"])
            .scores(made.images(latents, (labels + 1) % 4))
            .gather(1, labels[:, None])
            .mean()
        )
    assert liked > 0.6  # ten seeds: 0.76 to 1.00
    assert others < 0.25  # ten seeds: 0.00 to 0.10
    assert (
        made.images(latents[:1], labels[:1]) - made.images(latents[:1], labels[-1:])
    ).abs().max() > 0.2  # labels matter
    assert images[labels == 0].std(0).mean() > 0.003  # latents matter; ten seeds: 0.014 to 0.054


def test_sheets_show_every_class_in_turn():
    sheets: list[Tensor] = []

    class Sheets(NoWork):
        def sheet(self, name, images):
            sheets.append(images)

    SMALL.train(PUBLIC, target().view(["gradients"]), work=Sheets())
    assert [sheet.shape for sheet in sheets] == [(64, *SHAPE)] * 2
