"""Tests of LOMMA."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.attacks._search import descent
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.ifgmi import Ifgmi
from frostglass.attacks.model.kedmi import Kedmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.attacks.model.mirror import Mirror
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.errors import ConfigError
from frostglass.core.objective import loss_of
from frostglass.runtime.seeding import generator_for, seeded
from worlds import prior, run_attack, styled_prior, target

SMALL = {"candidates": 2, "keep": 2}
OURS = {"": {}} | {
    name: dict(Lomma.variants[name][1]) for name in ("baseline", "logit", "augmentation")
}


def taught(students=2):
    """A prior with students that disagree, and with the statistics of some features."""
    with seeded(0, "tests", "lomma"):
        nets = tuple(nn.Sequential(nn.Flatten(), nn.Linear(768, 4)) for _ in range(students))
        features = torch.stack([torch.rand(128), 0.1 + torch.rand(128)])
    return replace(prior(), students=nets, features=features)


def found(attack, known=None, **more):
    return run_attack(attack, known or taught(), **more)


def test_defaults_are_the_published_ones():
    lomma = Lomma()
    assert (lomma.on, lomma.loss, lomma.weight, lomma.critic_weight, lomma.students) == (
        "gmi",
        "logit",
        100,
        1,
        True,
    )
    assert (lomma.regulariser, lomma.regulariser_weight, lomma.reduction) == ("mean", 1, "mean")
    assert (
        lomma.optimizer,
        lomma.lr,
        lomma.momentum,
        lomma.steps,
        lomma.clamp,
        lomma.candidates,
    ) == ("nesterov", 0.02, 0.9, 2400, 1, 5)
    ked = Lomma(**Lomma.variants["kedmi"][1])
    assert (
        ked.on,
        ked.optimizer,
        ked.candidates,
        ked.draws,
        ked.keep,
        ked.log_variance,
        ked.clamp,
        ked.steps,
    ) == (
        "kedmi",
        "adam",
        1,
        5,
        5,
        1,
        1,
        2400,
    )


def loss_by_hand(attack, known, z, label, rng):
    """(100 · [mean class loss over models + λ · feature distance] - D) / 60 of one latent."""
    module = target().module.eval()
    images = known.generator.eval()(z[None])
    features = module[:6](images)
    logits = [
        module[6](features)[0],
        *(student(images)[0] for student in known.students if attack.students),
    ]
    each = [
        -row[label] if attack.loss == "logit" else -row.softmax(0)[label].log() for row in logits
    ]
    total = sum(each) / len(each)
    if attack.regulariser != "off":
        usual, spread = known.features
        if attack.regulariser == "sampled":
            usual = usual + spread * torch.randn(128, generator=rng)
        distance = ((features[0] - usual) ** 2).sum()
        total = total + attack.regulariser_weight * (
            distance / 128 if attack.reduction == "mean" else distance
        )
    return (100 * total - known.critic(images)[0, 0]) / 60


@pytest.mark.parametrize(
    "options",
    [
        *OURS.values(),
        {"regulariser": "sampled"},
        {"reduction": "sum", "regulariser_weight": 0.01},
        {"regulariser": "sampled", "reduction": "sum"},
    ],
    ids=str,
)
def test_two_steps_by_hand(options):
    """Nesterov in latents: v ← 0.9 v - η g, z ← z - 0.9 v_old + 1.9 v."""
    attack, known = Lomma(steps=2, lr=0.002, clamp=0.0, **SMALL, **options), taught()
    some, begun = found(attack, known), found(replace(attack, steps=0), known)
    for draw in range(2):
        z = begun.latents[0][begun.draws[0] == draw][0]
        v, rng = torch.zeros(6), generator_for(0, "search", 2, draw)
        for _ in range(2):
            z = z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_by_hand(attack, known, z, 2, rng), z)
            old, v = v, 0.9 * v - 0.002 * gradient
            z = z - 0.9 * old + 1.9 * v
        assert torch.allclose(some.latents[0][some.draws[0] == draw][0], z, atol=1e-5)


def test_on_ked_mi_by_hand():
    """Adam on (μ, s), latents cut to the box while searching and when drawing."""
    attack, known = (
        Lomma(**{**Lomma.variants["kedmi"][1], "steps": 3, "lr": 0.05, "regulariser": "sampled"}),
        taught(),
    )
    state, rng = (
        torch.stack([torch.zeros(6), torch.ones(6)]).requires_grad_(),
        generator_for(0, "search", 2, 0),
    )
    adam = torch.optim.Adam([state], lr=0.05)
    for _ in range(3):
        z = (state[0] + (state[1] / 2).exp() * torch.randn(1, 6, generator=rng)[0]).clamp(-1, 1)
        (state.grad,) = torch.autograd.grad(loss_by_hand(attack, known, z, 2, rng), state)
        adam.step()
    drawn = state[0] + (state[1] / 2).exp() * torch.randn(
        5, 6, generator=generator_for(0, "read", 2, 0)
    )
    some = found(attack, known)
    assert torch.allclose(some.latents[0], drawn.clamp(-1, 1)[some.draws[0]], atol=1e-4)


STYLED = [Ppa(area=(1, 1)), Ifgmi(area=(1, 1), block_steps=()), Mirror(flip=0.0)]


@pytest.mark.parametrize("attack", STYLED, ids=lambda attack: attack.name)
@pytest.mark.parametrize(
    "options",
    [
        {"students": True},
        {"regulariser": "mean", "regulariser_weight": 3.0},
        {"students": True, "regulariser": "sampled", "reduction": "sum", "loss": "logit"},
        dict(Ppa.variants["lomma"][1]),
    ],
    ids=str,
)
def test_its_parts_serve_the_attacks_on_styles(attack, options):
    """The mean loss over the models, and the distance of the target's features, of two images."""
    known, labels = taught(), torch.tensor([2, 0])
    plain, attack = attack, replace(attack, **options)
    images = torch.rand(2, 3, 16, 16, generator=generator_for(0, "tests", "images"))
    view, module = target().view(["gradients"]), target().module.eval()
    view.module.eval()
    features = module[:6](images)
    models = [module, *known.students] if attack.students else [module]
    losses = [loss_of(attack.loss, model(images), labels, aim=0.5) for model in models]
    expected = torch.stack(losses).mean(0)
    if attack.regulariser != "off":
        usual, spread = known.features
        draws = [torch.randn(128, generator=generator_for(0, "search", y, 0)) for y in (2, 0)]
        p = usual + spread * torch.stack(draws) if attack.regulariser == "sampled" else usual
        distance = ((features - p) ** 2).sum(1) / (128 if attack.reduction == "mean" else 1)
        expected = expected + attack.regulariser_weight * distance

    def loss(attack):
        # MIRROR draws a coin for each image before anything else.
        rng = RowRng.of(0, "search", labels, torch.zeros(2, dtype=torch.long))
        parts = super(Mirror, attack) if isinstance(attack, Mirror) else attack
        return parts.class_loss(view, known, images, labels, rng)[0]

    assert torch.allclose(loss(attack), expected, rtol=1e-4)
    assert not torch.allclose(loss(plain), expected, rtol=1e-2)


