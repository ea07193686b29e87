"""Utility against similarity."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from feature_folders import ADAPTED, CRAFTED, OPEN, WEAK, feature_page, feature_study
from frostglass.metrics._stats import interval
from frostglass.report.plot import NARROW, draw
from frostglass.report.tradeoff import tradeoff
from pages import plain

PLOTTED = [
    OPEN,
    *(
        {
            **CRAFTED,
            "defenses": [{"name": "crafter", "beta": beta}],
            "similarity": similarity,
            "mcc": mcc,
        }
        for beta, similarity, mcc in [(1.0, 0.2, 0.5), (9.0, 0.4, 0.58)]
    ),
    {**CRAFTED, **WEAK, "defenses": [{"name": "disco"}], "mcc": 0.4},
]


def drawn(source: str) -> dict[str, tuple[float, float]]:
    """Places of the points by the names that start their titles."""
    points = re.findall(
        r'<g class="point [^"]*" transform="translate\(([\d.]+) ([\d.]+)\)"><title>([^<]+)</title>',
        source,
    )
    return {plain(title).split(":")[0]: (float(x), float(y)) for x, y, title in points}


def wide_plot(tmp_path: Path, audits: Sequence[dict[str, Any]]) -> str:
    plot = tradeoff(feature_study(tmp_path, audits))
    assert plot is not None
    return str(draw(plot))


def test_points_stand_where_their_numbers_are(tmp_path):
    source = wide_plot(tmp_path, PLOTTED)
    places = drawn(source)
    assert list(places) == [
        "unprotected",
        "Crafter (beta=1.0)",
        "Crafter (beta=9.0)",
        "Disco (vacuous)",
    ]
    open_, weak, strong, hollow = (
        places[name]
        for name in ("unprotected", "Crafter (beta=9.0)", "Crafter (beta=1.0)", "Disco (vacuous)")
    )
    # Both axes are linear: up for more similarity, to the right for more utility.
    per_mcc = (open_[0] - hollow[0]) / (0.61 - 0.4)
    assert per_mcc > 0
    assert weak[0] - strong[0] == pytest.approx(0.08 * per_mcc, abs=0.15)
    per_similarity = (hollow[1] - open_[1]) / (0.6 - 0.06)
    assert per_similarity > 0
    assert strong[1] - weak[1] == pytest.approx(0.2 * per_similarity, abs=0.15)
    # Dashed lines: two photos of one person, and the prior-only baseline.
    dashed = [float(y) for y in re.findall(r'<line class="guess" [^>]*y1="([\d.]+)"', source)]
    assert sorted(dashed) == pytest.approx(
        [open_[1] - 0.1 * per_similarity, hollow[1] + 0.01 * per_similarity], abs=0.15
    )
    assert re.search(r">same person<tspan[^>]*>0\.70<", source)
    assert re.search(r">prior only<tspan[^>]*>0\.05<", source)


def test_strengths_are_joined_bars_are_intervals_and_vacuous_points_hollow(tmp_path):
    source = wide_plot(tmp_path, PLOTTED)
    places = drawn(source)
    (route,) = re.findall(r'<polyline class="route" points="([^"]+)"', source)
    assert [tuple(map(float, pair.split(","))) for pair in route.split()] == [
        places["Crafter (beta=1.0)"],
        places["Crafter (beta=9.0)"],
    ]
    x, y = places["unprotected"]
    per_mcc = (x - places["Disco (vacuous)"][0]) / (0.61 - 0.4)
    level = [
        tuple(map(float, ends))
        for ends in re.findall(rf'<path class="reach" d="M([\d.]+) {y}H([\d.]+)"', source)
    ]
    assert level == [pytest.approx((x - 0.04 * per_mcc, x + 0.03 * per_mcc), abs=0.15)]
    per_similarity = (places["Disco (vacuous)"][1] - y) / (0.6 - 0.06)
    low, high = interval(torch.linspace(0.57, 0.63, 8))
    upright = [
        tuple(map(float, ends))
        for ends in re.findall(rf'<path class="reach" d="M{x} ([\d.]+)V([\d.]+)"', source)
    ]
    assert upright == [
        pytest.approx(
            (y + (0.6 - low) * per_similarity, y - (high - 0.6) * per_similarity), abs=0.15
        )
    ]
    assert source.count(" hollow") == 1
    names = re.findall(r'<text class="name"[^>]*>([^<]+)<', source)
    assert names == ["unprotected", "Crafter", "Disco"]


def test_one_protection_needs_no_plot(tmp_path):
    assert tradeoff(feature_study(tmp_path, [OPEN, {**OPEN, "attack": ADAPTED}])) is None
    page = feature_page(tmp_path / "again", [OPEN])
    assert "Utility and similarity under each protection" not in page.tables
    assert drawn(page.raw) == {}


def test_a_narrow_plot_has_a_legend_and_stays_inside(tmp_path):
    page = feature_page(tmp_path, PLOTTED)
    classes = [values.get("class") for _, values in page.tags]
    assert classes.count("plot wide") == classes.count("plot narrow") == 1
    legend = page.raw.split('<ul class="legend narrow">')[1].split("</ul>")[0]
    assert re.findall(r"</span> ([^<]+)</li>", legend) == ["unprotected", "Crafter", "Disco"]
    plot = tradeoff(feature_study(tmp_path / "narrow", PLOTTED))
    source = str(draw(plot, NARROW))
    assert all(46 <= x <= 338 and 28 <= y <= 314 for x, y in drawn(source).values())
    assert "same person 0.70" in source
    assert 'class="name"' not in source
