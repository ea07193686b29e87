"""Tests of PPA: its starts, one step by hand, its selection, and its style space."""

from itertools import pairwise

import pytest
import torch

from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.styled import best_styles, pool_styles, style_scores
from frostglass.attacks.base import invert
from frostglass.attacks.model.ifgmi import Ifgmi
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.objective import poincare
from frostglass.data._augment import CROP_DRAWS, cropped
from frostglass.priors._style_space import StyleSpace
from frostglass.runtime.seeding import generator_for
from worlds import NoWork, close_images, conditional_prior, of_people, prior, styled_prior, target

SMALL = {"pool": 40, "candidates": 4, "keep": 2, "steps": 5, "lr": 0.05, "trials": 3}


def run(attack, known, labels=(0, 1, 2, 3), made=None):
    return invert(
        attack,
        (made or target()).view(["gradients"]),
        Assets(prior=known),
        people=labels,
        seed=0,
        work=NoWork(),
    )


def test_defaults_are_the_published_ones():
    ppa = Ppa()
    assert (ppa.loss, ppa.lr, ppa.betas, ppa.steps, ppa.candidates, ppa.keep) == (
        "poincare",
        0.005,
        (0.1, 0.1),
        50,
        200,
        50,
    )
    assert (ppa.pool, ppa.truncation, ppa.cutoff, ppa.area, ppa.trials) == (
        2000,
        0.5,
        8,
        (0.9, 1.0),
        100,
    )
    assert (ppa.trial_area, ppa.trial_ratio, ppa.critic_weight) == ((0.5, 0.9), (0.8, 1.2), 0)
    assert (ppa.milestones, ppa.decay, ppa.w_plus, ppa.clip) == ((), 0.1, False, False)
    assert Ppa.variant("default-config").milestones == (30, 40)


