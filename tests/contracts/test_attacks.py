"""Every registered attack keeps the same promises; a new attack is tested by existing."""

import copy

import pytest
import torch

from frostglass.attacks import base
from frostglass.attacks.base import attacks, invert, prior_only
from frostglass.core.errors import AccessError, ConfigError
from frostglass.core.types import Target
from frostglass.core.views import CAPABILITIES, ModelView
from worlds import KilledError, MemoryWork, NoWork, conditional_prior, prior, styled_prior, target

# What makes a registered attack small enough for a test; an attack that is not named here is tested with its own defaults.
SMALL = {
    "brepmi": {
        "points": 12,
        "radius": 0.5,
        "budget": 700,
        "patience": 25,
        "candidates": 3,
        "keep": 2,
        "batch": 64,
    },
    "gmi": {"steps": 6, "candidates": 3, "keep": 2, "lr": 0.1, "coupling": 1},
    "ifgmi": {
        "steps": 6,
        "block_steps": (4, 3),
        "pool": 40,
        "candidates": 3,
        "keep": 2,
        "lr": 0.05,
        "trials": 2,
    },
    "kedmi": {"steps": 6, "draws": 3, "keep": 2, "lr": 0.1, "coupling": 1},
    "lomma": {"steps": 6, "candidates": 3, "keep": 2, "lr": 0.02, "weight": 1.0, "coupling": 1},
    "mirror": {"steps": 6, "candidates": 3, "keep": 2, "pool": 40},
    "mirror_genetic": {
        "pool": 40,
        "population": 12,
        "generations": 5,
        "stop": 1.0,
        "survivors": 3,
        "keep": 2,
        "batch": 64,
    },
    "plgmi": {"steps": 6, "candidates": 3, "keep": 2},
    "ppa": {"steps": 6, "pool": 40, "candidates": 3, "keep": 2, "lr": 0.05, "trials": 2},
    "vmi": {
        "steps": 6,
        "points": 32,
        "draws": 3,
        "keep": 2,
        "lr": 0.05,
        "depth": 2,
        "levels": 2,
        "hidden": 8,
        "weight": 4.0,
    },
}


def small(name: str, **more):
    return attacks.get(name)(**(SMALL.get(name, {}) | more))


def usable(name: str, **more):
    """A prior that the attack can use: IF-GMI needs a generator in blocks."""
    return styled_prior(**more) if name == "ifgmi" else prior(**more)


def run(attack, world=None, *, labels=(0, 1, 2, 3), work=None, seed=5):
    made, known = world or (target(), usable(attack.name))
    return invert(
        attack, made.view(attack.access), known, labels=labels, seed=seed, work=work or NoWork()
    )


@pytest.fixture(params=attacks.names())
def name(request):
    return request.param


def test_shapes_and_ranges(name):
    attack = small(name)
    found = run(attack)
    assert found.images.shape == (4, attack.keep, 3, 16, 16)
    assert found.images.dtype == torch.float32
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert found.queries > 0
    assert ((found.confidence >= 0) & (found.confidence <= 1)).all()


def test_batch_size_changes_nothing(name):
    whole = run(small(name, batch=100))
    for batch in (1, 2, 5):
        parts = run(small(name, batch=batch))
        assert torch.equal(parts.latents, whole.latents)
        assert parts.queries == whole.queries


def test_company_changes_nothing(name):
    """The result for one identity does not depend on which others are attacked, or in which order."""
    whole = run(small(name))
    for labels in ((2,), (3, 2), (2, 0, 1)):
        some = run(small(name), labels=labels)
        assert torch.equal(some.latents[labels.index(2)], whole.latents[2])


def test_restart_changes_nothing(name):
    attack = small(name, batch=2)
    world = (target(), usable(name))
    whole = run(attack, world)
    work = MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        run(attack, world, work=work)
    work.left = None
    resumed = run(attack, world, work=work)
    assert torch.equal(resumed.latents, whole.latents)
    assert torch.equal(resumed.images, whole.images)
    assert resumed.queries == whole.queries


