"""Scores, intervals, conventions and the contract of metrics."""

from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Reconstructions
from frostglass.metrics._neighbours import nearest
from frostglass.metrics._stats import interval
from frostglass.metrics.accuracy import conventions, hits
from frostglass.metrics.base import Evidence, Metric, Rows, Score, measure, metrics
from frostglass.metrics.distance import Distance
from frostglass.metrics.manifold import Manifold
from worlds import images, split, target


def rows(top1, confidence=None):
    first = torch.tensor(top1)
    columns = {
        "top1_1": first,
        "top5_1": torch.ones_like(first),
        "target_confidence": torch.tensor(confidence) if confidence else first,
    }
    return Rows(labels=torch.arange(len(first)), columns=columns)


def test_scores_print_in_one_line():
    score = Score("top1_1", 0.875, 0.75, 0.975, (1.0,) * 40)
    assert repr(score) == "top1_1: 87.5 % (75.0 to 97.5), 40 people"
    assert (
        repr(replace(score, name="psnr", value=21.25)) == "psnr: 21.25 (0.75 to 0.975), 40 people"
    )
    assert "<td>&lt;b&gt;</td>" in replace(score, name="<b>")._repr_html_()


def test_rows_print_in_one_line():
    some = rows([[1.0, 0.0], [0.0, 0.0]])
    assert repr(some) == "Rows: 2 people × 2 candidates: top1_1, top5_1, target_confidence"
    assert "<td>top1_1</td><td>25.0 %</td>" in some._repr_html_()
    assert repr(Rows(torch.arange(2), {})) == "Rows: 2 people × 0 candidates: no columns"


def test_a_metric_without_columns_is_refused():
    @parameters
    class Nothing(Metric):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()
    with pytest.raises(ConfigError, match="metric Nothing lacks columns"):
        metrics.register(Nothing)


def test_metrics_say_on_which_surfaces_they_can_be_measured():
    surfaces = {name: metrics.get(name).surfaces for name in metrics.names()}
    assert surfaces.pop("outcome") == {"model"}
    assert all(both == {"model", "features"} for both in surfaces.values())


def test_hits_by_hand():
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]])
    assert hits(logits, torch.tensor([0, 1]), 1).tolist() == [1, 0]
    assert hits(logits, torch.tensor([1, 1]), 2).tolist() == [1, 0]
    assert hits(logits, torch.tensor([3, 0]), 5).tolist() == [1, 1]  # fewer classes than five


def test_every_convention_from_the_same_rows():
    found = conventions(
        rows(
            [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]],
            confidence=[[0.9, 0.1], [0.5, 0.5], [0.1, 0.2], [0.9, 0.2]],
        ),
        group=2,
    )
    assert found["mean"] == 0.5
    assert found["selected"] == 0.5  # persons 0 and 2
    assert found["any"] == 0.75
    assert found["first"] == 0.5
    # groups (0, 1) and (2, 3): means over draws (0.5, 0) and (0.5, 1): variances 0.125 and 0.125
    assert found["std_draws"] == pytest.approx(0.125**0.5)
    assert found["var_draws"] == pytest.approx(0.125)
    assert found["std_identities"] == pytest.approx(
        torch.tensor([0.5, 0.0, 1.0, 0.5]).std(unbiased=False).item()
    )
    assert found["top5"] == found["top5_last"] == 1.0


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        low, high = interval((torch.rand(40, generator=rng) < 0.3).float(), resamples=400)
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_interval_is_over_identities_and_honest_when_all_agree():
    assert interval(torch.ones(30)) == (pytest.approx(0.884, abs=1e-3), 1.0)
    assert interval(torch.zeros(30)) == (0.0, pytest.approx(0.116, abs=1e-3))
    few, many = interval(torch.tensor([0.0, 1.0] * 5)), interval(torch.tensor([0.0, 1.0] * 200))
    assert few[1] - few[0] > 3 * (many[1] - many[0])


def test_score_is_the_mean_over_identities():
    score = rows([[1.0, 0.0], [0.0, 0.0]]).score("top1_1")
    assert isinstance(score, Score)
    assert score.value == 0.25
    assert score.values == (0.5, 0.0)


def evidence(candidates, labels):
    reconstructions = Reconstructions(
        images=candidates[:, None],
        labels=labels,
        latents=torch.zeros(len(labels), 1, 1),
        confidence=torch.zeros(len(labels), 1),
        queries=0,
        seconds=0,
    )
    return Evidence(reconstructions, target(), [target(seed=1)], split())


def test_distance_separates_a_copy_from_noise():
    data = split()
    index = torch.tensor([int((data.train.labels == label).nonzero()[0]) for label in range(4)])
    copy = Distance().columns(evidence(data.train.floats(index), torch.arange(4)))["distance"]
    noise = Distance().columns(
        evidence(
            torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)
        )
    )["distance"]
    assert copy.max() < 1e-5
    assert (noise > copy + 0.1).all()


def test_distance_is_to_the_attacked_persons_own_images():
    data = split()
    swapped = Distance().columns(
        evidence(data.train.floats(torch.tensor([0, 1])), torch.tensor([1, 0]))
    )["distance"]
    assert swapped.min() > 1e-3


def test_manifold_separates_a_public_image_from_noise():
    public = images(40, 5, seed=9, names="stranger").floats(torch.arange(4))
    near = Manifold().columns(evidence(public, torch.arange(4)))["manifold"]
    far = Manifold().columns(evidence(torch.rand(4, 3, 16, 16).round(), torch.arange(4)))[
        "manifold"
    ]
    assert near.max() < 1e-5
    assert far.min() > 1e-2


def test_nearest_against_a_slow_reference():
    a, b = torch.rand(7, 5), torch.rand(9, 5)
    slow = torch.tensor([min((x - y).norm().item() for y in b) for x in a])
    assert torch.allclose(nearest(a, b), slow, atol=1e-5)


def test_a_metric_that_fails_fails_the_step():
    class Broken(Metric):
        name = "broken"

        def columns(self, evidence):
            return {"x": torch.tensor([[float("nan")]])}

    with pytest.raises(RunError, match="metric broken: x is not finite for 1"):
        measure([Broken()], evidence(torch.rand(1, 3, 16, 16), torch.tensor([0])))


def test_conventions_count_draws_and_not_ranks():
    """Candidates are stored best first; conventions about draws need the order of drawing."""
    sorted_rows = rows([[1.0, 0.0], [1.0, 0.0]])
    as_drawn = replace(sorted_rows, draws=torch.tensor([[0, 1], [1, 0]]))
    assert conventions(sorted_rows)["first"] == 1.0
    found = conventions(as_drawn)
    assert found["first"] == 0.5
    assert found["std_draws"] == 0.0
    assert found["mean"] == 0.5
