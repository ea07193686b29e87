"""SMILE: the surrogate's loss and weights by hand, starts, both searches, queries."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from frostglass.attacks import Smile, invert
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError
from frostglass.core.prior import ScoredDraws
from frostglass.core.views import ModelView
from frostglass.priors import Experts, read_prior
from frostglass.priors._files import write_prior
from frostglass.priors._style_space import StyleSpace
from frostglass.priors.experts import ExpertHeads, expert_heads, tail_weights
from frostglass.runtime.freezing import frozen
from worlds import (
    PUBLIC,
    SHAPE,
    KilledError,
    MemoryWork,
    NoWork,
    close_images,
    conditional_prior,
    of_people,
    prior,
    rng,
    same_weights,
    styled_prior,
    target,
)

GAN = {"latent": 5, "width": 4, "steps": 4, "critic_steps": 2, "batch": 8, "checkpoint_every": 1}
TAUGHT = Experts(
    base={"name": "wgan", **GAN},
    students=({"model": "cnn", "options": {"width": 4}},),
    draws=30,
    epochs=3,
    batch=16,
)


def scores_only():
    return target().view(["scores"])


def known(made=None, draws=40):
    """A prior whose surrogate is the target itself, with draws that the target scored."""
    made = made or prior()
    made.generator.eval()
    latents = torch.randn(draws, made.latent, generator=rng(1))
    space = StyleSpace(made, 0.7, 8)
    with torch.no_grad():
        images = space.images(space.styles(latents), truncate=True).clamp(0, 1)
        scores = target().module.eval()(images).softmax(1)
    scored = ScoredDraws(latents, scores, 0.7, 8)
    return replace(made, students=(target().module,), scored=scored)


def test_weights_are_larger_for_people_who_are_seldom_among_the_guesses():
    scores = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.5, 0.2, 0.3], [0.1, 0.3, 0.6]])
    counts = [3, 3, 2]  # of the first two guesses
    expected = [0.1 / (1 - 0.9 ** (counts[first] + 1)) for first in (0, 0, 0, 2)]
    assert tail_weights(scores, 0.9, 2).tolist() == pytest.approx(expected)
    assert tail_weights(scores, 0.0, 10).tolist() == [1, 1, 1, 1]


def test_the_loss_of_the_experts_by_hand():
    (student,) = TAUGHT.build_students(SHAPE, 4, seed=1)
    images, said = torch.rand(6, *SHAPE, generator=rng()), torch.rand(6, 4, generator=rng(2))
    answers, weights = said.softmax(1), torch.rand(6, generator=rng(3))
    student.eval()  # the same batch norm in both passes
    _, heads = expert_heads(student)
    assert len(heads) == 3
    features = []
    heads.register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    total = TAUGHT.loss(student, images, answers, rng(), weights)
    each = [head(features[0]) for head in heads]
    mean = sum(each) / 3
    assert torch.allclose(student(images), mean, atol=1e-6)
    expected = torch.tensor(0.0)
    sharp = (said / 0.5).softmax(1)
    for logits in each:
        own = (logits / 0.5).softmax(1)
        for i in range(6):
            expected = expected + weights[i] * (sharp[i] * (sharp[i] / own[i]).log()).sum()
            expected = expected - 0.15 * weights[i] * logits[i].log_softmax(0)[said[i].argmax()]
        apart = ((logits / 0.5).clamp(-20, 20) / 0.5).softmax(1)
        middle = (mean / 0.5).softmax(1)
        expected = expected + 10 / ((apart * (apart / middle).log()).sum() / 6)
    assert torch.allclose(total, expected, rtol=1e-3)


def test_the_target_is_asked_for_scores_of_draws_alone():
    view = scores_only()
    taught = TAUGHT.train(PUBLIC, view, work=NoWork())
    assert view.queries == taught.info["queries"] == 30
    assert taught.scored.latents.shape == (30, 5)
    space = StyleSpace(taught, 0.7, 8)
    taught.generator.eval()
    with torch.no_grad(), frozen(view.module):
        images = space.images(taught.scored.latents, truncate=True).mul(255).round() / 255
        asked = view.scores(images)
    assert torch.allclose(taught.scored.scores, asked, atol=1e-4)
    with pytest.raises(AccessError, match="this view grants labels, not scores"):
        TAUGHT.train(PUBLIC, target().view(["labels"]), work=NoWork())


def test_a_stopped_training_resumes_and_files_keep_the_draws(tmp_path):
    whole = TAUGHT.train(PUBLIC, scores_only(), work=NoWork())
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        TAUGHT.train(PUBLIC, scores_only(), work=work)
    work.left = None
    resumed = TAUGHT.train(PUBLIC, scores_only(), work=work)
    assert same_weights(whole.students[0], resumed.students[0])
    write_prior(whole, tmp_path / "prior.safetensors")
    read = read_prior(tmp_path / "prior.safetensors")
    assert same_weights(whole.students[0], read.students[0])
    assert torch.equal(read.scored.scores, whole.scored.scores)
    assert torch.equal(read.scored.latents, whole.scored.latents)
    assert (read.scored.truncation, read.scored.cutoff) == (0.7, 8)


def test_experts_learn_and_differ():
    taught = replace(TAUGHT, draws=200, epochs=15).train(PUBLIC, scores_only(), work=NoWork())
    fresh = replace(TAUGHT, draws=200, epochs=1, lr=1e-9).train(
        PUBLIC, scores_only(), work=NoWork()
    )
    after, before = (each.info["students"][0] for each in (taught, fresh))
    assert after["agreement"] > before["agreement"] + 0.1
    first, second, _ = expert_heads(taught.students[0])[1]
    assert not torch.allclose(first[2].weight, second[2].weight)


def test_a_frozen_body_stays_that_of_its_start(tmp_path):
    plain = replace(TAUGHT, frozen=False)._plain_students(SHAPE, 4, seed=9)[0]
    save_file(dict(plain.state_dict()), tmp_path / "body.safetensors")
    table = {**TAUGHT.students[0], "start": str(tmp_path / "body.safetensors")}
    method = Experts.variant(
        "published", base={"name": "wgan", **GAN}, students=(table,), draws=30, epochs=2, batch=16
    )
    (student,) = method.train(PUBLIC, scores_only(), work=NoWork()).students
    body = plain.state_dict()
    state = student.state_dict()
    shared = [name for name in body if name in state]
    assert len(shared) > 5
    assert all(torch.equal(body[name], state[name]) for name in shared)


def test_starts_are_the_best_draws_and_cost_nothing():
    made, view = known(), scores_only()
    attack = Smile(steps=0, max_queries=1, candidates=2, keep=2, wide_box=9.0)
    found = invert(attack, view, Assets(prior=made), people=range(4), work=NoWork())
    best = made.scored.scores.topk(2, dim=0)
    expected = made.scored.latents[best.indices.T]
    assert torch.allclose(found.latents, expected)
    assert torch.allclose(found.confidence, best.values.T, atol=1e-4)
    # One score of each start, one of each result.
    assert found.queries == view.queries == 4 * 2 * 2


def test_the_local_search_asks_nothing_and_stays_in_its_box():
    made, view = known(), scores_only()
    attack = Smile(steps=30, max_queries=1, wide_box=9.0)
    local = invert(attack, view, Assets(prior=made), people=range(4), work=NoWork())
    clamped = replace(attack, steps=0, wide_box=1.0)
    start = invert(clamped, scores_only(), Assets(prior=made), people=range(4), work=NoWork())
    assert local.queries == start.queries == 8
    assert (local.confidence > start.confidence).all()
    spread, mean = made.scored.latents.std(0, correction=0), made.scored.latents.mean(0)
    assert ((local.latents - mean).abs() <= spread + 1e-5).all()


@pytest.mark.parametrize("strategy", ["one_plus_one", "sep_cma"])
@pytest.mark.parametrize("made", [prior, styled_prior])
def test_the_evolution_convinces_the_target(strategy, made):
    world = known(made())
    attack = Smile(steps=0, max_queries=200, strategy=strategy, sigma=0.3, wide_box=4.0)
    found = invert(attack, scores_only(), Assets(prior=world), people=range(4), work=NoWork())
    before = world.scored.scores.amax(0)
    assert (found.confidence[:, 0] >= before - 1e-3).all()
    assert found.confidence.mean() > before.mean()


def test_converged_rows_stop_and_change_nothing_for_others():
    made = Assets(prior=known())
    attack = Smile(steps=3, max_queries=300, patience=20, flat=0.05)
    whole = invert(attack, scores_only(), made, people=range(4), work=NoWork())
    assert (whole.steps < 300).any()
    for batch, labels in ((1, [3, 1]), (5, [0, 1, 2, 3])):
        some = invert(
            replace(attack, batch=batch), scores_only(), made, people=labels, work=NoWork()
        )
        assert close_images(some, of_people(whole, labels))
        assert torch.equal(some.steps, whole.steps[labels])
    every = invert(
        Smile.variant("published", steps=3, max_queries=300),
        scores_only(),
        made,
        people=range(4),
        work=NoWork(),
    )
    assert (every.steps == 300).all()
    assert every.queries == 4 * 301 > whole.queries


def test_what_the_prior_asked_counts(monkeypatch):
    monkeypatch.delattr(ModelView, "logits")
    made = replace(known(), info={"queries": 1000})
    attack = Smile(steps=2, max_queries=20, patience=0)
    found = invert(attack, scores_only(), Assets(prior=made), people=range(4), work=NoWork())
    assert found.queries == 1000 + 4 * 21


def test_what_cannot_be_is_refused():
    def refused(made, **values):
        invert(Smile(**values), scores_only(), Assets(prior=made), work=NoWork())

    with pytest.raises(ConfigError, match=r'has none: use prior\.name = "experts"'):
        refused(prior())
    with pytest.raises(ConfigError, match="must be at most the 40 draws of the prior, got 41"):
        refused(known(), candidates=41)
    with pytest.raises(ConfigError, match="frozen trains the experts alone: give each of students"):
        Experts(frozen=True)
    with pytest.raises(ConfigError, match="students: expected at least one network"):
        Experts(students=())
    with pytest.raises(ConfigError, match="takes a label with each latent"):
        TAUGHT.train(PUBLIC, scores_only(), base=conditional_prior("label"), work=NoWork())
    with pytest.raises(ConfigError, match="needs access to scores, got labels"):
        invert(Smile(), target().view(["labels"]), Assets(prior=known()), work=NoWork())


def test_defaults_are_the_published_ones():
    attack, method = Smile.variant("published"), Experts()
    assert (attack.steps, attack.lr, attack.box, attack.wide_box) == (200, 0.2, 1.0, 1.7)
    assert (attack.max_queries, attack.sigma, attack.strategy) == (1000, 1.0, "one_plus_one")
    assert (attack.candidates, attack.keep, attack.patience) == (1, 1, 0)
    assert (method.draws, method.truncation, method.cutoff) == (2500, 0.7, 8)
    assert (method.experts, method.epochs, method.batch, method.lr) == (3, 200, 128, 1e-3)
    assert (method.temperature, method.ce, method.diversity) == (0.5, 0.15, 10)
    assert (method.beta, method.top) == (0.9, 10)


def test_heads_replace_the_head_of_any_network():
    student = Experts(students=({"model": "resnet", "options": {"width": 4, "depth": 1}},))
    (network,) = student.build_students(SHAPE, 7)
    assert isinstance(expert_heads(network)[1], ExpertHeads)
    assert network.eval()(torch.rand(2, *SHAPE)).shape == (2, 7)
    assert F.softmax(network(torch.rand(2, *SHAPE)), dim=1).isfinite().all()
