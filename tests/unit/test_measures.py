"""Metrics of sets and of people: each against a slow reference, and a copy against noise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from evidence import reconstructions
from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.metrics._frechet import _moments, _of_few, _of_many, frechet_distance
from frostglass.metrics._neighbours import nearest, prdc, radii
from frostglass.metrics._stats import jackknife
from frostglass.metrics.base import Evidence, Score, measure, outputs
from frostglass.metrics.centroid import Centroid
from frostglass.metrics.distance import Distance
from frostglass.metrics.fid import Fid
from frostglass.metrics.knowledge import Knowledge
from frostglass.metrics.likeness import Likeness, likeness
from frostglass.metrics.outcome import Outcome, categories
from frostglass.metrics.perceptual import Perceptual
from frostglass.metrics.pii import Pii
from frostglass.metrics.prdc import Prdc
from worlds import rng, split, target

PEOPLE, EACH = 4, 4


def features(count, width=3, seed=0):
    return torch.randn(count, width, generator=rng(seed))


def world(images, evaluators=None, **more):
    """Evidence of an attack on a model: four people, four reconstructions of each."""
    evaluators = [target(seed=1)] if evaluators is None else evaluators
    return Evidence(reconstructions(images), target(), evaluators, split(), **more)


def copies():
    """Private training images of each person as their reconstructions."""
    train = split().train
    own = [train.floats((train.labels == who).nonzero()[:EACH, 0]) for who in range(PEOPLE)]
    return torch.stack(own)


def noise(seed=0):
    return torch.rand(PEOPLE, EACH, 3, 16, 16, generator=rng(seed))


def score(metric, images, name, **more):
    return measure([metric], world(images, **more)).score(name)


# Neighbours


def slow_prdc(real, fake, k):
    """The four definitions, one pair of points at a time."""

    def reach(points, i):
        return sorted((points[i] - other).norm().item() for other in points)[k]

    r = [reach(real, i) for i in range(len(real))]
    f = [reach(fake, i) for i in range(len(fake))]
    d = [[(a - b).norm().item() for b in real] for a in fake]
    reals, fakes = range(len(real)), range(len(fake))
    return {
        "precision": [float(any(d[i][j] <= r[j] for j in reals)) for i in fakes],
        "recall": [float(any(d[i][j] <= f[i] for i in fakes)) for j in reals],
        "density": [sum(d[i][j] <= r[j] for j in reals) / k for i in fakes],
        "coverage": [float(any(d[i][j] <= r[j] for i in fakes)) for j in reals],
    }


@pytest.mark.parametrize("k", [1, 3])
def test_prdc_against_its_definitions(k):
    real, fake = features(9).double(), features(7, seed=1).double() * 1.3 + 0.4
    measured = prdc(real, fake, k)
    for name, slow in slow_prdc(real, fake, k).items():
        assert measured[name].tolist() == pytest.approx(slow), name


def test_nearest_over_several_blocks_of_references(monkeypatch):
    monkeypatch.setattr("frostglass.metrics._neighbours.REFERENCES", 4)
    monkeypatch.setattr("frostglass.metrics._neighbours.CHUNK", 3)
    a, b = features(7, 5), features(10, 5, seed=1) + 100
    slow = [min((x - y).norm().item() for y in b) for x in a]
    assert nearest(a, b).tolist() == pytest.approx(slow, rel=1e-5)
    assert nearest(b[6:8], b).tolist() == [0, 0]


@pytest.mark.parametrize("compare", [nearest, frechet_distance, lambda a, b: prdc(b, a, 1)])
def test_features_that_cannot_be_compared_are_refused(compare):
    with pytest.raises(DataError, match=r"of one width .* got \(4, 3\) and \(4, 5\)"):
        compare(features(4), features(4, 5))
    with pytest.raises(DataError, match=r"at least . images each, got \(4, 3\) and \(0, 3\)"):
        compare(features(4), features(0))
    for value in (torch.nan, torch.inf):
        broken = features(5)
        broken[2, 1] = value
        for pair in ((broken, features(5)), (features(5), broken)):
            with pytest.raises(DataError, match="NaN or infinity in 1 of 5 rows"):
                compare(*pair)


def test_no_ball_reaches_more_neighbours_than_there_are():
    with pytest.raises(DataError, match="more than 3 features for 3 neighbours, got 3"):
        radii(features(3), 3)


def test_moments_in_several_panels_and_chunks(monkeypatch):
    monkeypatch.setattr("frostglass.metrics._frechet.CHUNK", 8)
    monkeypatch.setattr("frostglass.metrics._frechet.PANEL", 3)
    mean, covariance = _moments(some := features(20, 7) + 5)
    assert torch.allclose(mean, some.double().mean(0))
    assert torch.allclose(covariance, some.double().T.cov())


def test_frechet_of_few_images_has_the_eigenvalues_of_their_covariances():
    """Both ways of computing it, and the product C₁C₂ itself, whose rank is small."""
    a, b = features(5, 20).double(), features(7, 20, seed=1).double() + 1
    c1, c2 = a.T.cov(), b.T.cov()
    shared = torch.linalg.eigvals(c1 @ c2).real.clamp(min=0).sqrt().sum()
    slow = (a.mean(0) - b.mean(0)).square().sum() + c1.trace() + c2.trace() - 2 * shared
    assert _of_few(a, b) == pytest.approx(slow.item(), rel=1e-5)
    assert _of_many(a, b) == pytest.approx(_of_few(a, b), rel=1e-6)
    assert frechet_distance(a, b) == _of_few(a, b)
    many, more = features(30), features(40, seed=1)
    assert (
        frechet_distance(many, more)
        == _of_many(many, more)
        == pytest.approx(_of_few(many, more), rel=1e-9)
    )


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = torch.randn(10, generator=rng()).double()
    low, high = jackknife(lambda kept: values[kept].mean().item(), values.mean().item(), 10)
    mean, error = values.mean().item(), 2.262157 * values.std().item() / 10**0.5  # Student, 9
    assert (low, high) == pytest.approx((mean - error, mean + error), rel=1e-5)
    with pytest.raises(DataError, match="at least 2 people for an interval over people, got 1"):
        jackknife(lambda kept: 0.0, 0.0, 1)


# A copy against noise, and one value per person


@pytest.mark.parametrize(
    ("metric", "name", "more_is_closer"),
    [
        (Centroid(), "centroid", False),
        (Distance(), "distance", False),
        (Fid(), "fid", False),
        (Fid(normalised=True), "fid", False),
        (Likeness(), "ssim", True),
        (Likeness(), "fsim", True),
        (Perceptual(), "perceptual", False),
        (Prdc(), "precision", True),
        (Prdc(), "coverage", True),
        (Pii(), "pii_error", False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_each_tells_a_copy_from_noise(metric, name, more_is_closer):
    more = {"embedder": replace(target(seed=2), taps=("2", "4")), "draws": (noise(1), noise(2))}
    copy, far = (score(metric, images, name, **more) for images in (copies(), noise()))
    closer = copy.value > far.value if more_is_closer else copy.value < far.value
    assert closer, (copy, far)
    assert copy.low <= copy.value <= copy.high
    assert len(copy.values) == (0 if name in ("fid", "pii_error") else PEOPLE)


def test_prdc_of_copies_is_perfect():
    rows = measure([Prdc()], world(copies()))
    assert rows.score("precision").value == 1
    assert rows.columns["recall"].shape == (PEOPLE, EACH)
    assert (rows.columns["recall"] == rows.columns["recall"][:, :1]).all()


def test_centroid_is_to_the_mean_of_the_persons_own_features():
    images, data, evaluator = noise(), split(), target(seed=1)
    measured = Centroid().columns(world(images, [evaluator]))["centroid"]
    for who in range(PEOPLE):
        own = outputs(evaluator, data.train.floats(data.train.labels == who))[1].mean(0)
        rounded = images[who].mul(255).round().div(255)
        slow = (outputs(evaluator, rounded)[1] - own).norm(dim=1)
        assert measured[who].tolist() == pytest.approx(slow.tolist(), rel=1e-5)


def test_face_distances_are_those_of_an_embedder():
    embedder = replace(target(seed=3), classes=(), info={"model": "embedder"})
    columns = Distance().columns(world(copies(), [target(seed=1), embedder]))
    assert columns["face_distance_squared"].max() < 1e-5
    far = Distance().columns(world(noise(), [target(seed=1), embedder]))
    assert far["face_distance_squared"].min() > 1e-3
    assert far["face_distance_squared"].max() <= 4
    assert "face_distance" not in Distance().columns(world(noise()))


def test_likeness_in_a_model_audit_is_to_the_closest_private_image():
    images, train = noise(), split().train
    measured = Likeness().columns(world(images))
    first = images[1, 2].mul(255).round().div(255)
    own = train.floats(train.labels == 1)
    best = min(own, key=lambda each: (each - first).square().mean().item())
    slow = likeness(first[None], best[None])
    for name, value in slow.items():
        assert measured[name][1, 2].item() == pytest.approx(value.item(), rel=1e-5), name


def test_fid_is_over_people_and_says_what_real_images_reach():
    rows = measure([Fid()], world(noise()))
    evidence = world(noise())
    assert rows.columns == {}
    slow = frechet_distance(evidence.features, evidence.private_features)
    assert rows.summaries["fid"].value == pytest.approx(slow)
    assert rows.summaries["fid_real"].value < rows.summaries["fid"].value
    assert "fid: " in repr(rows.score("fid"))
    assert repr(rows.score("fid")).endswith("the whole set")
    assert "<td>fid</td>" in rows._repr_html_()


def test_the_outcomes_sum_to_one_and_know_what_fools_whom():
    sure = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, PEOPLE))
    with torch.no_grad():
        sure[1].weight.zero_()
        sure[1].bias.copy_(torch.tensor([1.0, 0, 0, 0]))
    first = replace(target(), module=sure, head="1")  # names person 0, whatever comes in
    evidence = replace(world(noise(), [first]), target=first)
    columns = measure([Outcome()], evidence).columns
    assert torch.stack(list(columns.values())).sum(0).allclose(torch.ones(PEOPLE, EACH))
    assert columns["outcome_missed"][1:].all()
    assert (columns["outcome_true_positive"] + columns["outcome_fools_evaluator"])[0].all()
    fooled = replace(world(noise(), [first]), target=replace(first, module=_shifted(sure)))
    columns = measure([Outcome()], fooled).columns
    assert columns["outcome_fools_target"][1].all()
    assert not columns["outcome_fools_target"][[0, 2, 3]].any()


def test_every_answer_of_target_evaluator_and_verifier_has_one_outcome():
    expected = {  # target, evaluator, verifier: as in docs/metrics.md
        (0, 0, 0): "missed", (1, 0, 0): "fools_target",
        (0, 1, 0): "fools_evaluator", (1, 1, 0): "fools_evaluator",
        (0, 0, 1): "false_negative", (1, 0, 1): "false_negative",
        (0, 1, 1): "true_positive", (1, 1, 1): "true_positive",
    }  # fmt: skip
    parts = categories(*torch.tensor(list(expected), dtype=torch.bool).T)
    found = [[name for name, part in parts.items() if part[place]] for place in range(8)]
    assert found == [[name] for name in expected.values()]


def _shifted(network):
    """The same network, which names person 1."""
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, PEOPLE))
    with torch.no_grad():
        other[1].weight.zero_()
        other[1].bias.copy_(network[1].bias.roll(1))
    return other


def test_the_bound_of_the_privacy_index_holds():
    terms = measure([Pii()], world(noise(), draws=(noise(1), noise(2)))).summaries
    values = {name: each.value for name, each in terms.items()}
    assert values["pii_error"] >= values["pii_bound"]
    assert values["pii_bound"] == pytest.approx(
        max(0, values["pii_originals"] - values["pii"]), abs=1e-9
    )
    with pytest.raises(ConfigError, match="needs two sets of draws of the prior"):
        measure([Pii()], world(noise()))


def test_a_surrogate_learns_more_from_copies_than_from_noise():
    """Each person is one colour: copies teach it, and images of the wrong colours do not."""
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
    painted = colours[:, None, :, None, None].expand(PEOPLE, EACH, 3, 16, 16)
    train = split().train
    pixels = colours[train.labels][:, :, None, None].expand(-1, 3, 16, 16).mul(255).byte()
    data = replace(split(), train=replace(train, pixels=pixels.contiguous()))
    metric = Knowledge(epochs=12, lr=0.01)
    shares = [
        measure([metric], replace(world(images), split=data)).score("knowledge").value
        for images in (painted, painted.roll(1, 0))
    ]
    assert shares[0] == 1
    assert shares[1] == 0


# Bad input


def test_one_image_of_a_person_is_too_few():
    with pytest.raises(DataError, match="at least 4 private training images and reconstructions"):
        measure([Prdc()], world(noise()[:, :3]))
    assert Prdc(neighbours=2).problems(3) == []
    assert "needs at least 4 reconstructions of each person, got 1" in Prdc().problems(1)[0]
    with pytest.raises(DataError, match="at least 2 people for an interval"):
        measure([Fid()], world(noise()[:1]))
    with pytest.raises(DataError, match="at least 2 attacked people"):
        measure([Knowledge(epochs=1)], world(noise()[:1]))


def test_a_person_without_images_is_named():
    data = split()
    kept = (data.train.labels != 2).nonzero().flatten()
    evidence = replace(world(noise()), split=replace(data, train=data.train.at(kept)))
    with pytest.raises(DataError, match=f"got none of {data.classes[2]!r}"):
        measure([Centroid()], evidence)
    with pytest.raises(RunError, match=r"images of shape \(4, 0, 3, 16, 16\): there is nothing"):
        measure([Centroid()], world(noise()[:, :0]))


@pytest.mark.parametrize("value", [torch.nan, 1.1, -0.1])
def test_images_that_are_none_are_refused(value):
    """As bytes NaN is black, and 1.1 is dark: an attack that failed would look like a defense."""
    images = noise()
    images[1, 2, 0, 3, 3] = value
    with pytest.raises(RunError, match=r"expected images in \[0, 1\], got 1 with other values"):
        measure([Centroid()], world(images))


def test_one_private_image_of_a_person_is_too_few():
    """Its centroid is the image itself; a ball around it has no neighbour to reach."""
    data = split()
    first = torch.stack([(data.train.labels == who).nonzero()[0, 0] for who in range(PEOPLE)])
    few = replace(data, train=data.train.at(first))
    with pytest.raises(DataError, match="at least 4 private training images and reconstructions"):
        measure([Prdc()], replace(world(noise()), split=few))
    copies_of_it = few.train.floats()[:, None].expand(-1, EACH, -1, -1, -1)
    rows = measure([Centroid()], replace(world(copies_of_it), split=few))
    assert rows.columns["centroid"].max() < 1e-4


def test_features_that_are_not_finite_are_refused():
    broken = target(seed=1)
    with torch.no_grad():
        broken.module[1].weight[0] = torch.nan
    with pytest.raises(RunError, match="NaN or infinity for 16 of 16 reconstructions"):
        _ = world(noise(), [broken]).features
    with pytest.raises(ConfigError, match="expected a classifier as the first evaluator"):
        measure([Centroid()], world(noise(), []))


def test_a_summary_that_is_not_finite_fails_its_step():
    class Broken(Fid):
        name = "broken"

        def summaries(self, evidence):
            return {"x": Score("x", float("nan"), 0, 0, ())}

    with pytest.raises(RunError, match="metric broken: x is not finite"):
        measure([Broken()], world(noise()))


def test_lpips_needs_both_files():
    with pytest.raises(ConfigError, match="needs both weights and linear"):
        Perceptual(weights="vgg.pth")
    with pytest.raises(ConfigError, match="perceptual needs a network whose layers compare"):
        measure([Perceptual()], world(noise()))
