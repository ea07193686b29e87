"""The prior that completes images: hints by hand, known pixels, resuming, files, learning."""

import math
from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.types import Images
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.context import Completion, Context, Critics, blurred, hinted, hints_of
from frostglass.priors.students import Students
from frostglass.priors.wgan import Wgan
from frostglass.runtime.seeding import seeded
from worlds import PUBLIC, SHAPE, KilledError, MemoryWork, NoWork, same_weights, target

SMALL = Context(
    diversity=0.0,
    latent=5,
    width=4,
    steps=6,
    critic_steps=2,
    batch=8,
    checkpoint_every=2,
    average=0.5,
)
GREY = (0.5, 0.25, 0.75)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def coloured(count, seed):
    """Images of one colour each: whoever sees the rim knows the middle."""
    pixels = (256 * noise(count, 3, 1, 1, seed=seed)).byte().expand(-1, -1, 16, 16).contiguous()
    return Images(
        pixels=pixels,
        labels=torch.zeros(count, dtype=torch.long),
        names=("one",),
        sources=("made",) * count,
    )


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_hole_in_the_centre(size):
    images = noise(2, 3, size, size)
    hints = hinted(images, "centre", GREY)
    assert hints.shape == (2, 4, size, size)
    for row, column in (
        (0, 0),
        (size // 4 - 1, size // 2),
        (size // 4, size // 4),
        (3 * size // 4 - 1, size // 2),
        (size // 2, 3 * size // 4),
    ):
        inside = size // 4 <= row < 3 * size // 4 and size // 4 <= column < 3 * size // 4
        for image in range(2):
            assert hints[image, :3, row, column].tolist() == (
                list(GREY) if inside else images[image, :, row, column].tolist()
            )
            assert hints[image, 3, row, column].item() == (0.0 if inside else 1.0)
    assert (hints[:, 3] == 0).double().mean().item() == 0.25


def test_a_hole_in_the_shape_of_a_t():
    known = hinted(noise(1, 1, 16, 16), "face_t", [0.5])[0, 1]
    drawn = ["." * 16] * 4 + ["..############.."] * 4 + ["......####......"] * 6 + ["." * 16] * 2
    assert ["".join("." if value else "#" for value in row) for row in known.tolist()] == drawn


def test_of_a_blurred_image_no_pixel_is_known():
    images = noise(2, 3, 16, 16)
    hints = hinted(images, "blur", GREY, 0.1)
    assert torch.equal(hints[:, :3], blurred(images, 1.6))
    assert not hints[:, 3].any()
    assert hints.shape == (2, 4, 16, 16)


@pytest.mark.parametrize("sigma", [0.4, 1.6])
def test_blur_against_a_slow_reference(sigma):
    image = noise(1, 2, 9, 7, dtype=torch.double)
    reach = math.ceil(3 * sigma)
    weights = {step: math.exp(-(step**2) / (2 * sigma**2)) for step in range(-reach, reach + 1)}

    def mirrored(place, length):
        place = abs(place)
        return place if place < length else 2 * (length - 1) - place

    fast = blurred(image, sigma)
    for channel, row, column in ((0, 0, 0), (1, 4, 3), (0, 8, 6), (1, 2, 6)):
        slow = sum(
            down * right * image[0, channel, mirrored(row + y, 9), mirrored(column + x, 7)].item()
            for y, down in weights.items()
            for x, right in weights.items()
        )
        assert fast[0, channel, row, column].item() == pytest.approx(
            slow / sum(weights.values()) ** 2, rel=1e-12
        )
    flat = torch.full((1, 1, 9, 7), 0.3, dtype=torch.double)
    assert torch.allclose(blurred(flat, sigma), flat)


@pytest.mark.parametrize("hint", ["centre", "blur"])
def test_hints_are_differentiable(hint):
    images = noise(1, 1, 4, 4, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: hinted(given, hint, [0.5], 0.2), images)


def test_published_shapes():
    generator, critics = Context().networks((3, 64, 64))
    assert [tuple(layer[0].weight.shape) for layer in generator.reader] == [
        (32, 4, 5, 5),
        (64, 32, 3, 3),
        (64, 64, 3, 3),
        (128, 64, 3, 3),
        *[(128, 128, 3, 3)] * 6,
    ]
    assert [layer[0].dilation[0] for layer in generator.reader] == [1, 1, 1, 1, 1, 1, 2, 4, 8, 16]
    assert generator.identity[0].weight.shape == (8192, 100)
    assert [tuple(p.shape) for p in generator.identity.parameters() if p.ndim == 4] == [
        (512, 256, 5, 5),
        (256, 128, 5, 5),
    ]
    assert [tuple(p.shape) for p in generator.writer.parameters() if p.ndim == 4] == [
        (256, 128, 5, 5),
        (128, 64, 5, 5),
        (32, 64, 3, 3),
        (3, 32, 3, 3),
    ]
    for critic, side in ((critics.whole, 64), (critics.part, 32)):
        published = Wgan().networks((3, side, side))[1]
        assert [tuple(p.shape) for p in critic.parameters()] == [
            tuple(p.shape) for p in published.parameters()
        ]


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_size_maps_to_itself(size, channels):
    with seeded(0, "tests", "networks"):
        generator, critics = Context(width=4, latent=5).networks((channels, size, size))
    images = noise(2, channels, size, size)
    made = generator.eval()(torch.zeros(2, 5), hinted(images, "centre", [0.5] * channels))
    assert made.shape == images.shape
    assert made.min() >= 0
    assert made.max() <= 1
    assert critics(made).shape == (2, 1)
    assert torch.equal(critics(made), critics.whole(made))
    window = critics.window(torch.Generator().manual_seed(0))
    assert made[window].shape == (2, channels, size // 2, size // 2)
    assert critics.part(made[window]).shape == (2, 1)


def test_size_that_does_not_fit():
    with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels, got 40×40"):
        Context().networks((3, 40, 40))


def test_windows_reach_every_corner():
    critics, rng = Critics(4, SHAPE), torch.Generator().manual_seed(0)
    tops = {
        (rows.start, columns.start)
        for _, rows, columns in (critics.window(rng) for _ in range(2000))
    }
    assert tops == {(row, column) for row in range(9) for column in range(9)}


@pytest.mark.parametrize("hint", ["centre", "face_t", "blur"])
def test_what_is_known_stays_and_z_changes_only_the_rest(hint):
    with seeded(0, "tests", "completion"):
        generator = Completion(5, 8, SHAPE).eval()
    images = noise(3, *SHAPE)
    hints = hinted(images, hint, GREY)
    known = hints[:, 3:].bool().expand(-1, 3, -1, -1)
    latents = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    made = generator(latents, hints)
    assert torch.equal(made[known], images[known])
    if known.any():
        (slope,) = torch.autograd.grad(made[known].sum(), latents, retain_graph=True)
        assert not slope.any()
    (slope,) = torch.autograd.grad(made[~known].sum(), latents)
    assert slope.any(1).all()
    other = generator(latents + 1, hints)
    assert torch.equal(made[known], other[known])
    assert not torch.equal(made[~known], other[~known])


def test_rows_do_not_depend_on_their_company():
    made = SMALL.train(PUBLIC, work=NoWork())
    bound = replace(made, hints=hints_of(made.info, PUBLIC.floats(slice(5))))
    latents, labels = (
        torch.randn(32, 5, generator=torch.Generator().manual_seed(0)),
        torch.arange(32) % 5,
    )
    assert torch.equal(bound.images(latents, labels)[:16], bound.images(latents[:16], labels[:16]))


@pytest.mark.parametrize("died_after", [1, 2])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_resumes_to_the_same_bytes(died_after, weight):
    method, view = replace(SMALL, diversity=weight), target().view(["gradients"])
    whole = method.train(PUBLIC, view, seed=0, work=NoWork())
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        method.train(PUBLIC, view, seed=0, work=work)
    work.left = None
    resumed = method.train(PUBLIC, view, seed=0, work=work)
    assert same_weights(whole.generator, resumed.generator)
    assert same_weights(whole.critic, resumed.critic)
    assert view.queries == (
        0 if not weight else 2 * 8 * (6 + 6)
    )  # each step once or, where it was lost, again


def test_losses_against_slow_references(monkeypatch):
    """The losses handed to the loop, on one step's draws, are the formulas of the docstring."""
    trainings = []

    def keep(training, work):
        trainings.append(training)
        return training.generator

    monkeypatch.setattr("frostglass.priors._gan.train_in_turns", keep)
    made = target()
    method = replace(SMALL, penalty=0.0, diversity=0.7)
    method.train(PUBLIC, made.view(["gradients"]), work=NoWork())
    made.module.eval()
    (training,) = trainings
    generator, critics = training.generator, training.critic

    rng = torch.Generator().manual_seed(4)
    real = PUBLIC.floats(torch.randint(40, (8,), generator=rng))
    fill = PUBLIC.floats().double().mean((0, 2, 3)).float()
    hints, latents = hinted(real, "centre", fill.tolist()), torch.randn(8, 5, generator=rng)
    fake = generator(latents, hints)
    top, left = torch.randint(9, (2,), generator=rng).tolist()
    part = critics.part(fake[:, :, top : top + 8, left : left + 8])
    judged = (
        critics.whole(fake).mean()
        - critics.whole(real).mean()
        + part.mean()
        - critics.part(real[:, :, top : top + 8, left : left + 8]).mean()
    )
    assert training.critic_loss(torch.Generator().manual_seed(4)).item() == pytest.approx(
        judged.item(), abs=1e-5
    )

    others = torch.randn(8, 5, generator=rng)
    features, other_features = (
        made.module[:6](images) for images in (fake, generator(others, hints))
    )
    apart = (features - other_features).abs().mean() / (latents - others).abs().mean()
    slow = -(critics.whole(fake).mean() + part.mean()) / 2 - 0.7 * apart
    assert training.generator_loss(torch.Generator().manual_seed(4)).item() == pytest.approx(
        slow.item(), abs=1e-5
    )


def test_diversity_ties_the_prior_to_a_target_and_leaves_that_alone():
    assert not SMALL.tied
    assert Context().tied
    free = SMALL.train(PUBLIC, target().view(["gradients"]), work=NoWork())
    assert (free.tied_to, free.classes, free.condition, free.hints) == (None, 0, "hint", None)
    made = target()
    before, view = (
        {name: t.clone() for name, t in made.module.state_dict().items()},
        made.view(["gradients"]),
    )
    tied = replace(SMALL, diversity=0.5).train(PUBLIC, view, work=NoWork())
    assert (tied.tied_to, tied.classes) == ("target", 4)
    assert view.queries == 6 * 2 * 8
    assert all(part.training for part in made.module.modules())
    assert all(p.requires_grad and p.grad is None for p in made.module.parameters())
    assert all(torch.equal(before[name], t) for name, t in made.module.state_dict().items())
    assert not same_weights(free.generator, tied.generator)
    with pytest.raises(
        ConfigError, match=r"context is fitted to one target .*or set prior.diversity to 0"
    ):
        Context().train(PUBLIC, work=NoWork())


@pytest.mark.slow
def test_learns_what_the_rim_tells_of_the_hole():
    method = Context(
        diversity=0, latent=5, width=8, steps=90, critic_steps=2, batch=16, lr=2e-3, average=0.9
    )
    made = method.train(coloured(64, seed=0), work=NoWork())
    unseen = coloured(64, seed=1).floats()
    hints = hints_of(made.info, unseen)
    hole = ~hints[:, 3:].bool().expand(-1, 3, -1, -1)
    latents = torch.randn(2, 64, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (made.generator(z, hints) for z in latents)
    filled, completed = ((guess - unseen)[hole].abs().mean() for guess in (hints[:, :3], one))
    assert completed < 0.95 * filled  # ten seeds: 0.62 to 0.87; untrained: 1.00
    colours = torch.stack(
        [unseen[..., 8, 8].flatten(), one[..., 4:12, 4:12].mean((2, 3)).flatten()]
    )
    assert colours.corrcoef()[0, 1] > 0.3  # ten seeds: 0.51 to 0.78; untrained: 0.00
    assert (one - other)[hole].abs().mean() > 1e-3  # z matters
    assert torch.equal(one[~hole], unseen[~hole])


def test_file_round_trip(tmp_path):
    made = replace(SMALL, hint="blur", blur=0.05).train(PUBLIC, work=NoWork())
    write_prior(made, tmp_path / "p.safetensors")
    read = read_prior(tmp_path / "p.safetensors")
    assert same_weights(made.generator, read.generator)
    assert same_weights(made.critic, read.critic)
    assert read.condition == "hint"
    images = noise(4, *SHAPE)
    table = hints_of(read.info, images)
    assert torch.equal(table, hints_of(made.info, images))
    assert torch.equal(table, hinted(images, "blur", GREY, 0.05))
    with pytest.raises(ConfigError, match=r"got no hints: bind them with"):
        read.images(torch.zeros(1, 5), torch.tensor([0]))
    bound = replace(read, hints=table)
    latents = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([2, 0, 2])
    assert torch.equal(bound.images(latents, labels), read.generator(latents, table[labels]))
    assert bound.realism(images).shape == (4,)


def test_the_hole_is_filled_with_the_mean_of_the_public_images():
    made = SMALL.train(PUBLIC, work=NoWork())
    assert made.info["fill"] == pytest.approx(
        PUBLIC.floats().double().mean((0, 2, 3)).tolist(), abs=1e-6
    )
    assert hints_of(made.info, noise(2, *SHAPE))[1, :3, 8, 8].tolist() == pytest.approx(
        made.info["fill"]
    )


def test_hints_for_the_wrong_prior_or_of_the_wrong_shape():
    made = SMALL.train(PUBLIC, work=NoWork())
    with pytest.raises(
        DataError, match=r"completes images of shape \(3, 16, 16\), got \(3, 32, 32\)"
    ):
        hints_of(made.info, noise(2, 3, 32, 32))
    with pytest.raises(ConfigError, match="only one made by the method context"):
        hints_of({"method": {"name": "wgan"}}, noise(2, *SHAPE))


def test_students_can_be_added_to_it(tmp_path):
    made = SMALL.train(PUBLIC, work=NoWork())
    method = Students(
        base={"name": "context", "diversity": 0.0},
        students=({"model": "cnn", "options": {"width": 4}},),
        epochs=1,
    )
    added = method.train(PUBLIC, target().view(["gradients"]), base=made, work=NoWork())
    write_prior(added, tmp_path / "p.safetensors")
    read = read_prior(tmp_path / "p.safetensors")
    images = noise(4, *SHAPE)
    assert torch.equal(hints_of(read.info, images), hints_of(made.info, images))
    assert same_weights(read.generator, made.generator)
    assert read.condition == "hint"
