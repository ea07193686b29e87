"""Tests of families: torch.distributions, references row by row, numerical gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from frostglass.attacks._search.families import (
    Diagonal,
    Distribution,
    Family,
    Gaussian,
    Mixture,
    Point,
)
from frostglass.core.errors import ConfigError
from frostglass.networks.flow import Flow
from frostglass.runtime.seeding import generator_for

SIZE = 5
DISTRIBUTIONS: list[Distribution] = [
    Diagonal(SIZE, log_variance=0.3),
    Gaussian(SIZE),
    Mixture(SIZE, components=3),
    Flow(SIZE, depth=2, levels=2, hidden=4),
]
FAMILIES: list[Family] = [Point(SIZE), Diagonal(SIZE, clamp=1.0), *DISTRIBUTIONS]
LOG_ROOT = math.log(2 * math.pi) / 2


def normals(*shape, seed=0, dtype=torch.double):
    return torch.randn(shape, generator=generator_for(seed, "test families"), dtype=dtype)


def moved(family, rows=3, seed=1, by=0.3):
    """A state in double precision that differs from row to row in every number."""
    state = family.begin(normals(rows, family.latent, seed=seed))
    return state + by * normals(*state.shape, seed=seed + 1)


def normal_log_density(z):
    return -(z**2).sum(-1) / 2 - z.shape[-1] * LOG_ROOT


def torch_mixture(family, row):
    logits, means, log_variances = row.split([1, family.latent, family.latent], dim=1)
    return MixtureSameFamily(
        Categorical(logits=logits[:, 0]), Independent(Normal(means, (log_variances / 2).exp()), 1)
    )


# What all have in common


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_shapes_and_types(family):
    state = family.begin(torch.zeros(3, SIZE))
    latents = family.sample(state, normals(3, 4, family.noise, dtype=torch.float32))
    assert state.shape[0] == 3
    assert latents.shape == (3, 4, SIZE)
    assert latents.dtype == torch.float32
    if family in DISTRIBUTIONS:
        assert family.kl(state, normals(3, 4, family.noise)).shape == (3,)


@pytest.mark.parametrize("family", [f for f in FAMILIES if not isinstance(f, Flow)], ids=repr)
def test_a_double_state_gives_double_latents(family):
    assert (
        family.sample(moved(family), normals(3, 4, family.noise, dtype=torch.float32)).dtype
        == torch.double
    )


def test_a_flow_is_double_inside():
    family = Flow(SIZE, depth=2, hidden=4)
    assert family.begin(torch.zeros(2, SIZE)).dtype == torch.double
    assert (
        family.decode(family.begin(torch.zeros(2, SIZE)), torch.zeros(2, 3, SIZE))[0].dtype
        == torch.double
    )


def test_a_point_has_no_density():
    assert not hasattr(Point(SIZE), "kl")


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_start_needs_no_global_dice(family):
    centres = normals(3, SIZE)
    torch.manual_seed(1)
    first, before = family.begin(centres), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(family.begin(centres), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_the_state_is_not_the_centres_themselves(family):
    centres = torch.zeros(3, SIZE)
    family.begin(centres).add_(1)
    assert not centres.any()


FAMILIES_IN_BATCHES = [
    Diagonal(20, clamp=1.0),
    Gaussian(20),
    Mixture(20, 3),
    Flow(20, depth=3, levels=3, hidden=30),
    Flow(7, depth=1, hidden=5),
]


def values_and_gradients(family, state, noise):
    """Samples, divergences and the gradients of both, of rows that were copied together."""
    state = state.clone().requires_grad_()
    values = family.sample(state, noise), family.kl(state, noise)
    return *(value.detach() for value in values), *(
        torch.autograd.grad((value**2).sum(), state)[0] for value in values
    )


@pytest.mark.parametrize("family", FAMILIES_IN_BATCHES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
def test_a_row_of_a_padded_batch_depends_on_no_other_row(family, dtype):
    state = moved(family, rows=32)
    state = state if isinstance(family, Flow) else state.to(dtype)
    noise = normals(32, 6, family.noise, dtype=dtype)
    together = values_and_gradients(family, state, noise)
    for rows in (torch.arange(16), torch.arange(7, 23), torch.arange(31, 15, -1)):
        for whole, part in zip(
            together, values_and_gradients(family, state[rows], noise[rows]), strict=True
        ):
            scale = whole.abs().max().item()
            assert torch.allclose(whole[rows], part, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("family", FAMILIES_IN_BATCHES, ids=repr)
def test_a_row_alone_is_the_same_but_for_rounding(family):
    state, noise = moved(family, rows=5), normals(5, 6, family.noise)
    together = values_and_gradients(family, state, noise)
    for row in range(5):
        for whole, alone in zip(
            together,
            values_and_gradients(family, state[row : row + 1], noise[row : row + 1]),
            strict=True,
        ):
            assert torch.allclose(
                whole[row : row + 1], alone, rtol=1e-12, atol=1e-12 * whole[row].abs().max().item()
            )


@pytest.mark.parametrize("family", FAMILIES_IN_BATCHES, ids=repr)
def test_the_gradient_of_a_row_stays_in_its_row(family):
    state, noise = moved(family, rows=5).requires_grad_(), normals(5, 6, family.noise)
    (grad,) = torch.autograd.grad(
        family.sample(state, noise)[2].sum() + family.kl(state, noise)[2], state
    )
    assert grad[2].any()
    assert not grad[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("family", DISTRIBUTIONS, ids=repr)
def test_kl_falls_to_zero_from_a_displaced_start(family):
    state = family.begin(torch.tensor([[2.0, -1, 0, 1, -2]] * 2)).requires_grad_()
    rule = torch.optim.Adam([state], lr=0.03)
    check = normals(2, 500, family.noise, seed=1)
    before = family.kl(state, check).detach()
    for step in range(150):
        rule.zero_grad()
        family.kl(state, normals(2, 64, family.noise, seed=step)).sum().backward()
        rule.step()
    after = family.kl(state, check).detach()
    assert (before > 4).all()
    assert (after.abs() < 0.1).all()


@pytest.mark.parametrize("family", DISTRIBUTIONS, ids=repr)
def test_gradients_of_kl(family):
    noise = normals(2, 3, family.noise)
    assert torch.autograd.gradcheck(
        lambda state: family.kl(state, noise), moved(family, rows=2).requires_grad_()
    )


@pytest.mark.parametrize(
    "family", [Point(SIZE), Diagonal(SIZE), Diagonal(SIZE, clamp=1.0), Gaussian(SIZE)], ids=repr
)
def test_gradients_of_samples(family):
    noise = normals(2, 3, family.noise)
    assert torch.autograd.gradcheck(
        lambda state: family.sample(state, noise), moved(family, rows=2).requires_grad_()
    )


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("change", [(1, 0, 0), (-1, 0, 0), (0, 0, 1)])
def test_noise_of_another_shape_is_refused(family, change):
    shape = tuple(a + b for a, b in zip((2, 3, family.noise), change, strict=True))
    with pytest.raises(
        ConfigError,
        match=rf"needs noise of shape \(2, samples, {family.noise}\), got .*: draw family.noise",
    ):
        family.sample(family.begin(torch.zeros(2, SIZE)), torch.zeros(shape))


# Point and diagonal Gaussian


def test_a_point_is_its_own_sample():
    family, centres = Point(SIZE), normals(2, SIZE)
    assert torch.equal(
        family.sample(family.begin(centres), torch.zeros(2, 3, 0)),
        centres[:, None].expand(2, 3, SIZE),
    )


def test_diagonal_start():
    family, centres, noise = (
        Diagonal(SIZE, log_variance=1.0),
        normals(2, SIZE),
        normals(2, 3, SIZE, seed=4),
    )
    assert torch.allclose(
        family.sample(family.begin(centres), noise),
        centres[:, None] + math.exp(0.5) * noise,
        rtol=1e-14,
    )


def test_diagonal_moments():
    family = Diagonal(SIZE)
    state, count = moved(family, by=0.8), 20_000
    latents = family.sample(state, normals(3, count, SIZE, seed=5))
    deviation = (state[:, 1] / 2).exp()
    assert ((latents.mean(1) - state[:, 0]).abs() < 4 * deviation / math.sqrt(count)).all()
    assert ((latents.std(1) / deviation - 1).abs() < 4 / math.sqrt(2 * count)).all()


def test_diagonal_kl():
    family = Diagonal(SIZE)
    state = moved(family, by=0.8)
    expected = kl_divergence(
        Normal(state[:, 0], (state[:, 1] / 2).exp()), Normal(torch.zeros(()), torch.ones(()))
    ).sum(1)
    assert torch.allclose(family.kl(state, normals(3, 1, SIZE)), expected, rtol=1e-12)


def test_a_log_variance_that_runs_away_is_held():
    family = Diagonal(2)
    state = torch.tensor([[[0.0, 0.0], [50.0, -50.0]]], requires_grad=True)
    latents = family.sample(state, torch.ones(1, 1, 2))
    assert latents[0, 0].tolist() == pytest.approx([math.exp(2), math.exp(-5)])
    (grad,) = torch.autograd.grad(latents.sum(), state)
    assert grad.tolist() == [[[1.0, 1.0], [0.0, 0.0]]]


def test_clipped_coordinates_have_no_gradient():
    family = Diagonal(4, clamp=1.0)
    state = family.begin(torch.tensor([[0.0, 3.0, -3.0, 0.5]])).requires_grad_()
    latents = family.sample(state, torch.full((1, 1, 4), 0.1))
    assert latents[0, 0].tolist() == pytest.approx([0.1, 1.0, -1.0, 0.6])
    (grad,) = torch.autograd.grad(latents.sum(), state)
    assert grad[0, 0].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert grad[0, 1].tolist() == pytest.approx([0.05, 0.0, 0.0, 0.05])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Diagonal(3, log_variance=4.5), r"log_variance must lie in \[-10, 4\], got 4.5"),
        (lambda: Diagonal(3, log_variance=math.nan), "log_variance must lie in .*, got nan"),
        (lambda: Diagonal(3, clamp=-1.0), "clamp must be 0 .no clipping. or positive, got -1.0"),
        (lambda: Mixture(3, components=0), "at least 1 component, got 0"),
        (
            lambda: Flow(1, hidden=0),
            "a flow's latent must be at least 2, got 1; a flow's hidden must be at least 1, got 0",
        ),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# Full Gaussian


def test_gaussian_start():
    family, centres, noise = Gaussian(SIZE), normals(2, SIZE), normals(2, 3, SIZE, seed=4)
    assert torch.allclose(
        family.sample(family.begin(centres), noise), centres[:, None] + noise, rtol=1e-14
    )


def test_gaussian_samples_by_definition():
    family = Gaussian(SIZE)
    state, noise = moved(family), normals(3, 4, SIZE, seed=4)
    latents = family.sample(state, noise)
    for row in range(3):
        for sample in range(4):
            assert torch.allclose(
                latents[row, sample], state[row, 0] + state[row, 1:] @ noise[row, sample]
            )


def test_gaussian_kl_is_exact_and_what_the_published_estimate_means():
    family = Gaussian(SIZE)
    state, noise = moved(family), normals(3, 20_000, SIZE, seed=4)
    value = family.kl(state, noise)
    matrix = state[:, 1:]
    exact = MultivariateNormal(state[:, 0], matrix @ matrix.transpose(1, 2))
    expected = kl_divergence(
        exact, MultivariateNormal(torch.zeros(3, SIZE).double(), torch.eye(SIZE).double())
    )
    assert torch.allclose(value, expected, rtol=1e-10)
    energy = (family.sample(state, noise) ** 2).sum(2) / 2
    published = energy.mean(1) - torch.logdet(matrix @ matrix.transpose(1, 2)) / 2 - SIZE / 2
    assert ((published - value).abs() < 4 * energy.std(1) / math.sqrt(20_000)).all()


# Mixture


def test_mixture_start():
    family, centres = Mixture(SIZE, 3), normals(2, SIZE)
    state = family.begin(centres)
    offsets = state[:, :, 1 : SIZE + 1] - centres[:, None]
    assert torch.allclose(offsets[0], offsets[1], rtol=1e-12)
    assert torch.pdist(offsets[0]).min() > 0.5
    assert not state[:, :, 0].any()
    assert not state[:, :, SIZE + 1 :].any()
    more = Mixture(SIZE, 4).begin(centres)
    assert torch.equal(more[:, :3], state)


def test_the_choice_follows_the_weights():
    family, count = Mixture(2, 3), 30_000
    state = torch.zeros(1, 3, 5, dtype=torch.double)
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=torch.double)
    state[0, :, 0] = weights.log() + 7  # logits need not be normalised
    state[0, :, 1] = torch.tensor([0.0, 100, 200])
    latents = family.sample(state, normals(1, count, family.noise))
    frequencies = torch.bincount((latents[0, :, 0] / 100).round().long(), minlength=3) / count
    assert ((frequencies - weights).abs() < 4 * (weights * (1 - weights) / count).sqrt()).all()


def test_mixture_moments():
    family, count = Mixture(SIZE, 3), 30_000
    state = moved(family)
    latents = family.sample(state, normals(3, count, family.noise, seed=8))
    for row in range(3):
        exact = torch_mixture(family, state[row])
        assert (
            (latents[row].mean(0) - exact.mean).abs() < 4 * exact.stddev / math.sqrt(count)
        ).all()
        assert torch.allclose(latents[row].std(0), exact.stddev, rtol=0.03)


def test_a_sample_is_of_one_component_and_its_gradient_that_of_the_soft_choice():
    family = Mixture(2, 3)
    state, noise = moved(family, rows=1).requires_grad_(), normals(1, 1, family.noise, seed=3)
    latents = family.sample(state, noise)
    each = state[0, :, 1:3] + (state[0, :, 3:5] / 2).exp() * noise[0, 0, :2]
    uniforms = Normal(0.0, 1.0).cdf(noise[0, 0, 2:])
    scores = state[0, :, 0] - (-uniforms.log()).log()
    chosen = int(scores.argmax())
    assert torch.equal(latents[0, 0], each[chosen])
    (grad,) = torch.autograd.grad(latents.sum(), state, retain_graph=True)
    (soft,) = torch.autograd.grad((scores.softmax(0)[:, None] * each.detach()).sum(), state)
    assert torch.allclose(grad[0, :, 0], soft[0, :, 0], rtol=1e-10)
    assert grad[0, :, 0].all()
    assert grad[0, :, 1].tolist() == [float(k == chosen) for k in range(3)]


def test_gradients_of_mixture_samples_where_they_are_true_ones():
    family = Mixture(SIZE, 3)
    state, noise = moved(family, rows=2), normals(2, 3, family.noise)
    logits, rest = state[:, :, :1], state[:, :, 1:]
    assert torch.autograd.gradcheck(
        lambda x: family.sample(torch.cat([logits, x], 2), noise), rest.clone().requires_grad_()
    )


def test_mixture_kl_by_definition_and_by_fresh_samples():
    family = Mixture(SIZE, 3)
    state, noise = moved(family, by=0.6), normals(3, 4000, family.noise, seed=9)
    few, many = family.kl(state, noise[:, :7]), family.kl(state, noise)
    for row in range(3):
        exact = torch_mixture(family, state[row])
        each = [
            state[row, k, 1 : SIZE + 1]
            + (state[row, k, SIZE + 1 :] / 2).exp() * noise[row, :7, :SIZE]
            for k in range(3)
        ]
        slow = sum(
            w * (exact.log_prob(z) - normal_log_density(z)).mean()
            for w, z in zip(exact.mixture_distribution.probs, each, strict=True)
        )
        assert few[row].item() == pytest.approx(slow.item(), rel=1e-10)
        with torch.random.fork_rng():
            torch.manual_seed(row)
            fresh = exact.sample((20_000,))
        ratio = exact.log_prob(fresh) - normal_log_density(fresh)
        assert abs(many[row].item() - ratio.mean().item()) < 4 * ratio.std().item() * math.sqrt(
            1 / 20_000 + 1 / 4000
        )


def test_a_mixture_of_one_is_a_diagonal_gaussian():
    state, noise = moved(Diagonal(SIZE)), normals(3, 6, SIZE + 1)
    same = torch.cat([torch.zeros(3, 1).double(), state[:, 0], state[:, 1]], dim=1)[:, None]
    assert torch.allclose(
        Mixture(SIZE, 1).sample(same, noise),
        Diagonal(SIZE).sample(state, noise[..., :SIZE]),
        rtol=1e-12,
    )
    many = normals(3, 20_000, SIZE + 1)
    assert torch.allclose(
        Mixture(SIZE, 1).kl(same, many), Diagonal(SIZE).kl(state, many), atol=0.05
    )


# Flow


class SlowFlow:
    """One row's flow, sample by sample, from plain layers with the state's numbers in order."""

    def __init__(self, family, row):
        self.family, self.numbers, self.levels = family, list(row), []
        size = family.latent
        for level in range(len(family.sizes)):
            shifts, scales = self.take(family.depth, size), self.take(family.depth, size)
            steps = []
            for step in range(family.depth):
                order = torch.randperm(
                    size, generator=generator_for(0, "flow", "shuffle", level, step)
                )
                widths = (size // 2, family.hidden, family.hidden, size - size // 2)
                linear = [self.linear(narrow, wide) for narrow, wide in pairwise(widths)]
                net = nn.Sequential(linear[0], nn.ELU(), linear[1], nn.ELU(), linear[2])
                steps.append((shifts[step], scales[step], order, net))
            self.levels.append((size, steps))
            size //= 2
        assert not self.numbers

    def take(self, *shape):
        count = math.prod(shape)
        taken, self.numbers = self.numbers[:count], self.numbers[count:]
        return torch.stack(taken).reshape(shape)

    def linear(self, narrow, wide):
        layer = nn.Linear(narrow, wide).double()
        layer.weight.data, layer.bias.data = self.take(narrow, wide).T.clone(), self.take(wide)
        return layer

    def __call__(self, z):
        """From one latent to its noise."""
        left = []
        for size, steps in self.levels:
            left, z = [z[size:], *left], z[:size]
            for shift, scale, order, net in steps:
                z = ((z - shift) * torch.exp(-scale))[order]
                z = torch.cat([z[: size // 2], z[size // 2 :] + net(z[: size // 2])])
        return torch.cat([z, *left])

    def log_density(self, z):
        return (
            normal_log_density(self(z))
            + torch.linalg.slogdet(torch.autograd.functional.jacobian(self, z)).logabsdet
        )


FLOWS = [
    Flow(2, depth=1, levels=1, hidden=3),
    Flow(3, depth=2, levels=3, hidden=4),
    Flow(8, depth=2, levels=3, hidden=6),
    Flow(11, depth=3, levels=2, hidden=5),
]


@pytest.mark.parametrize("family", FLOWS, ids=repr)
def test_a_flow_by_plain_layers(family):
    state, noise = moved(family, rows=2), normals(2, 3, family.latent, seed=6)
    latents, log_q = family.decode(state, noise)
    back, again = family.encode(state, latents)
    for row in range(2):
        slow = SlowFlow(family, state[row])
        for sample in range(3):
            z = latents[row, sample]
            assert torch.allclose(slow(z), noise[row, sample], atol=1e-10)
            expected = slow.log_density(z).item()
            assert log_q[row, sample].item() == pytest.approx(expected, rel=1e-10)
            assert again[row, sample].item() == pytest.approx(expected, rel=1e-10)
    assert torch.allclose(back, noise, atol=1e-10)
    assert torch.equal(family.sample(state, noise), latents.float())
    ratio = log_q - normal_log_density(latents)
    assert torch.allclose(family.kl(state, noise), ratio.mean(1), rtol=1e-12)


def test_a_flow_of_full_size_returns_to_its_noise():
    family = Flow(100)
    state, noise = moved(family, rows=2, by=0.05), normals(2, 4, 100)
    latents, log_q = family.decode(state, noise)
    back, again = family.encode(state, latents)
    assert family.sizes == (100, 50, 25)
    assert (latents - family.decode(family.begin(torch.zeros(2, 100)), noise)[0]).abs().max() > 0.5
    assert torch.allclose(back, noise, atol=1e-10)
    assert torch.allclose(again, log_q, rtol=1e-10)


@pytest.mark.parametrize("family", FLOWS[1:], ids=repr)
def test_the_density_counts_every_stretch(family):
    """The Jacobian of sampling itself: a test of `decode` alone."""
    state, noise = moved(family, rows=1), normals(1, 1, family.latent)
    jacobian = torch.autograd.functional.jacobian(
        lambda e: family.decode(state, e[None, None])[0][0, 0], noise[0, 0]
    )
    expected = normal_log_density(noise[0, 0]) - torch.linalg.slogdet(jacobian).logabsdet
    assert family.decode(state, noise)[1].item() == pytest.approx(expected.item(), rel=1e-10)


def test_kl_of_a_flow_by_its_samples():
    """The mean KL of a flow that only stretches and shifts is the Gaussian closed form."""
    family = Flow(4, depth=1, levels=1, hidden=3)
    state = family.begin(normals(1, 4))
    state[:, 4:8] = torch.tensor([0.5, -0.5, 0.2, -1.0])
    expected = (
        kl_divergence(
            Normal(state[0, :4], state[0, 4:8].exp()), Normal(torch.zeros(()), torch.ones(()))
        )
        .sum()
        .item()
    )
    noise = normals(1, 40_000, 4)
    latents, log_q = family.decode(state, noise)
    spread = (log_q - normal_log_density(latents)).std().item()
    assert abs(family.kl(state, noise).item() - expected) < 4 * spread / math.sqrt(40_000)


@pytest.mark.parametrize("family", [*FLOWS, Flow(100, depth=2)], ids=repr)
def test_a_flow_starts_as_the_normal_distribution_around_its_centre(family):
    centres, noise = normals(2, family.latent), normals(2, 3, family.latent, seed=2)
    latents, _ = family.decode(family.begin(centres), noise)
    assert torch.allclose(
        (latents - centres[:, None]).sort(2).values, noise.sort(2).values, atol=1e-12
    )
    assert family.kl(family.begin(torch.zeros_like(centres)), noise).abs().max() < 1e-10


def test_every_layer_of_a_flow_learns():
    """At the start only the last layers get a gradient; one step later all do."""
    family = Flow(6, depth=2, levels=2, hidden=4)
    state, noise = family.begin(torch.zeros(1, 6)).requires_grad_(), normals(1, 8, 6)
    aim = normals(1, 8, 6, seed=1)
    for _ in range(2):
        (grad,) = torch.autograd.grad(((family.decode(state, noise)[0] - aim) ** 2).sum(), state)
        state = (state - 0.01 * grad).detach().requires_grad_()
    assert (grad != 0).all()


@pytest.mark.parametrize(
    ("latent", "levels", "sizes"),
    [
        (100, 3, (100, 50, 25)),
        (7, 2, (7, 3)),
        (7, 3, (7, 3)),
        (4, 9, (4, 2)),
        (2, 3, (2,)),
        (512, 3, (512, 256, 128)),
    ],
)
def test_levels_of_a_flow(latent, levels, sizes):
    assert Flow(latent, levels=levels).sizes == sizes


@pytest.mark.parametrize("family", FLOWS[:3], ids=repr)
def test_gradients_of_flow_samples(family):
    noise = normals(2, 2, family.latent)
    assert torch.autograd.gradcheck(
        lambda state: family.decode(state, noise), moved(family, rows=2).requires_grad_()
    )


def test_shuffles_mix_and_differ():
    """Every coordinate of a latent depends on noise of another, in a flow deep enough."""
    family = Flow(8, depth=4, levels=2, hidden=6)
    state, noise = moved(family, rows=1), normals(1, 1, 8)
    jacobian = torch.autograd.functional.jacobian(
        lambda e: family.decode(state, e[None, None])[0][0, 0], noise[0, 0]
    )
    assert ((jacobian.abs() > 1e-6).sum(1) > 1).all()
