"""Claims: written from run folders, checked when they are read, rendered as a leaderboard."""

import json
import shutil
from pathlib import Path

import pytest

from commands import error_of, frostglass
from frostglass.auditing.config_file import read_config
from frostglass.auditing.expand import expand
from frostglass.core.errors import DataError, StoreError
from frostglass.published.claims import (
    Interval,
    claims_of,
    config_hash,
    read_claim,
    read_claims,
    write_claims,
)
from frostglass.published.leaderboard import leaderboard, markdown
from run_folders import BROKEN, DEFENDED, edit_run, make_run

ROOT = Path(__file__).parents[2]
GRID = {"defenses": [[], [{"name": "calor", "rank": 3}]]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three seeds of an undefended model and CALoR."""
    root = tmp_path_factory.mktemp("runs")
    return [
        make_run(
            root / f"seed-{seed}",
            [{**BROKEN, "seed": seed}, {**DEFENDED, "seed": seed}],
            settings={"name": "small", "seed": seed, "data": {}, "grid": GRID},
            name="small",
        )
        for seed in range(3)
    ]


@pytest.fixture
def runs(written, tmp_path):
    """Copies that a test may change."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in written]


def test_claims_join_seeds_and_say_what_made_them(runs, tmp_path):
    claims = claims_of(runs)
    assert [(claim.defense, claim.attack) for claim in claims] == [
        ("undefended", "gmi"),
        ("calor(rank=3)", "gmi"),
    ]
    assert all(claim.seeds == [0, 1, 2] for claim in claims)
    assert claims[1].config["defenses"] == [{"name": "calor", "rank": 3}]
    assert "seed" not in claims[1].config
    assert claims[1].versions["frostglass"]
    assert claims[1].value.value == pytest.approx(7 / 20)
    folder = tmp_path / "claims"
    paths = write_claims(claims, folder)
    assert paths[1] == folder / "small" / "calor-rank-3--gmi.json"
    assert read_claims(folder) == sorted(claims, key=lambda claim: claim.path)
    write_claims(claims, folder)  # the same again


def test_a_leaderboard_ranks_defenses_by_the_strongest_attack(runs):
    undefended, gmi = claims_of(runs)
    scores = {**gmi.scores, gmi.headline: Interval(value=0.5, low=0.4, high=0.6)}
    ppa = gmi.model_copy(update={"attack": "PPA", "scores": scores})
    first, second = leaderboard([undefended, gmi, ppa])
    assert (first.claim.attack, first.attacks) == ("PPA", 2)
    assert second.claim.defense == "undefended"
    assert "| calor(rank=3) | PPA (of 2) | 50.0% (40.0% to 60.0%) |" in markdown([first, second])


def test_the_commands(runs, tmp_path):
    folder = tmp_path / "claims"
    result = frostglass("claims", "add", *runs, "--into", folder, "--json")
    assert result.code == 0, result.err
    assert len(json.loads(result.out)) == 2
    assert "calor(rank=3)" in frostglass("leaderboard", folder).out
    rows = json.loads(frostglass("leaderboard", folder, "--json").out)
    assert [row["defense"] for row in rows] == ["calor(rank=3)", "undefended"]
    assert "| world |" in frostglass("leaderboard", folder, "--table", "markdown").out
    assert "expected markdown" in error_of(frostglass("leaderboard", folder, "--table", "latex"))
    assert "no folder of claims" in error_of(frostglass("leaderboard", tmp_path / "none"))
    few = error_of(frostglass("claims", "add", runs[0], "--into", tmp_path / "other"))
    assert "has 1 seeds, expected at least 3" in few


@pytest.mark.parametrize("missing", ["failed", "not_run"])
def test_an_unfinished_run_makes_no_claim(runs, missing):
    document = json.loads((runs[1] / "run.json").read_text())
    document[missing] = ["mid: stopped"]
    edit_run(runs[1], document)
    with pytest.raises(DataError, match="is unfinished"):
        claims_of(runs)


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config_hash": "0" * 24}, "config_hash is 000"),
        ({"config": {"data": {"size": 64}}}, "config_hash is "),
        ({"people": 0}, "people: "),
        ({"headline": "top-9"}, "scores: expected 'top-9' among them"),
        ({"seeds": [0, 0, 1]}, "seeds: expected each once"),
        ({"format": 2}, "format: "),
        ({"luck": 1}, "luck: "),
    ],
)
def test_a_contradicting_claim_is_refused(runs, tmp_path, values, message):
    path = write_claims(claims_of(runs), tmp_path / "claims")[0]
    changed(path, **values)
    with pytest.raises(DataError, match="is no claim") as caught:
        read_claim(path)
    assert message in str(caught.value)


def test_a_claim_of_another_config_is_not_replaced_silently(runs, tmp_path):
    folder = tmp_path / "claims"
    write_claims(claims_of(runs), folder)
    for run in runs:
        document = json.loads((run / "run.json").read_text())
        document["settings"]["prior"] = {"name": "wgan"}
        edit_run(run, document)
    other = claims_of(runs)
    with pytest.raises(DataError, match="is of another config"):
        write_claims(other, folder)
    write_claims(other, folder, replace=True)
    assert read_claims(folder)


def test_one_name_is_one_world(runs, tmp_path):
    folder = tmp_path / "claims"
    first, *others = claims_of(runs)
    write_claims([first], folder)
    config = {**others[0].config, "data": {"size": 64}}
    values = others[0].model_dump() | {"config": config, "config_hash": config_hash(config)}
    path = folder / others[0].path
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="world_hash is"):
        read_claim(path)
    path.unlink()
    moved = folder / "elsewhere.json"
    (folder / first.path).rename(moved)
    with pytest.raises(DataError, match="belongs at"):
        read_claims(folder)
    moved.unlink()
    with pytest.raises(StoreError, match="has no claims"):
        read_claims(folder)


def test_the_claims_of_this_project_are_of_its_config():
    claims = read_claims(ROOT / "claims")
    settings = read_config(ROOT / "configs" / "faces" / "protections.toml")
    hashes = set()
    for _, config in expand(settings):
        del config["seed"]
        hashes.add(config_hash(config))
    assert {claim.config_hash for claim in claims} == hashes
    assert all(len(claim.seeds) >= 3 for claim in claims)
