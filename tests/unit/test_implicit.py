"""Gradients through an argmin, against quadratics, finite differences and slow versions."""

from functools import partial

import pytest
import torch
from torch import nn

from frostglass.defenses.release._implicit import (
    conjugate_gradient,
    dots,
    expand_rows,
    hypergradient,
    largest_curvature,
    neumann,
)
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import channels_last
from frostglass.runtime.seeding import seeded

ROWS, LATENT, FEATURES = 3, 5, 4
EXACT = partial(conjugate_gradient, damping=0.0, terms=50)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def spectra(eigenvalues, seed=1):
    """Return symmetric matrices with the given eigenvalues (N, k), and their eigenvectors."""
    basis = torch.linalg.qr(normal(*eigenvalues.shape, eigenvalues.shape[1], seed=seed)).Q
    return basis @ torch.diag_embed(eigenvalues) @ basis.mT, basis


def times(matrices):
    return lambda rows: (matrices @ rows[..., None])[..., 0]


def quadratic():
    """Return L = ½ (z - A F)ᵀ Q (z - A F), with its own A and Q for each row: z* = A F."""
    eigenvalues = torch.linspace(0.5, 6.0, ROWS * LATENT, dtype=torch.double).reshape(ROWS, LATENT)
    curvature, basis = spectra(eigenvalues)
    mixing = normal(ROWS, LATENT, FEATURES, seed=2)

    def inner(features, latents):
        gap = latents - times(mixing)(features)
        return 0.5 * dots(gap, times(curvature)(gap))

    return inner, mixing, eigenvalues, basis


def outer(latents):
    return latents.sin().sum(1) + latents.square().sum(1)


def test_the_gradient_of_a_quadratic_is_exact():
    inner, mixing, _, _ = quadratic()
    features = normal(ROWS, FEATURES)
    latents = times(mixing)(features)
    made = hypergradient(inner, outer, features, latents, EXACT)
    leaf = features.clone().requires_grad_()
    (expected,) = torch.autograd.grad(outer(times(mixing)(leaf)).sum(), leaf)
    assert torch.allclose(made.gradient, expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(made.slope, torch.zeros(ROWS, dtype=torch.double), atol=1e-12)
    assert made.terms.tolist() == [LATENT] * ROWS  # as many steps as there are directions


@pytest.mark.parametrize(("alpha", "terms"), [(0.15, 0), (0.15, 3), (0.15, 40), (1e-3, 120)])
def test_a_truncated_series_shrinks_each_direction_by_a_known_factor(alpha, terms):
    inner, mixing, eigenvalues, basis = quadratic()
    features = normal(ROWS, FEATURES)
    latents = times(mixing)(features)
    made = hypergradient(
        inner, outer, features, latents, partial(neumann, alpha=alpha, terms=terms)
    )
    slope = latents.cos() + 2 * latents
    factor = 1 - (1 - alpha * eigenvalues) ** (terms + 1)
    shrunken = times(basis @ torch.diag_embed(factor) @ basis.mT)(slope)
    assert torch.allclose(made.gradient, times(mixing.mT)(shrunken), rtol=1e-9, atol=1e-12)
    assert made.terms.tolist() == [terms] * ROWS


def test_published_factors():
    """They are 1 - (1 - αλ)^(i+1) at α = 1e-3 and i = 120, for curvatures of 1, 10 and 50."""
    curvature = torch.diag_embed(torch.tensor([[1.0, 10.0, 50.0]], dtype=torch.double))
    ones = torch.ones(1, 3, dtype=torch.double)
    solved = neumann(times(curvature), ones, 1e-3, 120).solution
    assert (times(curvature)(solved))[0].tolist() == pytest.approx([0.11, 0.70, 0.998], abs=5e-3)


def test_each_row_may_have_its_own_rate():
    curvature, _ = spectra(torch.tensor([[1.0, 2.0], [10.0, 20.0]], dtype=torch.double))
    vector = normal(2, 2)
    rates = torch.tensor([0.5, 0.05], dtype=torch.double)
    together = neumann(times(curvature), vector, rates, 7).solution
    alone = [
        neumann(times(curvature[i : i + 1]), vector[i : i + 1], rates[i].item(), 7).solution
        for i in range(2)
    ]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-12)
    assert torch.allclose(
        neumann(times(curvature), vector, rates, 400).solution,
        torch.linalg.solve(curvature, vector),
        rtol=1e-9,
    )


