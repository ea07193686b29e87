"""LOKT: the losses of T-ACGAN by hand, surrogates from labels alone, and the attack on them."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.attacks import Lokt, invert
from frostglass.attacks._search.row_rng import RowRng
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError
from frostglass.core.objective import margin
from frostglass.core.views import ModelView
from frostglass.data._augment import DRAWS, viewed
from frostglass.priors import Students, Surrogates, Tacgan, read_prior
from frostglass.priors._files import write_prior
from frostglass.priors.tacgan import TacganTraining
from worlds import (
    PUBLIC,
    SHAPE,
    KilledError,
    MemoryWork,
    NoWork,
    conditional_prior,
    prior,
    rng,
    same_weights,
    target,
)

GAN = {"latent": 5, "width": 4, "steps": 4, "critic_steps": 2, "batch": 8, "checkpoint_every": 1}
SMALL = Tacgan(**GAN, warmup=1)
ONE = ({"model": "cnn", "options": {"width": 4}},)
TAUGHT = Surrogates(
    base={"name": "tacgan", **GAN, "warmup": 1}, students=ONE, epochs=2, per_class=6
)


def labels_only():
    return target().view(["labels"])


def test_losses_of_the_critic_and_the_generator_by_hand():
    view = labels_only()
    training = TacganTraining(SMALL, PUBLIC, view, 0, torch.device("cpu"))
    view.module.eval()
    for module in (training.generator, training.critic):
        module.eval()  # no power iteration: both passes have the same spectral norms
    for step, weight in ((0, 0.0), (1, 1.5)):
        training.step = step
        draws = rng(3)
        real = PUBLIC.floats(torch.randint(len(PUBLIC), (8,), generator=draws))
        latents = torch.randn(8, 5, generator=draws)
        labels = torch.randint(4, (8,), generator=draws)
        fake = training.generator(latents, labels)
        scores, logits = training.critic(fake)
        said = view.module(fake).argmax(1)
        critic = -(1 - scores.sigmoid()).log().mean()
        critic = critic - training.critic(real)[0].sigmoid().log().mean()
        critic = critic + weight * F.cross_entropy(logits, said)
        assert torch.allclose(training.critic_loss(rng(3)), critic, atol=1e-4)
        draws = rng(4)
        latents = torch.randn(8, 5, generator=draws)
        labels = torch.randint(4, (8,), generator=draws)
        scores, logits = training.critic(training.generator(latents, labels))
        generator = -scores.sigmoid().log().mean() + weight * F.cross_entropy(logits, labels)
        assert torch.allclose(training.generator_loss(rng(4)), generator, atol=1e-4)


def test_the_target_is_asked_for_labels_alone_and_queries_are_recorded(monkeypatch):
    for use in ("scores", "logits", "logits_and_features"):
        monkeypatch.delattr(ModelView, use)
    view = labels_only()
    known = SMALL.train(PUBLIC, view, work=NoWork())
    assert view.queries == known.info["queries"] == 3 * 2 * 8
    assert known.condition == "label"
    assert known.critic is None
    (head,) = known.students
    assert head(torch.rand(2, *SHAPE)).shape == (2, 4)
    view = labels_only()
    taught = TAUGHT.train(PUBLIC, view, work=NoWork())
    assert view.queries == taught.info["queries"] == 3 * 2 * 8 + 4 * 6
    assert 0 <= taught.info["as_asked"] <= 1


@pytest.mark.parametrize("method", [SMALL, TAUGHT], ids=["tacgan", "surrogates"])
@pytest.mark.parametrize("saves", [2, 3])
def test_a_stopped_training_resumes_with_the_same_bytes(method, saves):
    view, again = labels_only(), labels_only()
    whole = method.train(PUBLIC, view, work=NoWork())
    work = MemoryWork(saves_before_death=saves)
    with pytest.raises(KilledError):
        method.train(PUBLIC, labels_only(), work=work)
    work.left = None
    resumed = method.train(PUBLIC, again, work=work)
    pairs = zip(whole.modules, resumed.modules, strict=True)
    assert all(same_weights(one, other) for one, other in pairs)
    assert again.queries == view.queries


def test_files_keep_the_surrogates(tmp_path):
    for method in (SMALL, TAUGHT):
        known = method.train(PUBLIC, labels_only(), work=NoWork())
        write_prior(known, tmp_path / "prior.safetensors")
        read = read_prior(tmp_path / "prior.safetensors")
        assert [m.training for m in read.modules] == [False, False]
        assert all(same_weights(a, b) for a, b in zip(known.modules, read.modules, strict=True))


def test_the_loss_of_a_surrogate_is_cross_entropy_of_the_image_and_of_a_view():
    student = nn.Sequential(nn.Flatten(), nn.Linear(768, 4))
    images, said = torch.rand(5, *SHAPE, generator=rng()), torch.tensor([0, 3, 1, 1, 2])
    draws = torch.rand(5, DRAWS, generator=rng(2))
    seen = viewed(images, draws, jitter_share=0.5)
    expected = (F.cross_entropy(student(images), said) + F.cross_entropy(student(seen), said)) / 2
    answers = F.one_hot(said, 4).float()
    assert torch.allclose(TAUGHT.loss(student, images, answers, rng(2)), expected)


def test_the_step_size_falls_as_a_cosine():
    method = replace(TAUGHT, epochs=4, lr=0.1)
    assert [round(method.lr_at(epoch), 4) for epoch in range(4)] == [0.1, 0.0854, 0.05, 0.0146]


def test_surrogates_of_a_prior_without_classes_are_an_ablation():
    view = labels_only()
    taught = replace(TAUGHT, base={"name": "wgan", **GAN}).train(PUBLIC, view, work=NoWork())
    assert view.queries == taught.info["queries"] == 24
    assert "as_asked" not in taught.info
    assert taught.condition == ""


def test_scores_are_refused_by_a_view_of_labels():
    """A prior that needs scores cannot be fitted by an attacker who sees labels."""
    students = Students(base={"name": "wgan", **GAN}, students=ONE, statistics=0)
    with pytest.raises(AccessError, match=r"this view grants labels, not scores: ask for it with"):
        students.train(PUBLIC, labels_only(), work=NoWork())


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"warmup \(9\) must be less than steps \(4\)"):
        Tacgan(**GAN, warmup=9)
    with pytest.raises(ConfigError, match="students: expected at least one network"):
        Surrogates(students=())
    with pytest.raises(ConfigError, match="tacgan is fitted to one target and got no view"):
        SMALL.train(PUBLIC, work=NoWork())
    with pytest.raises(ConfigError, match="base: expected a table with a name, one of"):
        Surrogates(base={"name": "students"})
    with pytest.raises(ConfigError, match="completes hints, so nothing can be drawn"):
        TAUGHT.train(PUBLIC, labels_only(), base=conditional_prior("hint"), work=NoWork())
    with pytest.raises(ConfigError, match="lokt attacks surrogates, but the prior has none"):
        invert(Lokt(), labels_only(), Assets(prior=replace(prior(), students=())), work=NoWork())


def test_the_loss_is_the_mean_over_surrogates_of_the_sum_over_views():
    known = prior()
    other = copy.deepcopy(known.students[0])
    nn.init.normal_(other[1].weight, generator=rng(1))
    known = replace(known, students=(known.students[0], other))
    images, labels = torch.rand(3, *SHAPE, generator=rng()), torch.tensor([0, 1, 2])

    def draws():
        return RowRng.of(0, "search", labels, torch.zeros(3, dtype=torch.long))

    loss, _ = Lokt().class_loss(labels_only(), known, images, labels, draws())
    numbers = draws()
    seen = [viewed(images, numbers.uniform(DRAWS)) for _ in range(2)]
    sums = [sum(margin(student(each), labels) for each in seen) for student in known.students]
    assert torch.allclose(loss, (sums[0] + sums[1]) / 2, atol=1e-5)


def test_what_the_target_calls_y_comes_first_and_costs_one_query_each():
    known, view = replace(prior(), students=(target(seed=7).module,)), labels_only()
    attack = Lokt(steps=3, candidates=16, keep=16)
    result = invert(attack, view, Assets(prior=known), people=range(4), work=NoWork())
    assert result.queries == view.queries == 4 * 16
    fitted = replace(known, info={"queries": 1000})  # what its prior asked counts too
    again = invert(attack, labels_only(), Assets(prior=fitted), people=range(4), work=NoWork())
    assert again.queries == 1000 + 4 * 16
    hits = result.confidence  # labels alone: 1 or 0
    assert set(hits.unique().tolist()) == {0.0, 1.0}
    assert (hits.diff(dim=1) <= 0).all()


def test_the_simpler_networks_start_as_the_generator_without_classes():
    method = Tacgan(latent=100, width=48, network="dcgan", start="faces32", critic_width=40)
    start = method.starting_prior((3, 32, 32))
    generator, critic = method.networks((3, 32, 32), 5)
    generator.adopt(start.generator)
    critic.adopt(start.critic)
    latents, labels = torch.randn(4, 100, generator=rng()), torch.tensor([0, 1, 4, 4])
    for module in (generator, critic, start.generator, start.critic):
        module.eval()
    with torch.no_grad():
        images = start.generator(latents)
        assert torch.allclose(generator(latents, labels), images, atol=1e-5)
        assert torch.allclose(critic.body(images), start.critic[:-2](images))
        scores, logits = critic(images)
    assert (scores.shape, logits.shape) == ((4,), (4, 5))
    with pytest.raises(ConfigError, match='holds the networks of network = "dcgan", got'):
        Tacgan(start="faces32")
    with pytest.raises(ConfigError, match="expected latent 128, width 48"):
        Tacgan(network="dcgan", start="faces32", width=48).untrained((3, 32, 32), 5)