VARIANTS = [(name, variant) for name in attacks.names() for variant in attacks.get(name).variants]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_variant_runs_and_says_why(name, variant):
    why, sets = attacks.get(name).variants[variant]
    assert len(why) > 20
    attack = attacks.get(name)(
        **{**SMALL[name], **sets, "steps": 2, "lr": 1e-3, "candidates": 2, "keep": 2}
    )
    assert run(attack).images.isfinite().all()


@pytest.mark.parametrize(
    "name", [name for name in attacks.names() if hasattr(attacks.get(name)(), "flat")]
)
def test_who_finishes_early_changes_nothing_for_others(name):
    # Random views keep their confidence in motion; all stages of ifgmi together are longer.
    steady = {
        "ifgmi": {"area": (1, 1), "block_steps": ()},
        "plgmi": {"shown": 0},
        "mirror": {"flip": 0.0},
        "ppa": {"area": (1, 1)},
    }.get(name, {})
    early = {"steps": 80, "patience": 8, "flat": 0.3, **steady}
    whole = run(small(name, batch=100, **early))
    assert (whole.steps < 80).any()
    for batch, labels in ((1, (0, 1, 2, 3)), (5, (3, 1))):
        some = run(small(name, batch=batch, **early), labels=labels)
        assert torch.equal(some.latents, whole.latents[list(labels)])
        assert torch.equal(some.steps, whole.steps[list(labels)])
    fixed = run(small(name, batch=100, steps=80, **steady))
    assert whole.queries < fixed.queries
    assert (fixed.steps == 80).all()


@pytest.mark.parametrize("condition", ["label", "hint"])
def test_a_generator_that_is_given_something_gets_that_of_each_identity(name, condition):
    """Pictures of a class carry its mark, whoever shares the batch; attacks that cannot use such a prior say so."""
    attack = small(name)
    known = conditional_prior(condition)
    if name == "brepmi" or getattr(attack, "pool", 0):
        with pytest.raises(ConfigError, match=f"this prior makes pictures of a given {condition}"):
            run(attack, (target(), known))
        return
    for labels in ((0, 1, 2, 3), (3, 1)):
        found = run(attack, (target(), known), labels=labels)
        marks = found.images[:, :, 0, 0, 0]
        assert torch.allclose(marks, torch.tensor(labels)[:, None].expand_as(marks) / 8)


def test_seed_matters_and_repeats(name):
    assert torch.equal(run(small(name)).latents, run(small(name)).latents)
    assert not torch.equal(run(small(name)).latents, run(small(name), seed=6).latents)


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_target_or_prior_changes(name, failing, monkeypatch):
    made, known = target(), usable(name)
    made.module.train()
    made.module[0].weight.grad = torch.ones_like(made.module[0].weight)
    next(known.generator.parameters()).requires_grad_(False)
    networks = [made.module, *known.modules]
    before = [copy.deepcopy(m.state_dict()) for m in networks]
    modes = [part.training for m in networks for part in m.modules()]
    flags = [p.requires_grad for m in networks for p in m.parameters()]
    rng = torch.get_rng_state()
    if failing:
        calls, outputs = [], Target.outputs

        def explode(self, images):
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("power cut")
            return outputs(self, images)

        monkeypatch.setattr(Target, "outputs", explode)
        with pytest.raises(RuntimeError, match="power cut"):
            run(small(name), (made, known))
    else:
        run(small(name), (made, known))
    after = [m.state_dict() for m in networks]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in a)
    assert modes == [part.training for m in networks for part in m.modules()]
    assert flags == [p.requires_grad for m in networks for p in m.parameters()]
    assert torch.equal(made.module[0].weight.grad, torch.ones_like(made.module[0].weight))
    assert torch.equal(rng, torch.get_rng_state())
    assert not made.module._forward_hooks
    assert not made.module[6]._forward_pre_hooks