def test_the_gradient_equals_finite_differences_of_the_true_argmin():
    weight = normal(6, 3, seed=5)

    def inner(features, latents):
        return (
            0.5 * ((latents @ weight.T).tanh() - features).square().sum(1)
            + 0.1 * latents.square().sum(1)
            + 0.05 * latents.pow(4).sum(1)
        )

    def argmin(features):
        latents = torch.zeros(len(features), 3, dtype=torch.double)
        for _ in range(60):  # damped Newton steps
            latents = latents.detach().requires_grad_()
            (slope,) = torch.autograd.grad(
                inner(features, latents).sum(), latents, create_graph=True
            )
            rows = [
                torch.autograd.grad(slope[:, k].sum(), latents, retain_graph=True)[0]
                for k in range(3)
            ]
            latents = latents - 0.7 * torch.linalg.solve(torch.stack(rows, 1), slope)
        return latents.detach()

    features = 0.3 * normal(2, 6, seed=6)
    made = hypergradient(inner, outer, features, argmin(features), EXACT)
    assert made.slope.max() < 1e-9
    step, slow = 1e-5, torch.zeros_like(features)
    for k in range(6):
        ahead, behind = (
            outer(argmin(features + sign * step * torch.eye(6, dtype=torch.double)[k]))
            for sign in (1, -1)
        )
        slow[:, k] = (ahead - behind) / (2 * step)
    assert torch.allclose(made.gradient, slow, rtol=1e-6, atol=1e-9)
    assert slow.abs().max() > 0.1


def kinked():
    """Return a piecewise linear generator and encoder, with batch norm and max pooling."""
    with seeded(0, "tests", "implicit"):
        generator = nn.Sequential(
            nn.Linear(LATENT, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Unflatten(1, (2, 4, 4)),
            nn.ConvTranspose2d(2, 3, 5, 2, 2, 1),
            nn.BatchNorm2d(3),
        )
        encoder = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
    networks = generator.double(), encoder.double()
    for module in networks:
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                part.running_mean.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
                part.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(2))
    return networks


def inversion(generator, encoder):
    return lambda features, latents: (
        (encoder(generator(latents)) - features).flatten(1).square().mean(1)
    )


def test_rows_do_not_influence_each_other():
    generator, encoder = kinked()
    inner = inversion(generator, encoder)
    with frozen(generator, encoder):
        features, latents = normal(4, 4, 4, 4, seed=3), normal(4, LATENT, seed=4)
        method = partial(neumann, alpha=0.5, terms=6)
        together = hypergradient(inner, outer, features, latents, method)
        for i in range(4):
            alone = hypergradient(inner, outer, features[i : i + 1], latents[i : i + 1], method)
            assert torch.allclose(together.gradient[i], alone.gradient[0], rtol=1e-10, atol=1e-14)
            assert torch.allclose(together.slope[i], alone.slope[0], rtol=1e-10)
            assert together.terms[i] == alone.terms[0]
    assert together.gradient.abs().sum(dim=(1, 2, 3)).min() > 0


def test_products_through_piecewise_linear_networks_are_gauss_newton_products():
    """Enc∘G is piecewise linear, so the whole Hessian of ‖Enc(G(z)) - F‖² / d is 2 JᵀJ / d."""
    generator, encoder = kinked()
    with frozen(generator, encoder):
        latents, features = normal(2, LATENT, seed=4), normal(2, 4, 4, 4, seed=3)
        leaf = latents.clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            inversion(generator, encoder)(features, leaf).sum(), leaf, create_graph=True
        )
        fast = torch.stack(
            [
                torch.autograd.grad(slope[:, k].sum(), leaf, retain_graph=True)[0]
                for k in range(LATENT)
            ],
            1,
        )
        for row in range(2):
            jacobian = torch.autograd.functional.jacobian(
                lambda z: encoder(generator(z[None])).flatten(), latents[row]
            )
            assert torch.allclose(
                fast[row], 2 * jacobian.T @ jacobian / len(jacobian), rtol=1e-9, atol=1e-12
            )


def test_the_cross_term_is_minus_twice_the_jacobian():
    """With H⁻¹ replaced by 1, the gradient is 2 J v / d for the squared error over d values."""
    generator, encoder = kinked()
    with frozen(generator, encoder):
        latents, features = normal(1, LATENT, seed=4), normal(1, 4, 4, 4, seed=3)
        made = hypergradient(
            inversion(generator, encoder),
            outer,
            features,
            latents,
            partial(neumann, alpha=1.0, terms=0),
        )
        jacobian = torch.autograd.functional.jacobian(
            lambda z: encoder(generator(z[None])).flatten(), latents[0]
        )
    expected = 2 * jacobian @ (latents[0].cos() + 2 * latents[0]) / len(jacobian)
    assert torch.allclose(made.gradient.flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "solver",
    [partial(neumann, alpha=0.5, terms=5), partial(conjugate_gradient, damping=0.1, terms=5)],
)
def test_folding_and_channels_last_do_not_change_the_gradient(solver):
    generator, encoder = kinked()
    features, latents = normal(3, 4, 4, 4, seed=3), normal(3, LATENT, seed=4)
    with frozen(generator, encoder):
        plain = hypergradient(inversion(generator, encoder), outer, features, latents, solver)
        with channels_last(generator, encoder), folded(generator, encoder):
            assert "forward" in vars(encoder[0])
            fast = hypergradient(inversion(generator, encoder), outer, features, latents, solver)
    assert torch.allclose(plain.gradient, fast.gradient, rtol=1e-9, atol=1e-13)
    assert torch.allclose(plain.slope, fast.slope, rtol=1e-9)


