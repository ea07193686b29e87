"""Students and feature statistics: the divergence by hand, resuming, refusals, files, learning."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from frostglass.core.errors import AccessError, CheckpointError, ConfigError, RunError
from frostglass.core.method import AuditSize
from frostglass.models.checkpoint import save_weights
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors._imitation import Lessons
from frostglass.priors.base import identity_hashes
from frostglass.priors.pretrained import Pretrained
from frostglass.priors.students import (
    Students,
    distillation,
    drawn_images,
    joined,
    resized,
    target_scores,
)
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import generator_for
from worlds import (
    SHAPE,
    KilledError,
    MemoryWork,
    NoWork,
    conditional_prior,
    images,
    prior,
    same_weights,
    target,
)

PUBLIC = images(44, 5, names="stranger")
BASE = {"name": "wgan", "latent": 5, "width": 4, "steps": 2, "critic_steps": 1, "batch": 8}
TWO = ({"model": "cnn", "options": {"width": 4}}, {"model": "cnn", "options": {"width": 6}})
SMALL = Students(base=BASE, students=TWO, epochs=3, batch=16, statistics=20)


def white_box():
    return target().view(["gradients"])


def forgetful(*, classes, image_shape):
    """A user's network with dropout: its training draws from torch's global generator."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(math.prod(image_shape), classes))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_against_a_slow_reference(temperature):
    rng = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(4, 5, generator=rng, dtype=torch.double) for _ in range(2))
    slow = 0.0
    for row in range(4):
        p, q = (
            [math.exp(value / temperature) for value in logits[row].tolist()]
            for logits in (teacher, student)
        )
        slow += sum(
            a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True)
        )
    fast = distillation(student, teacher.softmax(1), temperature).item()
    assert fast == pytest.approx(slow / (temperature**2 * 4), rel=1e-10)
    assert distillation(teacher, teacher.softmax(1), temperature).item() == pytest.approx(
        0, abs=1e-12
    )


def test_divergence_from_a_target_that_is_certain():
    """Probabilities of exactly 0 and 1, as a saturated target gives them, are no trouble."""
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.double, requires_grad=True)
    sure = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.double)
    assert distillation(logits, sure, 1.0).item() == pytest.approx(
        -logits.log_softmax(1)[0, 1].item()
    )
    assert torch.autograd.gradcheck(lambda given: distillation(given, sure, 2.0), logits)


def test_statistics_against_a_slow_reference():
    method, made = replace(SMALL, students=(), statistics=13), target()
    found = method.train(PUBLIC, made.view(["gradients"]), base=prior(), seed=3, work=NoWork())
    assert found.features.shape == (2, 128)
    made.module.eval()
    rng = generator_for(3, "students", "statistics")
    chosen = torch.randperm(len(PUBLIC), generator=rng)[:13]
    assert len(set(chosen.tolist())) == 13
    assert chosen.tolist() != sorted(chosen.tolist())
    rows = [made.module[:6](PUBLIC.floats(index[None])).detach()[0].double() for index in chosen]
    mean = sum(rows) / 13
    spread = (sum((row - mean) ** 2 for row in rows) / 13).sqrt()
    assert torch.allclose(found.features.double(), torch.stack([mean, spread]), atol=1e-6)
    assert found.students == ()
    assert found.info["students"] == []


def test_more_statistics_than_images_take_all():
    found = replace(SMALL, students=(), statistics=1000).train(
        PUBLIC, (view := white_box()), base=prior(), work=NoWork()
    )
    assert view.queries == len(PUBLIC)
    every = replace(SMALL, students=(), statistics=len(PUBLIC)).train(
        PUBLIC, white_box(), base=prior(), work=NoWork()
    )
    assert torch.equal(found.features, every.features)


def test_one_epoch_is_plain_gradient_descent():
    """Without momentum, in one batch, a student moves by -lr times the divergence's gradient."""
    method = Students(
        base=BASE,
        students=TWO[:1],
        epochs=1,
        batch=44,
        momentum=0,
        weight_decay=0,
        lr=0.3,
        statistics=0,
    )
    view = white_box()
    (trained,) = method.train(PUBLIC, view, base=prior(), seed=1, work=NoWork()).students
    (student,) = method.build_students(SHAPE, 4, seed=1)
    student.train()
    module = target().module.eval()
    with torch.no_grad():
        wanted = module(PUBLIC.floats()).softmax(1)
    logits = student(PUBLIC.floats()).log_softmax(1)
    (wanted * (wanted.log() - logits)).sum(1).mean().backward()
    for ours, theirs in zip(student.parameters(), trained.parameters(), strict=True):
        assert torch.allclose(ours - 0.3 * ours.grad, theirs, atol=1e-5)