def test_only_granted_access_is_used(name, monkeypatch):
    """With any weaker view than it declares, an attack is refused by the view; with what it declares, it runs, and needs all of it."""
    attack = small(name)
    (access,) = attack.access
    for weaker in CAPABILITIES[: CAPABILITIES.index(access)]:
        with pytest.raises(AccessError, match=f"grants {weaker} and not"):
            invert(attack, target().view([weaker]), usable(name), seed=0, work=NoWork())
    asked = set()

    def noted(needed, ask):
        return lambda view, images: asked.add(needed) or ask(view, images)

    for use, needed in {
        "labels": "labels",
        "scores": "scores",
        "logits": "gradients",
        "logits_and_features": "gradients",
    }.items():
        monkeypatch.setattr(ModelView, use, noted(needed, getattr(ModelView, use)))
    run(attack)
    assert max(map(CAPABILITIES.index, asked)) == CAPABILITIES.index(access)


def test_beats_prior_only_draws_on_an_undefended_target(name):
    """More confidence of the target than the same number of blind draws, for every identity on average by a clear margin."""
    attack = small(name, **({"steps": 60} if "steps" in SMALL.get(name, {}) else {}))
    made, known = target(), usable(name)
    found, blind = run(attack, (made, known)), prior_only(known, range(4), attack.keep, seed=5)
    made.module.eval()

    def sure(some):  # asked of the target itself: an attack that sees only labels cannot tell
        with torch.no_grad():
            scores = made.module(some.images.flatten(0, 1)).softmax(1)
        return scores.gather(1, some.labels.repeat_interleave(attack.keep)[:, None]).mean()

    assert sure(found) > sure(blind) + 0.1


def test_bad_labels(name):
    with pytest.raises(ConfigError, match=r"labels must lie in 0\.\.3, got 0\.\.9"):
        run(small(name), labels=(0, 9))
    with pytest.raises(ConfigError, match="no identity to attack"):
        run(small(name), labels=())


def test_a_prior_of_another_target_is_refused(name):
    from dataclasses import replace

    with pytest.raises(ConfigError, match="fitted to another target"):
        run(small(name), (target(), replace(usable(name), tied_to="someone else")))
    with pytest.raises(
        ConfigError, match="fitted to a target of 7 classes, and this one has 4: train it again"
    ):
        run(small(name), (target(), replace(usable(name), tied_to="target", classes=7)))


def test_no_candidates_are_refused(name):
    with pytest.raises(ConfigError, match="candidates: expected at least 1, got 0"):
        small(name, candidates=0)


def test_steps_time_and_queries_are_told(name):
    found = run(small(name))
    assert found.steps.shape == found.confidence.shape
    assert (found.steps > 0).all()
    assert not found.partial.any()
    assert found.seconds > 0


def test_a_prior_fitted_to_one_wrapped_model_is_refused_for_another(name):
    """Targets that no store made have no key; their weights tell them apart."""
    from dataclasses import replace

    one, other = (replace(target(seed=seed), key="") for seed in (0, 1))
    fitted = replace(usable(name), tied_to=one.view(["gradients"]).target_key, classes=4)
    assert run(small(name), (one, fitted)).images.isfinite().all()
    with pytest.raises(ConfigError, match="fitted to another target"):
        run(small(name), (other, fitted))


def test_a_prior_of_another_size_is_refused_unless_it_may_be_resized(name):
    from dataclasses import replace

    large = usable(name, shape=(3, 24, 24))
    with pytest.raises(
        ConfigError, match="the prior makes pictures of 3×24×24, the target takes 3×16×16"
    ):
        run(small(name), (target(), large))
    assert (
        run(small(name), (target(), replace(large, info={"resize": True}))).images.shape[-1] == 24
    )


def test_what_is_not_finite_ranks_last_and_is_marked(name, monkeypatch):
    """A target whose scores are not finite for some pictures: those are kept only where there is nothing else, and say so."""
    if name == "brepmi":
        pytest.skip("it is given labels, which are always finite")
    calls, liking = [], base._liking

    def spoiled(view, images, labels):
        score, sure = liking(view, images, labels)
        calls.append(1)
        score[0], sure[0] = torch.nan, torch.nan
        return score, sure

    monkeypatch.setattr(base, "_liking", spoiled)
    found = run(small(name), labels=(1,))
    assert found.confidence.isfinite().all()
    assert not found.broken.any()
    everything = small(name, keep=3)
    found = run(everything, labels=(1,))
    assert found.broken.tolist() == [[False, False, True]]
    assert not found.partial.any()