@pytest.mark.parametrize("attack", STYLED, ids=lambda attack: attack.name)
def test_attacks_on_styles_say_what_they_miss(attack):
    bare = replace(styled_prior(), students=(), features=None)
    attack = replace(attack, **attack.variants["lomma"][1])
    with pytest.raises(ConfigError) as caught:
        found(attack, bare)
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        f"{attack.name}.students is true",
        f"{attack.name}.regulariser needs feature statistics",
    ]


def test_the_baseline_on_gmi_is_gmi(monkeypatch):
    """Bit for bit, from equal starts, which differ only in the name they are drawn under."""
    draw = descent.fresh
    monkeypatch.setattr(
        descent, "fresh", lambda *given, purpose, **more: draw(*given, purpose="equal", **more)
    )
    same = {"steps": 25, "lr": 0.05, **SMALL}
    ours, gmi = (
        found(Lomma(**same, **OURS["baseline"]), labels=(0, 3)),
        found(Gmi(**same), labels=(0, 3)),
    )
    assert torch.equal(ours.latents, gmi.latents)
    assert torch.equal(ours.confidence, gmi.confidence)
    assert ours.queries == gmi.queries
    assert not torch.equal(found(Lomma(**same), labels=(0, 3)).latents, gmi.latents)


def test_the_baseline_on_ked_mi_is_ked_mi_with_latents_in_a_box():
    ours = found(
        Lomma(**{**Lomma.variants["kedmi"][1], **OURS["baseline"], "steps": 25}), labels=(0, 3)
    )
    ked = found(Kedmi(steps=25, clamp="forward"), labels=(0, 3))
    assert torch.equal(ours.latents, ked.latents)
    assert torch.equal(ours.images, ked.images)