def test_step_size_halves_after_every_so_many_epochs(monkeypatch):
    seen = []
    method = replace(SMALL, students=TWO[:1], epochs=5, decay_every=2)
    monkeypatch.setattr(
        Students,
        "_epoch",
        lambda self, student, optimizer, *rest: seen.append(optimizer.param_groups[0]["lr"]) or 0.0,
    )
    method.train(PUBLIC, white_box(), base=prior(), work=NoWork())
    assert seen == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025])


@pytest.mark.parametrize("died_after", [1, 3, 5, 6])
def test_resumes_to_the_same_bytes(died_after):
    """Killed in the first student, between the two, in the second, and after everything."""
    method = replace(SMALL, students=(TWO[0], {"model": f"{__name__}:forgetful"}))
    whole = method.train(PUBLIC, white_box(), seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        method.train(PUBLIC, white_box(), seed=0, work=work)
    work.left = None
    resumed = method.train(PUBLIC, white_box(), seed=0, work=work)
    assert all(same_weights(*pair) for pair in zip(whole.students, resumed.students, strict=True))
    assert same_weights(whole.generator, resumed.generator)
    assert torch.equal(whole.features, resumed.features)
    assert whole.info == resumed.info


def test_a_finished_student_is_not_trained_again(monkeypatch):
    work = MemoryWork(saves_before_death=4)
    with pytest.raises(KilledError):
        SMALL.train(PUBLIC, white_box(), base=prior(), work=work)
    work.left, trained, epoch = None, [], Students._epoch
    monkeypatch.setattr(
        Students,
        "_epoch",
        lambda self, student, *rest: trained.append(student) or epoch(self, student, *rest),
    )
    found = SMALL.train(PUBLIC, white_box(), base=prior(), work=work)
    assert trained == [found.students[1]] * 2


def test_the_target_is_as_before_and_was_asked_once_for_each_image():
    made = target()
    made.module[0].requires_grad_(False)
    before = {name: t.clone() for name, t in made.module.state_dict().items()}
    state, view = torch.get_rng_state(), made.view(["gradients"])
    SMALL.train(PUBLIC, view, base=prior(), work=NoWork())
    assert view.queries == len(PUBLIC) + 20
    assert torch.equal(state, torch.get_rng_state())
    assert all(part.training for part in made.module.modules())
    assert [p.requires_grad for p in made.module.parameters()] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert all(p.grad is None for p in made.module.parameters())
    assert all(torch.equal(before[name], t) for name, t in made.module.state_dict().items())


def test_students_learn_to_agree_with_the_target():
    victim, public = target(), images(160, 4, names="stranger")
    method = Students(base=BASE, students=TWO, epochs=20, batch=16, lr=0.02, statistics=0)
    trained, fresh = (
        chosen.train(public, victim.view(["scores"]), base=prior(), work=NoWork())
        for chosen in (method, replace(method, epochs=1, lr=1e-9))
    )
    facts = trained.info["students"]
    assert [fact["model"] for fact in facts] == ["cnn", "cnn"]
    assert all(fact["agreement"] > 0.6 for fact in facts)  # ten seeds: 0.75 to 0.99
    # Ten seeds: 0.01 to 0.83 after training; three seeds: 1.30 to 1.47 before.
    for after, before in zip(facts, fresh.info["students"], strict=True):
        assert after["divergence"] < 0.85 * before["divergence"]
    assert not any(student.training for student in trained.students)


def test_what_is_told_of_a_student_is_true():
    found = SMALL.train(PUBLIC, white_box(), base=prior(), work=NoWork())
    module = target().module.eval()
    with torch.no_grad():
        wanted = module(PUBLIC.floats())
        for student, fact in zip(found.students, found.info["students"], strict=True):
            logits = student(PUBLIC.floats())
            assert fact["agreement"] == pytest.approx(
                (logits.argmax(1) == wanted.argmax(1)).double().mean().item()
            )
            slow = [
                (p * (p / q).log()).sum().item()
                for p, q in zip(wanted.double().softmax(1), logits.double().softmax(1), strict=True)
            ]
            assert fact["divergence"] == pytest.approx(sum(slow) / len(slow), rel=1e-4)


def test_file_round_trip(tmp_path):
    made = SMALL.train(PUBLIC, white_box(), work=NoWork())
    write_prior(made, tmp_path / "p.safetensors")
    read = read_prior(tmp_path / "p.safetensors")
    assert all(same_weights(*pair) for pair in zip(made.modules, read.modules, strict=True))
    assert len(read.modules) == 4
    assert torch.equal(read.features, made.features)
    assert (read.tied_to, read.classes, read.latent, read.image_shape) == ("target", 4, 5, SHAPE)
    assert read.info["base"]["method"]["name"] == "wgan"
    assert read.info["students"] == made.info["students"]
    images = read.images(torch.zeros(2, 5))
    assert all(
        torch.equal(a(images), b(images)) for a, b in zip(made.students, read.students, strict=True)
    )
    assert all(student(images).shape == (2, 4) for student in read.students)
    with pytest.raises(CheckpointError, match="was fitted to one target"):
        Pretrained(weights=str(tmp_path / "p.safetensors")).read(SHAPE)


def test_the_base_prior_is_made_here_or_given():
    alone = SMALL.train(PUBLIC, white_box(), seed=2, work=NoWork())
    base = SMALL.base_method.train(PUBLIC, None, seed=2, work=NoWork())
    assert SMALL.base_method == Wgan(**{key: value for key, value in BASE.items() if key != "name"})
    given = SMALL.train(
        PUBLIC, white_box(), base=replace(base, key="made before"), seed=2, work=NoWork()
    )
    assert all(same_weights(*pair) for pair in zip(alone.modules, given.modules, strict=True))
    assert given.info == alone.info
    assert given.key == ""
    assert torch.equal(given.seen_identities, identity_hashes(PUBLIC.names))
    with pytest.raises(ConfigError, match="fitted to the target another and not to target"):
        SMALL.train(PUBLIC, white_box(), base=replace(base, tied_to="another"), work=NoWork())


def test_everyone_who_was_seen_is_remembered():
    base = replace(prior(), seen_identities=identity_hashes(["ann", "stranger 1"]))
    found = SMALL.train(PUBLIC, white_box(), base=base, work=NoWork())
    assert torch.equal(found.seen_identities, identity_hashes([*PUBLIC.names, "ann"]))


def test_students_take_the_images_that_the_prior_makes():
    """A prior of smaller images than the data: students see public images of the prior's size."""
    small = (3, 8, 8)
    found = replace(SMALL, students=TWO[:1]).train(
        PUBLIC, white_box(), base=prior(small), work=NoWork()
    )
    assert found.students[0](found.images(torch.zeros(2, 6))).shape == (2, 4)
    images = resized(PUBLIC, small)(torch.arange(3))
    assert torch.allclose(
        images,
        nn.functional.interpolate(PUBLIC.floats()[:3], size=8, mode="bilinear", antialias=True),
    )
    assert torch.equal(resized(PUBLIC, SHAPE)(torch.arange(3)), PUBLIC.floats()[:3])


def test_two_students_of_one_kind_begin_differently():
    first, second = Students(students=TWO[:1] * 2).build_students(SHAPE, 4)
    assert not same_weights(first, second)
    assert same_weights(first, Students(students=TWO[:1]).build_students(SHAPE, 4)[0])


def test_a_student_can_start_from_a_checkpoint(tmp_path):
    (other,) = Students(students=TWO[:1]).build_students(SHAPE, 7, seed=9)
    save_weights(other, tmp_path / "body.safetensors")
    table = {**TWO[0], "start": str(tmp_path / "body.safetensors")}
    method = replace(SMALL, students=(table,), epochs=1, lr=1e-12, weight_decay=0.0)
    (student,) = method.train(PUBLIC, white_box(), base=prior(), work=NoWork()).students
    assert torch.equal(student.stage1[0].weight, other.stage1[0].weight)
    assert student.head.weight.shape == (4, 32)
    assert method.files() == [Path(table["start"])]
    own = {"model": f"{__name__}:forgetful"}
    expected = [Pretrained().path(), Path(table["start"]), Path(__file__)]
    assert Students(students=(table, own)).files() == expected


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ConfigError, match=r"Students: base: no prior named 'wgam': did you mean 'wgan'\?"
    ):
        Students(base={"name": "wgam"})
    with pytest.raises(
        ConfigError, match=r"Students: base: Wgan: widht: no such parameter; did you mean 'width'\?"
    ):
        Students(base={"name": "wgan", "widht": 3})
    with pytest.raises(
        ConfigError, match="Students: base: Wgan: width: expected at least 4, got 3"
    ):
        Students(base={"name": "wgan", "width": 3})
    for base in ({}, {"name": "students"}, {"name": 3}):
        with pytest.raises(
            ConfigError,
            match=(
                r"base: expected a table with a name, one of .*stylegan2, tacgan, wgan; "
                r"got \{"
            ),
        ):
            Students(base=base)
    for table in ({}, {"model": 3}, {"model": "cnn", "width": 3}, {"model": "cnn", "options": 3}):
        with pytest.raises(
            ConfigError, match=r'students\[1\]: expected a table like \{ model = "cnn"'
        ):
            Students(students=(TWO[0], table))
    with pytest.raises(ConfigError, match="neither students nor statistics"):
        Students(students=(), statistics=0)
    with pytest.raises(ConfigError, match=r"no model named 'cmn'"):
        Students(students=({"model": "cmn"},)).build_students(SHAPE, 4)
    with pytest.raises(ConfigError, match="students are fitted to one target"):
        SMALL.train(PUBLIC, None, work=NoWork())
    with pytest.raises(AccessError, match="not gradients"):
        SMALL.train(PUBLIC, target().view(["scores"]), base=prior(), work=NoWork())


