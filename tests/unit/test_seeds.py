"""Audits repeated with several seeds become one row, with intervals over people and seeds."""

import csv
import io
from typing import Any

import pytest
import torch

from commands import error_of, frostglass
from feature_folders import make_feature_run
from frostglass.core.errors import ConfigError, DataError
from frostglass.metrics._stats import interval, interval_over_seeds
from frostglass.report.load import AuditRows, Run, read_run
from frostglass.report.seeds import seed_rows, seed_table
from run_folders import BROKEN, make_run

PEOPLE = 20


def hits(count: int, candidates: int = 1) -> torch.Tensor:
    """Ones in the last candidate of the first people, else zeros."""
    values = torch.zeros(PEOPLE, candidates, dtype=torch.double)
    values[:count, -1] = 1
    return values


def run(audits: list[dict[str, Any]], candidates: int = 1, **settings: Any) -> Run:
    """A run folder as it is read, of audits given by label, seed and hits."""
    documents, rows = [], []
    for audit in audits:
        documents.append(
            {
                "label": audit["label"],
                "seed": audit["seed"],
                "surface": audit.get("surface", "model"),
                "case": audit.get("case"),
                "attack": audit.get("attack"),
                "utility": {"mean_mcc": audit.get("mcc", 0.8), "mean_auc": 0.9},
                "target": {"accuracy": {"test": audit.get("accuracy", 0.9)}},
                "evaluators": [
                    {"model": "resnet", "decides": False},
                    {"model": "faces32", "decides": True},
                ],
                "prior_only": {"verified_2": {"by_identity": [0.0] * PEOPLE}},
                "controls": {
                    "vacuous": audit.get("vacuous", ""),
                    "fooled": audit.get("fooled", False),
                },
            }
        )
        columns = {
            "top1_1": hits(audit.get("named", 18), candidates),
            "verified_1": hits(0, candidates),
            "strict_1": hits(0, candidates),
            "verified_2": hits(audit["verified"], candidates),
            "strict_2": hits(audit["verified"] // 2, candidates),
            "similarity": torch.full((PEOPLE, candidates), audit.get("similarity", 0.5)),
        }
        rows.append(AuditRows(tuple(f"person {n}" for n in range(PEOPLE)), columns))
    document = {"name": "trial", "settings": {"name": "trial", **settings}, "audits": documents}
    facts: Any = None  # the table is made from the document and the rows
    return Run(document, facts, tuple(rows), {})


def grid(defense: str, verified: list[int], **more: Any) -> list[dict[str, Any]]:
    return [
        {"label": f"{defense}, seed={seed}", "seed": seed, "verified": count, **more}
        for seed, count in enumerate(verified)
    ]


def test_audits_that_differ_only_in_seed_are_one_row():
    audits = [*grid("undefended", [12, 10, 14]), *grid("calor(rank=10, a=1)", [4, 4, 4])]
    plain, calor = seed_rows([run(audits, grid={"seed": [0, 1, 2]})])
    assert (plain.label, calor.label) == ("undefended", "calor(rank=10, a=1)")
    assert plain.seeds == calor.seeds == (0, 1, 2)
    assert plain.people == PEOPLE
    assert plain.shares["verified, first"].value == pytest.approx(12 / 20)
    assert calor.shares["verified, first"].value == pytest.approx(4 / 20)
    assert calor.shares["strict, first"].value == pytest.approx(2 / 20)
    assert calor.shares["top-1, evaluator 1 (resnet)"].value == pytest.approx(18 / 20)
    assert calor.shares["verified, prior only"].value == 0
    assert calor.notes == ()


def test_runs_with_one_seed_each_are_joined_as_a_grid_is():
    runs = [
        run([{"label": "audit", "seed": seed, "verified": count, "accuracy": 0.8 + seed / 10}],
            seed=seed, data={"name": "faces"})
        for seed, count in enumerate([12, 10, 14])
    ]  # fmt: skip
    (row,) = seed_rows(runs)
    joined = seed_rows([run(grid("undefended", [12, 10, 14]))])[0]
    assert row.shares["verified, first"] == joined.shares["verified, first"]
    accuracy = row.shares["accuracy"]
    limits = (accuracy.value, accuracy.low, accuracy.high)
    assert limits == pytest.approx((0.9, 0.8, 1.0))  # the range over seeds


def test_runs_on_features_are_joined_by_their_attacked_images():
    runs = [
        run([{"label": "decoder", "seed": seed, "verified": 10, "surface": "features",
              "mcc": 0.7 + seed / 10, "similarity": 0.4 + seed / 10}],
            candidates=2, seed=seed)
        for seed in range(3)
    ]  # fmt: skip
    (row,) = seed_rows(runs)
    assert row.seeds == (0, 1, 2)
    assert str(row.shares["MCC"]) == "0.80 (0.70 to 0.90)"
    assert row.shares["similarity"].value == pytest.approx(0.5)
    assert row.shares["verified"].value == pytest.approx(0.25)  # one of two images of half of them
    assert "verified, any" not in row.shares
    table = seed_table(runs, "markdown")
    assert table.startswith("| audit | MCC | AUC | similarity | verified | strict |")
    assert "attacked images" in table
    assert next(csv.DictReader(io.StringIO(seed_table(runs, "csv"))))["MCC low"] == "0.7"


def test_verified_is_not_the_similarity_that_is_the_headline_of_features(tmp_path):
    folder = make_feature_run(tmp_path, [{"similarity": 0.6, "hits": 4}], people=8, images=2)
    (row,) = seed_rows([read_run(folder)])
    assert row.shares["similarity"].value == pytest.approx(0.6)
    assert row.shares["verified"].value == pytest.approx(4 / 16)
    assert row.shares["verified, prior only"].value == 0


def test_other_settings_are_other_rows():
    audit = [{"label": "audit", "seed": 0, "verified": 3}]
    rows = seed_rows([run(audit, data={"size": 32}), run(audit, data={"size": 64})])
    assert [row.seeds for row in rows] == [(0,), (0,)]


def test_runs_with_other_cases_are_joined_where_they_agree():
    short, long = ({"case": "gmi", "attack": {"steps": steps}} for steps in (10, 20))
    more = {"case": "ppa"}

    def audit(seed: int, case: dict[str, Any]) -> dict[str, Any]:
        return {"label": f"undefended, {case['case']}", "seed": seed, "verified": 3, **case}

    runs = [
        run([audit(0, short), audit(0, more)], grid={"case": [short, more], "defenses": [[], []]}),
        run([audit(1, short)], grid={"case": [short], "defenses": [[]]}),
        run([audit(2, long)], grid={"case": [long]}),
        run([audit(3, short)], grid={"case": [short], "target": {"cut": ["pool"]}}),
    ]
    assert [(row.label, row.seeds) for row in seed_rows(runs)] == [
        ("trial: undefended, gmi", (0, 1)),
        ("undefended, ppa", (0,)),
        ("trial: undefended, gmi", (2,)),  # another attack of the same name
        ("trial: undefended, gmi", (3,)),  # another setting of a grid
    ]


def test_first_and_any_candidate():
    (row,) = seed_rows([run(grid("undefended", [10, 10]), candidates=3)])
    assert row.shares["verified, first"].value == 0
    assert row.shares["verified, any"].value == pytest.approx(0.5)


def test_what_proves_nothing_is_marked():
    audits = grid("undefended", [12, 10, 14], fooled=True)
    audits[1]["vacuous"] = "the attack fails"
    (row,) = seed_rows([run(audits)])
    assert row.notes == ("vacuous with 1 of 3 seeds", "classifiers fooled")


def test_the_interval_covers_people_and_seeds():
    torch.manual_seed(0)
    same = (torch.rand(PEOPLE) < 0.5).double().repeat(3, 1)
    alone, several = interval(same[0]), interval_over_seeds(same)
    assert several == pytest.approx(alone, abs=0.03)  # equal seeds add no spread
    apart = torch.stack([hits(4)[:, 0], hits(10)[:, 0], hits(16)[:, 0]])
    low, high = interval_over_seeds(apart)
    people_only = interval(apart.mean(0))
    assert low < people_only[0] - 0.05
    assert high > people_only[1] + 0.05
    assert 0 <= low < 0.5 < high <= 1


def test_the_interval_holds_what_it_promises():
    """Of 200 worlds with random people and seeds, about 95 % of the intervals hold the truth."""
    rng = torch.Generator().manual_seed(1)
    held = 0
    for _ in range(200):
        person = torch.randn(40, generator=rng) * 0.3
        effect = torch.randn(3, generator=rng) * 0.05
        values = person + effect[:, None] + 0.1 * torch.randn(3, 40, generator=rng)
        low, high = interval_over_seeds(values, resamples=500)
        held += low <= 0 <= high
    assert 0.86 <= held / 200 <= 0.99


def test_all_or_nobody_is_not_certainty():
    assert interval_over_seeds(torch.zeros(3, 30)) == pytest.approx((0, 0.116), abs=1e-3)


def test_markdown_and_csv():
    runs = [run([*grid("undefended", [12, 10, 14]), *grid("calor", [0, 0, 0])])]
    markdown = seed_table(runs, "markdown").splitlines()
    assert markdown[0].startswith("| audit | accuracy | verified, first | verified, any | strict")
    assert "| 60.0% (" in markdown[2]
    assert markdown[3].startswith("| calor | 90.0% (90.0% to 90.0%) | 0.0% (0.0% to 16.8%) |")
    assert "| 0, 1, 2 | 20 | – |" in markdown[3]
    assert "95 % interval" in markdown[5]
    first, second = csv.DictReader(io.StringIO(seed_table(runs, "csv")))
    assert first["verified, first"] == "0.6"
    assert second["verified, first high"] == "0.168433"
    assert second["seeds"] == "0 1 2"
    with pytest.raises(ConfigError, match="table: expected markdown, csv or latex, got 'html'"):
        seed_table(runs, "html")


def test_what_cannot_be_one_table_is_refused():
    twice = run([{"label": "audit", "seed": 0, "verified": 3}])
    with pytest.raises(DataError, match="audit 'audit' has seed 0 twice: give each run once"):
        seed_rows([twice, twice])
    features = run([{"label": "released", "seed": 0, "verified": 3, "surface": "features"}])
    with pytest.raises(DataError, match="expected audits of models, or of features, got both"):
        seed_table([twice, features], "csv")
    mixed = run(grid("undefended", [3, 4]))
    names = tuple(f"other {n}" for n in range(PEOPLE))
    strangers = AuditRows(names, mixed.rows[1].columns)
    mixed = Run(mixed.document, mixed.facts, (mixed.rows[0], strangers), {})
    with pytest.raises(DataError, match="attack different people"):
        seed_rows([mixed])


def test_the_command_prints_the_table_of_run_folders(tmp_path):
    folders = [
        make_run(
            tmp_path / str(seed),
            [{**BROKEN, "seed": seed, "hits": (20, 19), "verified": verified}],
            settings={"name": "trial", "seed": seed},
        )
        for seed, verified in enumerate([9, 10, 14])
    ]
    result = frostglass("report", *folders, "--table", "csv")
    assert result.code == 0
    (row,) = csv.DictReader(io.StringIO(result.out))
    assert float(row["verified, first"]) == pytest.approx(11 / 20)
    assert float(row["top-1, evaluator 1 (resnet)"]) == 1
    assert float(row["top-1, evaluator 2 (resnet)"]) == pytest.approx(0.95)
    assert row["seeds"] == "0 1 2"
    line = error_of(frostglass("report", *folders, "--table", "xml"))
    assert line == "table: expected markdown, csv or latex, got 'xml'"