def test_styles_are_those_of_the_mapping_network():
    known = styled_prior()
    space, network = StyleSpace(known, 0.5, 3), known.generator.network
    latents = torch.randn(5, known.latent, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        w = space.styles(latents)
        assert torch.equal(w, network.mapping.w(latents))
        ws = network.mapping(latents, truncation=0.5, cutoff=3)
        assert torch.allclose(
            space.images(w, truncate=True), network.synthesis(ws) / 2 + 0.5, atol=1e-6
        )
        assert torch.allclose(space.truncated(w), ws[:, 0])
        assert torch.allclose(
            space.images(w), network.synthesis(network.mapping(latents)) / 2 + 0.5, atol=1e-6
        )


def test_a_generator_without_mapping_is_searched_in_its_latents():
    known = prior()
    known.generator.eval()
    space = StyleSpace(known, 0.5)
    latents = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert space.styles(latents) is latents
    assert torch.equal(space.images(latents, truncate=True), known.generator(0.5 * latents))
    assert run(Ppa(**SMALL), known).latents.shape == (4, 2, 6)


def test_starts_are_what_the_target_and_its_mirror_image_like_best():
    made, known = target(), styled_prior()
    made.module.eval()
    space = StyleSpace(known, 0.5, 8)
    styles, labels = pool_styles(space, 30, seed=2), torch.tensor([3, 2])
    liked = best_styles(
        styles, style_scores(made.view(["gradients"]), space, styles, labels, mirrored=True), 4
    )
    latents = torch.randn(30, known.latent, generator=generator_for(2, "pool"))
    with torch.no_grad():
        images = known.generator.paint(
            known.generator.network.mapping(latents, truncation=0.5, cutoff=8)
        ).clamp(0, 1)
        score = (
            made.module(images).double().softmax(1)
            + made.module(images.flip(3)).double().softmax(1)
        ) / 2
    for label, chosen in zip((3, 2), liked, strict=True):
        best = score[:, label].argsort(descending=True)[:4]
        assert torch.allclose(chosen, known.generator.network.mapping.w(latents[best]), atol=1e-6)


def test_one_step_by_hand():
    """Adam's first step moves each coordinate by lr against its gradient, on the row's own crop."""
    made, known = target(), styled_prior()
    none, one = (
        run(
            Ppa(**SMALL | {"steps": steps, "candidates": 1, "keep": 1}),
            known,
            labels=[2],
            made=made,
        )
        for steps in (0, 1)
    )
    made.module.eval()
    w = none.latents[0].clone().requires_grad_()
    draws = torch.rand(CROP_DRAWS, generator=generator_for(0, "search", 2, 0))[None]
    seen = cropped(known.generator.paint(w), draws, area=(0.9, 1.0))
    (slope,) = torch.autograd.grad(poincare(made.module(seen), torch.tensor([2])).sum(), w)
    assert torch.allclose(one.latents[0], w - 0.05 * slope.sign(), atol=1e-4)


@pytest.mark.parametrize("milestones", [(), (30, 40), (0, 5, 5)])
def test_the_step_size_falls_as_the_library_schedule_does(milestones):
    """The published code steps a MultiStepLR after each step of its optimiser."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(milestones), gamma=0.1)
    attack = Ppa(milestones=milestones)
    for step in range(1, 51):
        assert attack.ramp(step, 50) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_the_step_size_is_the_milestones_in_a_search():
    known, moves = styled_prior(), []
    for steps in (2, 3, 4):  # Adam without a memory moves each coordinate by the step size
        sizes = {"steps": steps, "candidates": 1, "keep": 1, "area": (1.0, 1.0), "betas": (0, 0)}
        moves.append(run(Ppa(**SMALL | sizes, milestones=(3,)), known, labels=[2]).latents)
    whole, small = (b - a for a, b in pairwise(moves))
    assert whole.abs().median().item() == pytest.approx(0.05, rel=1e-2)
    assert small.abs().median().item() == pytest.approx(0.005, rel=1e-2)


def test_a_style_for_each_layer_starts_at_the_image_that_was_scored():
    made, known = target(), styled_prior()
    sizes = {"candidates": 2, "keep": 2, "truncation": 0.3, "cutoff": 4, "trials": 0}
    still = run(Ppa(**SMALL | sizes | {"steps": 0}, w_plus=True), known, [1], made)
    latents = torch.randn(40, known.latent, generator=generator_for(0, "pool"))
    network = known.generator.network
    with torch.no_grad():
        ws = network.mapping(latents, truncation=0.3, cutoff=4)
        images = known.generator.paint(ws).clamp(0, 1)
    assert still.latents.shape == (1, 2, 6 * 8)
    for latent, image in zip(still.latents[0], still.images[0], strict=True):
        gap = (ws.flatten(1) - latent).abs().amax(1)
        assert gap.min() < 1e-5
        assert torch.allclose(images[gap.argmin()], image, atol=1e-5)
    moved = run(Ppa(**SMALL | sizes, w_plus=True), known, [1], made).latents[0]
    change = (moved - still.latents[0, still.draws[0]]).unflatten(1, (6, 8))
    assert (change[:, 0] - change[:, 5]).abs().max() > 0.01  # layers go their own ways


def test_clipped_images_have_no_gradient_where_they_are_cut():
    view, labels = target().view(["gradients"]), torch.tensor([0, 1])
    view.module.eval()
    images = torch.rand(2, *view.image_shape, generator=torch.Generator().manual_seed(0)) * 3 - 1
    images.requires_grad_()
    outside = (images < 0) | (images > 1)
    rng = RowRng.of(0, "search", labels, labels)
    for clip, shown in ((False, images), (True, images.clamp(0, 1))):
        attack = Ppa(area=(1.0, 1.0), clip=clip)
        loss, _ = attack.class_loss(view, styled_prior(), images, labels, rng)
        assert torch.allclose(loss, poincare(view.module(shown), labels))
        (slope,) = torch.autograd.grad(loss.sum(), images)
        assert bool((slope[outside] == 0).all()) == clip


def test_the_start_is_truncated():
    known = styled_prior()
    still = run(Ppa(**SMALL | {"steps": 0, "truncation": 0.0}), known)
    assert torch.allclose(
        still.latents, known.generator.network.mapping.w_avg.expand_as(still.latents)
    )


def test_kept_are_the_most_robust():
    made, known = target(), styled_prior()
    everyone = run(Ppa(**SMALL | {"keep": 4}), known, made=made)
    attack = Ppa(**SMALL | {"keep": 4, "trials": 3})
    made.module.eval()
    for person in range(4):
        scores = []
        for place, draw in enumerate(everyone.draws[person].tolist()):
            rng = generator_for(0, "rank", person, draw)
            image = everyone.images[person, place][None]
            with torch.no_grad():
                views = [
                    cropped(
                        image,
                        torch.rand(CROP_DRAWS, generator=rng)[None],
                        area=(0.5, 0.9),
                        ratio=(0.8, 1.2),
                        mirror=0.5,
                    )
                    for _ in range(3)
                ]
                scores.append(
                    torch.stack([made.module(seen).softmax(1)[0, person] for seen in views])
                    .mean()
                    .item()
                )
        assert scores == sorted(scores, reverse=True)
    assert torch.equal(run(attack, known, made=made).images, everyone.images)


def test_queries_are_counted():
    view = target().view(["gradients"])
    found = invert(
        Ppa(**SMALL), view, Assets(prior=styled_prior()), people=[0, 1], seed=0, work=NoWork()
    )
    # 40 draws and their mirror images, 5 steps and 3 trials of 2 × 4 candidates, and a read-out.
    assert found.queries == view.queries == 80 + 5 * 8 + 3 * 8 + 8


def test_other_people_order_and_batch_change_nothing():
    known = styled_prior()
    whole = run(Ppa(**SMALL), known)
    for batch, labels in ((1, (2,)), (5, (3, 2)), (100, (2, 0, 1))):
        some = run(Ppa(**SMALL, batch=batch), known, labels)
        assert close_images(some, of_people(whole, list(labels)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool": 3}, r"pool \(3\) must be at least candidates \(4\)"),
        ({"truncation": 1.5}, "truncation"),
        ({"truncation": -0.1}, "truncation"),
        ({"area": (0.9, 0.5)}, "area must give the least before the greatest"),
        ({"area": (0.5, 1.5)}, "area"),
        ({"decay": 0.0}, "decay"),
        ({"milestones": (-1,)}, "milestones"),
        ({"keep": 5}, r"keep \(5\) must not exceed candidates"),
    ],
)
def test_bad_parameters_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Ppa(**SMALL | wrong)


def test_a_style_for_each_layer_needs_layers():
    with pytest.raises(ConfigError, match=r"ppa\.w_plus needs the layers of a StyleGAN2"):
        run(Ppa(**SMALL, w_plus=True), prior())
    with pytest.raises(ConfigError, match="ifgmi searches one style for all layers"):
        Ifgmi(w_plus=True)


def test_a_conditional_prior_is_refused():
    with pytest.raises(ConfigError, match=r"ppa scores random draws .* needs a label"):
        run(Ppa(**SMALL), conditional_prior("label"))