def test_what_is_not_finite_is_reported():
    with pytest.raises(
        RunError, match=r"students: the loss of cnn is nan in epoch \d: lower prior.lr"
    ):
        replace(SMALL, lr=1e30, epochs=9).train(PUBLIC, white_box(), base=prior(), work=NoWork())
    made = target()
    with torch.no_grad():
        made.module[6].bias[0] = math.nan
    with pytest.raises(RunError, match="the target's scores are not finite for 44 of 44 images"):
        SMALL.train(PUBLIC, made.view(["gradients"]), base=prior(), work=NoWork())


def test_published_settings():
    method = Students()
    assert [student["model"] for student in method.students] == [
        f"timm:efficientnet_b{number}" for number in range(3)
    ]
    assert (method.epochs, method.batch, method.lr, method.momentum, method.weight_decay) == (
        20,
        64,
        0.01,
        0.9,
        1e-4,
    )
    assert (method.decay, method.decay_every, method.temperature, method.statistics) == (
        0.5,
        20,
        1.0,
        5000,
    )
    assert method.base_method == Pretrained(weights="faces32")
    assert method.tied


def test_students_learn_from_draws_too():
    """A student of draws is shown each of them once an epoch, after the public images."""
    shown = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(math.prod(SHAPE), 4)

        def forward(self, images):
            shown.append(images.detach())
            return self.layer(images.flatten(1))

    method = replace(SMALL, students=TWO[:1], statistics=0, epochs=1, draws=30)
    view, known, network = target().view(["scores"]), prior(), Watching()
    drawn = resized(drawn_images(known, 30, seed=0), SHAPE)
    everything = joined(resized(PUBLIC, SHAPE), len(PUBLIC), drawn)
    lessons = Lessons(everything, target_scores(view, everything, 74))
    method._learn(0, network, lessons, seed=0, work=NoWork())
    seen, whole = torch.cat(shown), everything(torch.arange(74))
    assert view.queries == 74
    assert len(seen) == 74
    assert torch.allclose(seen.flatten(1).sort(0).values, whole.flatten(1).sort(0).values)
    assert torch.equal(whole[:44], PUBLIC.floats())
    assert torch.equal(everything(torch.tensor([50, 3, 73])), whole[[50, 3, 73]])
    latents = torch.randn(30, 6, generator=generator_for(0, "students", "draws"))
    known.generator.eval()
    with torch.no_grad():
        assert torch.allclose(whole[44:], known.generator(latents), atol=0.5 / 255 + 1e-6)


def test_draws_of_a_prior_are_part_of_the_work():
    with_draws = replace(SMALL, statistics=0, draws=30)
    view = target().view(["scores"])
    found = with_draws.train(PUBLIC, view, base=prior(), work=NoWork())
    assert view.queries == len(PUBLIC) + 30
    plain = replace(with_draws, draws=0).train(PUBLIC, white_box(), base=prior(), work=NoWork())
    assert not same_weights(found.students[0], plain.students[0])
    size = AuditSize(people=4, public=44)
    assert with_draws.budget(size).evaluations == 74
    assert with_draws.budget(size).trained == 2 * 3 * 74
    assert replace(with_draws, draws=9000).brief().draws == 256
    with pytest.raises(ConfigError, match=r"draws \(30\) are for students: name some"):
        replace(SMALL, students=(), draws=30)
    with pytest.raises(ConfigError, match="completes hints, so nothing can be drawn"):
        with_draws.train(PUBLIC, view, base=conditional_prior("hint"), work=NoWork())
    conditional = conditional_prior("label")
    marks = drawn_images(conditional, 40, seed=0).floats()[:, 0, 0, 0]
    assert set((marks * 8).round().tolist()) == {0, 1, 2, 3}