@pytest.mark.parametrize(
    ("variant", "students", "features"),
    [("", 1, 1), ("baseline", 0, 0), ("logit", 0, 1), ("augmentation", 1, 0)],
)
def test_an_ablation_uses_what_it_should_and_nothing_else(variant, students, features):
    """Other students, or statistics, change the result exactly where the variant uses them."""
    known, attack = taught(), Lomma(steps=3, **SMALL, **OURS[variant])
    usual = found(attack, known).latents
    assert torch.equal(
        found(attack, replace(known, students=known.students[:1])).latents, usual
    ) == (not students)
    assert torch.equal(
        found(attack, replace(known, features=known.features + 1)).latents, usual
    ) == (not features)


def test_one_more_equal_student_changes_only_its_share():
    """Students that are all the target itself are no students: the mean is not a sum."""
    known = replace(taught(0), students=(target().module,) * 3)
    alone, many = (
        found(Lomma(steps=5, students=students, **SMALL), known).latents
        for students in (False, True)
    )
    assert torch.allclose(alone, many, atol=1e-4)


def test_latents_stay_in_the_box():
    assert found(Lomma(steps=5, lr=5.0, clamp=0.5, **SMALL)).latents.abs().max() <= 0.5
    assert found(Lomma(steps=5, lr=5.0, clamp=0.0, **SMALL)).latents.abs().max() > 1


def test_a_weight_of_nothing_turns_the_regulariser_off():
    none = found(Lomma(steps=3, regulariser_weight=0.0, **SMALL), replace(taught(), features=None))
    assert torch.equal(none.latents, found(Lomma(steps=3, regulariser="off", **SMALL)).latents)


def test_what_it_needs_is_said_at_once():
    bare = replace(prior(critic=False), students=(), features=None)
    with pytest.raises(ConfigError) as caught:
        found(Lomma(), bare)
    assert list(caught.value.problems) == [
        "lomma.critic_weight is 1, but the prior has no critic: set it to 0",
        "lomma.students is true, but the prior has no students: use prior.name = "
        '"students", or set attack.students to false',
        "lomma.regulariser needs feature statistics, but the prior has none: use "
        'prior.name = "students", or set attack.regulariser to "off"',
    ]
    found(Lomma(steps=1, students=False, regulariser="off", critic_weight=0, **SMALL), bare)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"draws": 5},
            r'draws .5. must be 1 with on = "gmi", .*: use variant = "kedmi"',
        ),
        ({"keep": 9}, r"keep .9. must not exceed candidates .5."),
        (
            {"on": "kedmi", "candidates": 1, "draws": 3},
            r"keep .5. must not exceed candidates · draws .3.",
        ),
        ({"reduction": "max"}, "reduction"),
        ({"regulariser": "median"}, "regulariser"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Lomma(**bad)
