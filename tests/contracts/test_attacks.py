"""The contract of every registered attack on models; a new attack is tested by existing."""

import copy
from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from frostglass.attacks import Descent, ModelAttack, attacks, invert, prior_only
from frostglass.attacks._search import runner
from frostglass.attacks._search.query_budget import most_queries
from frostglass.attacks._search.styled import StyleDescent
from frostglass.attacks._search.wrapped import WrappedAttack
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.errors import AccessError, ConfigError
from frostglass.core.method import AuditSize
from frostglass.core.prior import ScoredDraws
from frostglass.core.types import CAPABILITIES, Target
from frostglass.core.views import ModelView
from worlds import (
    PUBLIC,
    KilledError,
    MemoryWork,
    NoWork,
    close_images,
    conditional_prior,
    of_people,
    prior,
    styled_prior,
    target,
)

NAMES = [name for name in attacks.names() if attacks.get(name).surface == "model"]

BASE = {"name": "gmi", "steps": 12, "lr": 0.1, "coupling": 1}  # of attacks that wrap another
# Parameters that make an attack small enough for a test; others are tested with their defaults.
SMALL = {
    "brepmi": {
        "points": 6,
        "radius": 0.5,
        "max_queries": 300,
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
    "known": {"base": BASE, "attribute": "bright", "candidates": 3, "keep": 2},
    "kedmi": {"steps": 6, "draws": 3, "keep": 2, "lr": 0.1, "coupling": 1},
    "lokt": {"steps": 6, "candidates": 12, "keep": 2, "batch": 16},
    "lomma": {"steps": 6, "candidates": 3, "keep": 2, "lr": 0.02, "weight": 1.0, "coupling": 1},
    "members": {"base": BASE, "candidates": 3, "keep": 2},
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
    "modes": {"base": BASE, "candidates": 3, "keep": 2},
    "plgmi": {"steps": 6, "candidates": 3, "keep": 2},
    "ppa": {"steps": 6, "pool": 40, "candidates": 3, "keep": 2, "lr": 0.05, "trials": 2},
    "ppdgmi": {
        "base": BASE,
        "searches": 3,
        "keep": 2,
        "points": 2,
        "inversion": 4,
        "tuning": 4,
        "tuning_batch": 8,
        "critic_steps": 1,
    },
    "repel": {"base": BASE, "rounds": 3, "searches": 1, "keep": 2},
    "smile": {"steps": 6, "max_queries": 60, "patience": 0, "candidates": 3, "keep": 2},
    "unlearn": {"base": BASE, "rounds": 3, "searches": 1, "keep": 2, "tuning": 4, "references": 8},
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
    """A prior that the attack can use: IF-GMI needs blocks, LOKT and SMILE copies of the target."""
    known = styled_prior(**more) if name == "ifgmi" else prior(**more)
    if name not in ("lokt", "smile"):
        return known
    latents = torch.randn(40, known.latent, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        images = known.generator.eval()(latents)
        scores = target().module.eval()(images).softmax(1)
    known.generator.train()
    return replace(known, students=(target().module,), scored=ScoredDraws(latents, scores))


def run(attack, world=None, *, labels=(0, 1, 2, 3), work=None, seed=5):
    made, known = world or (target(), usable(attack.name))
    view = made.view(attack.access)
    return invert(attack, view, given(known), people=labels, seed=seed, work=work or NoWork())


def given(known):
    """A prior, and the other assets that some attacks need."""
    network = replace(target(seed=4), classes=("dark", "bright", "red", "blue"), attributes=True)
    attribute = KnownAttribute("bright", (True, False, True, False), network)
    return Assets(public=PUBLIC, prior=known, embedder=target(seed=3), attribute=attribute)


@cache
def result(name):
    """Return the result of the small attack, computed once."""
    return run(small(name))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_shapes_and_ranges(name):
    attack, found = small(name), result(name)
    assert found.images.shape == (4, attack.keep, 3, 16, 16)
    assert found.images.dtype == torch.float32
    assert found.images.min() >= 0
    assert found.images.max() <= 1
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert found.queries > 0
    assert ((found.confidence >= 0) & (found.confidence <= 1)).all()
    assert found.steps.shape == found.confidence.shape
    assert (found.steps > 0).all()
    assert not found.partial.any()
    assert found.seconds > 0


def test_batch_size_changes_nothing(name):
    for batch in (1, 5):
        parts = run(small(name, batch=batch))
        assert close_images(parts, result(name))
        assert parts.queries == result(name).queries


def test_other_people_change_nothing(name):
    """The result for a person depends neither on who else is attacked nor on the order."""
    for labels in ((2,), (3, 2), (2, 0, 1)):
        some = run(small(name), labels=labels)
        assert close_images(some, of_people(result(name), list(labels)))


def least_of(attack):
    """The attack with the fewest iterations that it can have."""
    return replace(attack, **attack.scaled_counts(0.0))


def test_a_query_budget_is_kept(name):
    attack = small(name)
    if name == "lokt":  # its queries are those of the prior
        with pytest.raises(ConfigError, match="query_budget: lokt asks the target while its prior"):
            attack.within(10_000, 4)
        return
    most, least = (most_queries(each, 4) for each in (attack, least_of(attack)))
    assert result(name).queries <= 4 * most
    assert attack.within(most, 4) == attack
    budget = (least + most) // 2
    limited = attack.within(budget, 4)
    assert least <= most_queries(limited, 4) <= budget < most
    assert run(limited).queries <= 4 * budget
    with pytest.raises(ConfigError, match=f"at least {least:,} images per person of 4"):
        attack.within(least - 1, 4)


def test_restart_changes_nothing(name):
    attack = small(name, batch=2)
    world, unbroken = (target(), usable(name)), MemoryWork()
    whole = run(attack, world, work=unbroken)
    for saves in (1, len(unbroken.kept)):  # the first part of the starts or searches, and all
        work = MemoryWork(saves_before_death=saves)
        with pytest.raises(KilledError):
            run(attack, world, work=work)
        work.left = None
        resumed = run(attack, world, work=work)
        assert torch.equal(resumed.latents, whole.latents)
        assert torch.equal(resumed.images, whole.images)
        assert resumed.queries == whole.queries


VARIANTS = [(name, variant) for name in NAMES for variant in attacks.get(name).variants]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_variant_runs_and_says_why(name, variant):
    why, sets = attacks.get(name).variants[variant]
    assert len(why) > 20
    kind = attacks.get(name)
    if issubclass(kind, WrappedAttack):
        attack = kind(**{**sets, **SMALL[name]})
    else:
        short = {"steps": 2, "lr": 1e-3, "candidates": 2, "keep": 2}
        short = {key: value for key, value in short.items() if hasattr(kind, key)}
        attack = kind(**{**SMALL[name], **sets, **short})
    # Attacks on styles have variants that need the layers of a StyleGAN2.
    known = styled_prior() if isinstance(attack, StyleDescent) else usable(name)
    assert run(attack, (target(), known)).images.isfinite().all()


@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(attacks.get(n), Descent)])
def test_rows_that_stop_early_change_nothing_for_others(name):
    # Random views would keep the confidence moving; the stages of ifgmi together are longer.
    steady = {
        "ifgmi": {"area": (1, 1), "block_steps": ()},
        "plgmi": {"shown": 0},
        "lokt": {"shown": 0},
        "mirror": {"flip": 0.0},
        "ppa": {"area": (1, 1)},
    }.get(name, {})
    early = {"steps": 50, "patience": 8, "flat": 0.3, **steady}
    whole = run(small(name, batch=100, **early))
    assert (whole.steps < 50).any()
    for batch, labels in ((1, (3, 1)), (5, (0, 1, 2, 3))):
        some = run(small(name, batch=batch, **early), labels=labels)
        assert close_images(some, of_people(whole, list(labels)))
        assert torch.equal(some.steps, whole.steps[list(labels)])
    fixed = run(small(name, batch=100, steps=50, patience=0, **steady))
    if name != "lokt":  # whose steps ask no target
        assert whole.queries < fixed.queries
    assert (fixed.steps == 50).all()


@pytest.mark.parametrize("condition", ["label", "hint"])
def test_a_conditional_generator_gets_the_label_or_hint_of_each_person(name, condition):
    """Images of a class carry its mark; attacks that cannot use such a prior refuse it."""
    attack = small(name)
    known = conditional_prior(condition)
    # Units of classes have no label of their own, and draws that were scored before none either.
    if attack.start_draws or name in ("members", "smile"):
        with pytest.raises(ConfigError, match=f"this prior needs a {condition} for each image"):
            run(attack, (target(), known))
        return
    for labels in ((0, 1, 2, 3), (3, 1)):
        found = run(attack, (target(), known), labels=labels)
        marks = found.images[:, :, 0, 0, 0]
        assert torch.allclose(marks, torch.tensor(labels)[:, None].expand_as(marks) / 8)


def test_seed_matters_and_repeats(name):
    assert torch.equal(run(small(name)).latents, result(name).latents)
    assert not torch.equal(run(small(name), seed=6).latents, result(name).latents)


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
    """A weaker view than declared is refused; the declared one suffices and is fully used."""
    attack, assets = small(name), given(usable(name))
    (access,) = attack.access
    for weaker in CAPABILITIES[: CAPABILITIES.index(access)]:
        view = target().view(weaker)
        with pytest.raises(ConfigError, match=f"needs access to {access}, got {weaker}"):
            invert(attack, view, assets)
        with pytest.raises(AccessError, match=f"grants {weaker}, not"):
            attack.run(view, assets, torch.tensor([0, 1]), seed=0, work=NoWork())
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
    """The target is clearly more confident than on as many prior-only draws."""
    attack = small(name, **({"steps": 60} if "steps" in SMALL.get(name, {}) else {}))
    made, known = target(), usable(name)
    found, draws = run(attack, (made, known)), prior_only(known, range(4), attack.keep, seed=5)
    made.module.eval()

    def sure(some):  # by the target itself: an attack that sees only labels has no confidence
        with torch.no_grad():
            scores = made.module(some.images.flatten(0, 1)).softmax(1)
        return scores.gather(1, some.labels.repeat_interleave(attack.keep)[:, None]).mean()

    assert sure(found) > sure(draws) + 0.1


def test_bad_labels(name):
    with pytest.raises(ConfigError, match=r"labels must lie in 0\.\.3, got 0\.\.9"):
        run(small(name), labels=(0, 9))
    with pytest.raises(ConfigError, match="no person to attack"):
        run(small(name), labels=())


def test_a_prior_of_another_target_is_refused(name):
    with pytest.raises(ConfigError, match="fitted to another target"):
        run(small(name), (target(), replace(usable(name), tied_to="someone else")))
    with pytest.raises(ConfigError, match="fitted to a target of 7 classes, got one of 4"):
        run(small(name), (target(), replace(usable(name), tied_to="target", classes=7)))


def test_no_candidates_are_refused(name):
    with pytest.raises(ConfigError, match="candidates: expected at least 1, got 0"):
        small(name, candidates=0)


def test_a_prior_fitted_to_one_wrapped_model_is_refused_for_another(name):
    """Targets that no store produced have no key; a hash of their weights identifies them."""
    one, other = (replace(target(seed=seed), key="") for seed in (0, 1))
    fitted = replace(usable(name), tied_to=one.view(["gradients"]).target_key, classes=4)
    assert run(small(name), (one, fitted)).images.isfinite().all()
    with pytest.raises(ConfigError, match="fitted to another target"):
        run(small(name), (other, fitted))


def test_a_prior_of_another_size_is_refused_unless_it_may_be_resized(name):
    large = usable(name, shape=(3, 24, 24))
    expected = "the prior generates images of 3×24×24, the target takes 3×16×16"
    with pytest.raises(ConfigError, match=expected):
        run(small(name), (target(), large))
    resized = replace(large, info={"resize": True})
    assert run(small(name), (target(), resized)).images.shape[-1] == 24


def test_what_is_not_finite_ranks_last_and_is_marked(name, monkeypatch):
    """Images with non-finite scores are kept only where there is nothing else, and marked."""
    if attacks.get(name)().access == ("labels",):
        pytest.skip("labels are always finite")
    scored = runner._score

    def spoiled(view, images, labels):
        score, sure = scored(view, images, labels)
        score[0], sure[0] = torch.nan, torch.nan
        return score, sure

    monkeypatch.setattr(runner, "_score", spoiled)
    found = run(small(name), labels=(1,))
    assert found.confidence.isfinite().all()
    assert not found.broken.any()
    everything = small(name, keep=3)
    found = run(everything, labels=(1,))
    assert found.broken.tolist() == [[False, False, True]]
    assert not found.partial.any()


ITERATIONS = {
    "steps", "pool", "trials", "generations", "population", "tries", "block_steps", "max_queries",
    "candidates", "keep", "base", "tuning", "inversion",
}  # fmt: skip
# Parameters at which a naive brief copy would be invalid.
TIGHT = {
    "ppa": {"batch": 400, "candidates": 1500, "pool": 1500},
    "mirror": {"batch": 400, "candidates": 1500, "pool": 1500, "keep": 1500},
    "mirror_genetic": {"elite": 700, "survivors": 800, "keep": 700},
    "gmi": {"batch": 400, "candidates": 1500, "pool": 1500, "keep": 1500},
    "brepmi": {"samples": 4},
    "modes": {"base": {"name": "mirror", "pool": 1500}, "batch": 400, "candidates": 1500},
    "repel": {"base": {"name": "mirror", "pool": 500}, "rounds": 100, "keep": 100},
}


@pytest.mark.parametrize("tight", [False, True])
def test_the_brief_copy_changes_only_iterations(name, tight):
    attack = attacks.get(name)(**(TIGHT.get(name, {}) if tight else {}))
    assert isinstance(attack, ModelAttack)
    brief, size = attack.brief(), AuditSize(people=7)
    assert type(brief) is type(attack)
    assert brief.budget(size).evaluations <= attack.budget(size).evaluations
    assert brief.brief() == brief
    changed = {f.name for f in fields(attack) if getattr(attack, f.name) != getattr(brief, f.name)}
    assert changed <= ITERATIONS
    if "base" in changed:
        tables = [each.base.items() for each in (attack, brief)]
        assert {name for name, _ in set(tables[1]) - set(tables[0])} <= ITERATIONS


def test_the_budget_counts_the_queries_of_a_run(name):
    """All queries but those of the read-out, which shows each final image once."""
    attack = small(name, samples=2)
    result = run(attack, labels=(0, 1, 3))
    read_out = 3 * attack.candidates * attack.reads * attack.samples
    evaluations = attack.budget(AuditSize(people=3)).evaluations
    if name == "brepmi":  # walks and draws may stop early
        assert result.queries <= evaluations + read_out
    else:
        assert result.queries == evaluations + read_out


def test_the_budget_describes_people_candidates_and_searches(name):
    attack = small(name)
    plural = "" if attack.candidates == 1 else "s"
    words = attack.budget(AuditSize(people=1200)).description
    assert words.startswith(f"1,200 people × {attack.candidates} candidate{plural} × ")
    assert words.endswith(f", pool of {attack.start_draws:,}") == bool(attack.start_draws)


def test_titles_are_distinct():
    titles = [attacks.get(name).title for name in NAMES]
    assert all(titles)
    assert len(set(titles)) == len(titles)


def test_a_missing_prior_is_refused(name):
    with pytest.raises(ConfigError, match=r"needs assets\.prior, got none"):
        invert(small(name), target().view("gradients"), Assets())
