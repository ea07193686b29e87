"""Further measures in reports and tables, and what a defense gains for its cost."""

import json

import pytest
import torch

from frostglass.core.errors import DataError
from frostglass.metrics._tradeoff import drop_ratio
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.seeds import seed_table
from frostglass.store.manifest import seal
from run_folders import make_run

MID = {"name": "mid", "weight": 0.01}


def two_models(folder, **more):
    return make_run(
        folder,
        [
            {"hits": (18, 18), "accuracy": 0.9},
            {"hits": (6, 6), "accuracy": 0.8, "defenses": [MID], **more},
        ],
    )


def with_summaries(folder):
    """A run whose config asked for FID."""
    path = folder / "run.json"
    document = json.loads(path.read_text())
    document["settings"]["metrics"] = [{"name": "fid"}, {"name": "none:such"}]
    score = {"value": 12.5, "low": 11.0, "high": 14.0}
    for audit in document["audits"]:
        audit["summaries"] = {"fid": score}
        audit["prior_only_summaries"] = {"fid": score | {"value": 40.25}}
    path.write_text(json.dumps(document))
    seal(folder, ("run.json", "rows.csv", "images.safetensors"))
    return folder


def test_the_ratio_of_the_drops_by_hand():
    """12 of 20 people for 10 points: 6 points of attack accuracy for each."""
    plain, own = torch.zeros(1, 20), torch.zeros(1, 20)
    plain[0, :18], own[0, :6] = 1, 1
    value, low, high = drop_ratio(plain, own, 0.9, 0.8)
    assert value == pytest.approx(6)
    assert low < 6 < high
    assert drop_ratio(plain, own, 0.8, 0.8) is None
    with pytest.raises(DataError, match=r"of one shape, got \(1, 20\) and \(1, 19\)"):
        drop_ratio(plain, own[:, 1:], 0.9, 0.8)


def test_a_report_shows_what_a_defense_gains(tmp_path):
    folder = two_models(tmp_path / "run")
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert "Gain of each defense for its cost" in page
    assert "10 points" in page
    table = seed_table([read_run(folder)], "markdown").splitlines()
    column = [cell.strip() for cell in table[0].split("|")].index("Δ top-1 / Δ accuracy")
    undefended, defended = (line.split("|")[column].strip() for line in table[2:4])
    assert undefended == "–"
    assert defended.startswith("6.00 (")


def test_a_defense_without_cost_has_no_ratio(tmp_path):
    page = build_report([two_models(tmp_path / "run", accuracy=0.9)], tmp_path / "report.html")
    assert "costs no accuracy" in page.read_text()


def test_reports_and_tables_show_values_of_the_whole_set(tmp_path):
    folder = with_summaries(two_models(tmp_path / "run"))
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert "Further measures of each audit" in page
    assert "12.5" in page
    assert "11 to 14" in page
    assert "prior only 40.2" in page
    assert "How far are the reconstructions, as a set, from the private images" in page
    assert "12.5 (12.5 to 12.5)" in seed_table([read_run(folder)], "markdown")


def test_a_baseline_with_other_scores_is_refused(tmp_path):
    folder = with_summaries(two_models(tmp_path / "run"))
    path = folder / "run.json"
    document = json.loads(path.read_text())
    document["audits"][0]["prior_only_summaries"] = {}
    path.write_text(json.dumps(document))
    seal(folder, ("run.json", "rows.csv", "images.safetensors"))
    with pytest.raises(DataError, match="and its baseline have other scores"):
        read_run(folder)