def test_negative_curvature_stops_its_row_alone():
    curvature = torch.diag_embed(torch.tensor([[1.0, -0.5], [1.0, 0.5]], dtype=torch.double))
    vector = torch.ones(2, 2, dtype=torch.double)
    solved = neumann(times(curvature), vector, 0.5, 30)
    # The lengths of (0.5ʲ, 1.25ʲ) are 1.414, 1.346, 1.582, ...: only the second is shorter.
    assert solved.terms.tolist() == [1, 30]
    assert solved.solution[0].tolist() == pytest.approx([0.5 * (1 + 0.5), 0.5 * (1 + 1.25)])
    assert solved.solution[1].tolist() == pytest.approx([1.0, 2.0], rel=1e-3)
    # The second direction of the first row has negative curvature.
    assert conjugate_gradient(times(curvature), vector, 0.0, 30).terms.tolist() == [1, 2]
    negative = -torch.eye(2, dtype=torch.double).expand(2, 2, 2)
    downhill = conjugate_gradient(times(negative), vector, 0.0, 30)
    assert downhill.terms.tolist() == [0, 0]
    assert downhill.solution.abs().max() == 0


def test_a_rate_that_is_too_large_stops_at_once():
    curvature = torch.eye(2, dtype=torch.double)[None] * 3
    solved = neumann(times(curvature), torch.ones(1, 2, dtype=torch.double), 1.0, 30)
    assert solved.terms.tolist() == [0]
    assert solved.solution.tolist() == [[1.0, 1.0]]


def test_products_are_computed_only_while_a_row_needs_them():
    calls = []

    def product(rows):
        calls.append(1)
        return -rows

    neumann(product, torch.ones(2, 3, dtype=torch.double), 0.5, 30)
    assert len(calls) == 1
    conjugate_gradient(
        lambda rows: calls.append(1) or rows, torch.ones(2, 3, dtype=torch.double), 0.0, 30
    )
    assert len(calls) == 3  # solved by the first step, detected in the second


def test_conjugate_gradient_equals_a_direct_solution():
    eigenvalues = torch.logspace(-3, 1, 12, dtype=torch.double).reshape(2, 6)
    curvature, _ = spectra(eigenvalues)
    vector, damping = normal(2, 6), torch.tensor([0.01, 0.5], dtype=torch.double)
    solved = conjugate_gradient(times(curvature), vector, damping, 40)
    direct = torch.linalg.solve(
        curvature + damping[:, None, None] * torch.eye(6, dtype=torch.double), vector
    )
    assert torch.allclose(solved.solution, direct, rtol=1e-7)
    assert solved.terms.max() <= 12
    assert torch.equal(
        conjugate_gradient(
            times(curvature), torch.zeros(2, 6, dtype=torch.double), 0.1, 5
        ).solution,
        torch.zeros(2, 6),
    )


def test_largest_curvature_equals_the_largest_eigenvalue():
    eigenvalues = torch.tensor(
        [[0.1, 1.0, 4.0], [-7.0, 1.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.double
    )
    curvature, basis = spectra(eigenvalues)
    size, direction = largest_curvature(times(curvature), normal(3, 3), 60)
    assert size.tolist() == pytest.approx([4.0, 7.0, 0.0])
    assert (direction[0] @ basis[0][:, 2]).abs().item() == pytest.approx(1.0)
    assert direction.norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 1.0])
    early = largest_curvature(times(curvature), normal(3, 3), 2)[0]
    assert (early <= size + 1e-12).all()  # a lower bound
    again, _ = largest_curvature(times(curvature), direction, 1)
    assert again.tolist() == pytest.approx(size.tolist())


def test_row_operations_take_features_of_any_shape():
    rows = normal(2, 3, 4, 5)
    assert dots(rows, rows).tolist() == pytest.approx(
        [(rows[i] ** 2).sum().item() for i in range(2)]
    )
    assert expand_rows(torch.tensor([2.0, 3.0]), rows).shape == (2, 1, 1, 1)


def test_no_graph_and_no_gradient_is_left_behind():
    inner, mixing, _, _ = quadratic()
    features, latents = normal(ROWS, FEATURES), normal(ROWS, LATENT)
    made = hypergradient(inner, outer, features, latents, EXACT)
    assert not any(t.requires_grad for t in (made.gradient, made.slope, features, latents, mixing))
    assert features.grad is None
    assert latents.grad is None
