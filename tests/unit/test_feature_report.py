import csv
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.audit.feature_controls import judge_features
from frostglass.audit.feature_grid import FeatureRun, write_feature_run
from frostglass.audit.feature_pipeline import FeatureAudit, Released
from frostglass.audit.features import FeatureExperiment
from frostglass.core.errors import DataError, FrostglassError, StoreError
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.metrics._stats import interval
from frostglass.metrics.base import Rows
from frostglass.report import features
from frostglass.report.build import build_report
from frostglass.report.charts import number
from frostglass.report.feature_runs import read_feature_run
from frostglass.report.feature_study import group
from frostglass.report.features import build_feature_report
from pages import Page, plain

SHAPE = (32, 16, 16)
CRAFTER = [{"name": "crafter"}]
ADAPTED = {"name": "decoder", "adapt": 64}
OPEN = {"similarity": 0.6, "mcc": 0.61, "auc": 0.85}
CRAFTED = {"defenses": CRAFTER, "similarity": 0.3, "mcc": 0.53, "auc": 0.8}
FAILED = {"similarity": 0.06, "control": 0.06}
NOTED = (
    {"pictures": 3, "emd_start": 2.0, "emd_end": 0.5, "steps": 100},
    {"pictures": 1, "emd_start": 4.0, "emd_end": 1.5, "steps": 60},
)


def some_rows(level: float, people: int, candidates: int, judges: int, hits: int = 0) -> Rows:
    """Rows whose similarity is `level` in the mean: people differ by up to 0.06 and candidates by up to 0.02; each judge recognises the first `hits`."""
    each = (
        torch.linspace(-0.03, 0.03, people).double()[:, None]
        + torch.linspace(-0.01, 0.01, candidates).double()
    )
    similarity = level + each - each.mean()
    flat = torch.ones(people, candidates)
    first = (torch.arange(people * candidates) < hits).float().reshape(people, candidates)
    columns = {f"top{best}_{judge}": first for judge in range(1, judges + 1) for best in (1, 5)}
    more = {
        "ssim": level / 2 + 0 * flat,
        "psnr": 10 + 5 * level * flat,
        "fsim": 0.7 * flat,
        "mse": 0.05 * flat,
        "manifold": 0.3 * flat,
    }
    return Rows(
        torch.arange(people),
        columns | {"face_similarity": similarity - 0.01} | more | {"similarity": similarity},
    )


def useful(mcc: float, auc: float) -> dict[str, Any]:
    means = {"mean_mcc": mcc, "mean_auc": auc, "accuracy": 0.9}
    ends = {
        f"{name}_{end}": value + by
        for name, value in means.items()
        for end, by in (("low", -0.04), ("high", 0.03))
    }
    return means | ends | {"attributes": 5, "counted": 5, "pictures": 40, "people": 20}


def make_run(
    folder: Path,
    audits: Sequence[dict[str, Any]],
    *,
    people: int = 6,
    pictures: int = 2,
    names: Sequence[str] = (),
    size: int = 8,
    judges: Sequence[float] = (0.97, 0.95),
    references: tuple[float, float] = (0.7, 0.02),
    settings: dict[str, Any] | None = None,
    name: str = "trial",
    failed: Sequence[str] = (),
    rebuilt: Sequence[torch.Tensor] = (),
    victims: torch.Tensor | None = None,
) -> Path:
    """A run folder, written by the code that writes real ones, of audits that went as told.

    Each audit may tell `defenses`, `attack`, `case`, `similarity`, `blind`, `control` (similarity in the positive control, None for no control), `hits`, `mcc`,
    `auc`, `plain` (MCC of plain features), `partial` (people of whom no search came to its end), `noted` (by the protection), `moved`, `cut`, `shape`, `model`, `lda`, `label`. Those alike in all but the attack share what was released.
    """
    names = tuple(names) or tuple(f"person {place}" for place in range(people))
    rng = torch.Generator().manual_seed(1)
    if victims is None:
        victims = torch.randint(
            0, 256, (people * pictures, 3, size, size), generator=rng, dtype=torch.uint8
        )
    true = Images(
        victims,
        torch.arange(people).repeat_interleave(pictures),
        names,
        tuple(f"{i}.png" for i in range(len(victims))),
    )
    split = Split(
        true,
        true,
        true,
        true,
        {"parts": {"train": {"pictures": people, "sha256": "5e" * 32}}},
        key="split",
    )

    def network(model: str, accuracy: float, key: str, **more: Any) -> Target:
        info = {
            "model": model,
            "parameters": 12345,
            "accuracy": {"test": accuracy},
            "selected_epoch": 3,
            "history": [],
        }
        return Target(
            nn.Identity(),
            more.pop("classes", names),
            true.shape,
            "head",
            info=info,
            key=key,
            **more,
        )

    evaluators = tuple(
        network("resnet", accuracy, f"judge{place}:{accuracy}")
        for place, accuracy in enumerate(judges)
    )
    embedder = network("resnet", 0.9, "embedder")
    scale = {
        "same_person": references[0],
        "different_people": references[1],
        "people": people,
        "with_several": people,
    }
    made, labels = [], []
    for place, told in enumerate(audits):
        target_config = {
            "cut": told.get("cut", "stage1"),
            "attributes": ["all"],
            "model": told.get("model", "cnn"),
        }
        chosen = {
            "name": name,
            "case": told.get("case", ""),
            "target": target_config,
            "defenses": told.get("defenses", []),
            "prior": {"name": "wgan"},
        }
        judging = {"pictures": pictures, "positive_control": told.get("control", 0.6) is not None}
        exp = FeatureExperiment.parse(
            chosen | {"attack": told.get("attack", {"name": "decoder"}), "judging": judging}
        )
        candidates = pictures * exp.attack.tries
        rows, blind = (
            some_rows(level, people, candidates, len(judges), hits)
            for level, hits in (
                (told.get("similarity", 0.6), told.get("hits", 4)),
                (told.get("blind", 0.05), 0),
            )
        )
        level = told.get("control", 0.6)
        control = (
            None if level is None else (some_rows(level, people, candidates, len(judges)), blind)
        )
        what = json.dumps([told.get(part) for part in ("defenses", "cut", "model", "released")])
        found = Reconstructions(
            rebuilt[place] if rebuilt else torch.rand((people, candidates, 3, size, size), generator=rng), torch.arange(people), torch.zeros(people), torch.full((people,), 0.4),
            31_200, 75.5, f"attack{name}{place}",
        )  # fmt: skip
        made.append(
            FeatureAudit(
                experiment=exp, split=split, victims=true, evaluators=evaluators, embedder=embedder, found=found, prior_rows=blind,
                target=network(told.get("model", "cnn"), 0.9, f"target{what}", classes=("beard", "glasses", "smile"), cut=exp.target.cut, attributes=True),
                released=Released(torch.zeros(1), tuple(told.get("noted", ())), f"released{what}"),
                rows=Rows(rows.labels, rows.columns, key=f"{name}{place}"),
                utility=useful(told.get("mcc", 0.61), told.get("auc", 0.85)), plain=useful(told.get("plain", told.get("mcc", 0.61)), 0.85),
                facts={"deviation": 0.1, "relative_deviation": told.get("moved", 0.0), "feature_shape": list(told.get("shape", SHAPE)), "lda": told.get("lda", 1.25), "emd": 3.5, "emd_floor": 2.25},
                controls=judge_features(rows, blind, control, scale, margin=0.2, evaluators=evaluators, partial=told.get("partial", 0)),
            )
        )  # fmt: skip
        names_of = (
            " + ".join(defense["name"] for defense in told.get("defenses", [])) or "undefended"
        )
        labels.append(told.get("label", ", ".join(filter(None, [names_of, told.get("case", "")]))))
    return write_feature_run(
        FeatureRun(
            name,
            settings if settings is not None else {"name": name},
            tuple(labels),
            tuple(made),
            tuple(failed),
        ),
        folder,
    )


def page_of(tmp_path: Path, audits: Sequence[dict[str, Any]], **how: Any) -> Page:
    return Page(
        build_feature_report([make_run(tmp_path / "run", audits, **how)], tmp_path / "report.html")
    )


def told(score: dict[str, float]) -> str:
    """A score as the page writes it."""
    return f"{score['value']:.2f} (interval {score['low']:.2f} to {score['high']:.2f})"


def scores_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        audit["scores"]
        for audit in json.loads((tmp_path / "run" / "run.json").read_text())["audits"]
    ]


# The answer


def test_answer_says_what_leaves_what_is_rebuilt_and_what_protection_costs(tmp_path):
    leaves, leak, change = page_of(tmp_path, [OPEN, CRAFTED]).sentences
    plain_scores, crafted = (scores["similarity"] for scores in scores_of(tmp_path))
    assert leaves == (
        "In place of each picture its feature leaves the device, so that a server can tell 3 attributes of it: "
        "8 192 numbers (32×16×16), what layer stage1 of a cnn puts out."
    )
    assert leak == (
        f"From unprotected features, the attack decoder rebuilt pictures of 6 people that resemble the true ones with a similarity of {told(plain_scores)}; "
        "two photos of one person reach 0.70, photos of two people 0.02 and blind draws 0.05. In 33.3 % of them the stricter of two judges recognised the person."
    )
    assert (
        change
        == f"Crafter lowers this to a similarity of {told(crafted)} by decoder and costs 0.08 of utility (MCC 0.61 → 0.53)."
    )


@pytest.mark.parametrize(
    ("similarity", "mcc", "said"),
    [
        (0.6, 0.61, r"Crafter does not clearly lower it: a similarity of 0\.60 .* by decoder, no difference beyond chance on the same people; it costs no utility \(MCC 0\.61 → 0\.61\)\."),
        (0.601, 0.53, r"Crafter does not lower it but raises it to a similarity of 0\.60 .* and costs 0\.08 of utility"),
        (0.599, 0.66, r"Crafter lowers this to a similarity of 0\.60 .* and gains 0\.05 of utility \(MCC 0\.61 → 0\.66\)\."),
        (0.05, 0.53, r"Crafter lowers this to a similarity of 0\.05 .* by decoder, not above blind draws beyond chance, and costs"),
    ],
)  # fmt: skip
def test_protections_are_compared_person_by_person(tmp_path, similarity, mcc, said):
    # People differ by 0.06, so the intervals of the two overlap widely; person by person the difference is the same for everybody.
    change = page_of(tmp_path, [OPEN, {**CRAFTED, "similarity": similarity, "mcc": mcc}]).sentences[
        2
    ]
    assert re.fullmatch(said if said.endswith(r"\.") else f"{said}.*", change), change


def test_the_strongest_sound_attack_counts(tmp_path):
    latent = {"name": "latent", "tries": 2}
    audits = [
        {**OPEN, "case": "decoder"},
        {**OPEN, "case": "search", "attack": latent, "similarity": 0.64, "hits": 24},
        {**CRAFTED, "case": "decoder"},
        {**CRAFTED, "case": "search", "attack": latent, "similarity": 0.25},
        {**CRAFTED, "case": "A1", "attack": ADAPTED, "similarity": 0.41, "control": 0.06},
    ]
    page = page_of(tmp_path, audits)
    assert page.sentences[1].startswith(
        "From unprotected features, the strongest of 2 attacks (search) rebuilt pictures of 6 people"
    )
    assert page.sentences[1].endswith(
        "In 100 % of them the stricter of two judges recognised the person."
    )
    assert page.sentences[2].startswith("Crafter lowers this to a similarity of 0.30 ")
    assert "by decoder and costs" in page.sentences[2]
    text = page.text.replace(" ,", ",").replace(" .", ".").replace(" :", ":")
    assert "the strongest sound one counts: unprotected (search), Crafter (decoder)." in text
    # What a vacuous audit finds is found all the same.
    assert (
        "On Crafter a vacuous audit (A1) scores more than the strongest sound one, 0.41: a leak is a leak all the same."
        in page.text
    )
    reason = "the same attack does not rebuild people from unprotected features (similarity above blind draws"
    assert f"These audits are vacuous and prove nothing: Crafter · A1 ({reason}" in page.text
    assert "VACUOUS" not in page.text


def test_a_guess_without_a_picture_is_not_called_one(tmp_path):
    page = page_of(tmp_path, [{**OPEN, "attack": {"name": "mapper"}}])
    assert page.sentences[1].startswith(
        "From unprotected features, the attack mapper guessed who is shown, without making a picture: for 6 people with a similarity of 0.60 "
    )
    assert "recognised" not in page.sentences[1]
    assert (
        page.sentences[2]
        == "No protected features are part of this report, so it does not say what a protection would change."
    )
    assert "in its row stands the public picture nearest to its guess" in page.text
    head, row = page.tables["Scores of each audit"]
    assert row[head.index("similarity")].endswith("picture shown 0.59")


def test_many_protections_are_a_range_and_failures_are_named(tmp_path):
    strengths = [
        (4.0, 0.6, 0.6),
        (2.0, 0.4, 0.58),
        (1.0, 0.3, 0.55),
        (0.5, 0.2, 0.5),
        (0.1, 0.12, 0.31),
    ]
    audits = [
        {
            **CRAFTED,
            "defenses": [{"name": "crafter", "beta": beta}],
            "similarity": found,
            "mcc": mcc,
        }
        for beta, found, mcc in strengths
    ]
    page = page_of(tmp_path, [OPEN, *audits])
    assert page.sentences[2] == (
        "With 5 protections it is between 0.12 under Crafter (beta=0.1) and 0.60, and they cost between 0.01 and 0.30 of utility (MCC); "
        "Crafter (beta=4.0) does not clearly lower it."
    )


def test_without_unprotected_features_the_control_speaks(tmp_path):
    rest = page_of(
        tmp_path,
        [
            {**CRAFTED, "plain": 0.6},
            {**CRAFTED, "defenses": [{"name": "disco"}], "similarity": 0.2},
        ],
    ).sentences[2]
    found = scores_of(tmp_path)[1]["similarity"]
    assert rest == (
        f"For Disco it is a similarity of {told(found)}; on unprotected features the same attack scores 0.55 above blind draws (at least 0.55), so it works there; "
        "beside the plain features of the same network Crafter costs 0.07 of utility (MCC 0.60 → 0.53)."
    )


def test_what_a_trained_protection_costs_is_not_guessed(tmp_path):
    page = page_of(tmp_path, [{**CRAFTED, "defenses": [{"name": "disco"}]}])
    assert page.sentences[1].startswith(
        "From features protected by Disco, the attack decoder rebuilt"
    )
    assert page.sentences[2].endswith(
        "those are not part of this report, so what a protection costs cannot be told."
    )


def test_each_protection_is_compared_with_its_own_layer(tmp_path):
    deeper = {"cut": "stage2", "shape": (64, 8, 8)}
    audits = [
        OPEN,
        {**OPEN, **deeper, "similarity": 0.3, "mcc": 0.7},
        {**CRAFTED, **deeper, "mcc": 0.65},
    ]
    leaves, leak, change = page_of(tmp_path, audits).sentences
    assert leaves.endswith(
        ": depending on where the model is cut, 8 192 numbers (32×16×16), what layer stage1 of a cnn puts out; or "
        "4 096 numbers (64×8×8), what layer stage2 of a cnn puts out."
    )
    assert leak.startswith("From unprotected features (cut=stage1), the attack decoder")
    assert change.startswith("Crafter does not clearly lower it: a similarity of 0.30")
    assert change.endswith("it costs 0.05 of utility (MCC 0.70 → 0.65).")


def test_a_vacuous_audit_says_so_first_and_nothing_reassuring(tmp_path):
    page = page_of(tmp_path, [FAILED, {**FAILED, "defenses": CRAFTER}])
    assert page.sentences[:2] == [
        "This audit is VACUOUS: the attack fails even on unprotected features, so its failure on any others proves nothing.",
        "A low number means a weak attack here, not a safe feature.",
    ]
    assert len(page.sentences) == 3
    assert page.sentences[2].startswith("In place of each picture its feature leaves the device")
    assert any(
        tag == "div" and values.get("class") == "void" and values.get("role") == "alert"
        for tag, values in page.tags
    )
    assert "it cannot show that a protection works" in page.text
    assert "This audit is vacuous: low points mean a weak attack, not a safe feature." in page.text
    assert not [
        sign
        for sign in ("✓ pass", "✓ tried", "lowers", "Right and low is best")
        if sign in page.text
    ]
    assert not [tag for tag, values in page.tags if values.get("aria-label") == "strongest"]


def test_no_control_is_vacuous_and_a_leak_stays_a_leak(tmp_path):
    sentences = page_of(tmp_path, [{**OPEN, "control": None}]).sentences
    assert (
        sentences[0]
        == "This audit is VACUOUS: no positive control was run, so a failed attack cannot be told from a good protection."
    )
    assert (
        sentences[2]
        == f"A high number is a leak all the same: a similarity of {told(scores_of(tmp_path)[0]['similarity'])} for unprotected · decoder."
    )


def test_each_reason_is_told_with_the_attacks_it_holds_for(tmp_path):
    audits = [
        {**FAILED, "case": "A"},
        {**OPEN, "case": "B", "control": None},
        {**OPEN, "case": "C", "partial": 4},
        {**FAILED, "case": "D"},
    ]
    page = page_of(tmp_path, audits)
    assert page.sentences[0] == (
        "This audit is VACUOUS: the attack fails even on unprotected features, so its failure on any others proves nothing (A and D); "
        "no positive control was run, so a failed attack cannot be told from a good protection (B); "
        "the search broke off for most people, so a low number says nothing of the features (C)."
    )
    assert "the search broke off for 4 of 6 people" in page.text
    alone = page_of(tmp_path / "alone", [{**OPEN, "partial": 4}]).sentences[0]
    assert (
        alone
        == "This audit is VACUOUS: the search broke off for most people, so a low number says nothing of the features."
    )


def test_a_blind_embedder_makes_every_similarity_worthless(tmp_path):
    page = page_of(tmp_path, [OPEN, CRAFTED], references=(0.3, 0.15))
    assert page.sentences[:2] == [
        "This audit is VACUOUS: the network that compares faces hardly tells people apart, so no similarity on this page means anything.",
        "A low number means a blind judge here, not a safe feature.",
    ]
    assert len(page.sentences) == 3
    assert page.tables["Controls of the judges"][1][1] == "0.30 and 0.15 ✕ vacuous"
    assert page.tables["Positive control of each audit"][1][1] == "+0.55 at least +0.55 void"


def test_a_vacuous_protection_is_named_beside_sound_ones(tmp_path):
    sentences = page_of(
        tmp_path, [OPEN, {**CRAFTED, **FAILED}, {**CRAFTED, "defenses": [{"name": "disco"}]}]
    ).sentences
    assert sentences[0].startswith(
        "For Crafter this audit is VACUOUS: the attack fails even on unprotected features"
    )
    assert sentences[4].startswith("Disco lowers this to a similarity of 0.30")
    assert "Crafter" not in "".join(sentences[2:])


def test_missing_audits_and_kinds_are_said(tmp_path):
    page = page_of(tmp_path, [OPEN, CRAFTED], failed=["crafter, A1: no search came to its end"])
    assert page.text.count("crafter, A1: no search came to its end") == 2
    assert "No sound attack of these kinds was run on Crafter: white box and adaptive." in page.text
    assert "was run on unprotected" not in page.text


# The tables


def test_the_matrix_has_the_numbers_of_the_run_and_marks_the_strongest(tmp_path):
    latent = {"name": "latent", "tries": 1}
    audits = [
        {**OPEN, "case": "decoder"},
        {**OPEN, "case": "search", "attack": latent, "similarity": 0.5},
        {**CRAFTED, "case": "decoder", "blind": 0.07},
        {**CRAFTED, "case": "A1", "attack": ADAPTED, "similarity": 0.35, "blind": 0.07},
    ]
    page = page_of(tmp_path, audits)
    ends = [
        f"{s['similarity']['low']:.2f} to {s['similarity']['high']:.2f}"
        for s in scores_of(tmp_path)
    ]
    assert page.tables["Every attack on every protection"] == [
        ["attack", "unprotected", "Crafter"],
        ["decoder", f"0.60 ★ {ends[0]}", f"0.30 {ends[2]}"],
        ["search", f"0.50 {ends[1]}", "–"],
        ["A1", "–", f"0.35 ★ {ends[3]}"],
        ["blind draws pictures without any feature", "0.05", "0.07"],
        ["server’s MCC mean over attributes", "0.61 0.57 to 0.64", "0.53 0.49 to 0.56"],
        ["server’s AUC mean over attributes", "0.85 0.81 to 0.88", "0.80 0.76 to 0.83"],
    ]


def test_vacuous_squares_are_marked_and_a_sound_audit_is_shown_before_one(tmp_path):
    audits = [OPEN, {**OPEN, "similarity": 0.65, "control": 0.06}, {**CRAFTED, "control": 0.06}]
    page = page_of(tmp_path, audits)
    row = page.tables["Every attack on every protection"][1]
    assert row[1].startswith("0.60 ★")
    assert row[1].endswith("best of 2")
    assert row[2].endswith("vacuous")
    assert "★" not in row[2]
    assert [
        values.get("class")
        for tag, values in page.tags
        if tag == "td" and values.get("class") == "hollow"
    ] == ["hollow"]


def test_scores_are_those_of_the_run(tmp_path):
    run = make_run(
        tmp_path / "run",
        [OPEN, {**CRAFTED, "attack": {"name": "latent", "tries": 3, "adapt": 16}, "lda": None}],
    )
    out = build_feature_report([run], tmp_path / "report.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    assert document["runs"] == [json.loads((run / "run.json").read_text())]
    assert (document["kind"], document["redacted"]) == ("features", False)
    assert [plain(sentence) for sentence in document["answers"][0]["sentences"]] == page.sentences
    head, *rows = page.tables["Scores of each audit"]
    for row, audit in zip(rows, document["runs"][0]["audits"], strict=True):
        cells = dict(zip(head, row, strict=True))
        for column, name in [("SSIM", "ssim"), ("PSNR, dB", "psnr"), ("FSIM", "fsim")]:
            score, blind = audit["scores"][name], audit["prior_only"][name]
            assert (
                cells[column]
                == f"{score['value']:.2f} {score['low']:.2f} to {score['high']:.2f} blind {blind['value']:.2f}"
            )
        score, lift = audit["scores"]["similarity"], audit["controls"]["lift"]["similarity"]
        assert cells["similarity"] == (
            f"{score['value']:.2f} {score['low']:.2f} to {score['high']:.2f} blind 0.05 above {lift['value']:+.2f} ({lift['low']:+.2f} to {lift['high']:+.2f})"
        )
        judged = audit["scores"]["top1_2"]
        expected = [round(100 * judged[end], 1) for end in ("value", "low", "high")]
        assert [float(text) for text in re.findall(r"[\d.]+", cells["◆ judge 2 recognises"])] == [
            *expected,
            0.0,
        ]
        assert (cells["feature explained"], cells["EMD to blind draws"]) == (
            "0.40",
            "3.5 floor 2.25",
        )
        assert (cells["distance to real pictures"], cells["queries"], cells["time"]) == (
            "0.3 blind 0.3",
            "31 200",
            "75.5 s",
        )
    # 6 people with 2 pictures: (6 - 1) / (12 - 6).
    assert [dict(zip(head, row, strict=True))["people stay apart (LDA)"] for row in rows] == [
        "1.25 by chance 0.833",
        "–",
    ]
    assert [row[-1] for row in rows] == [
        "plain features of its own pictures",
        "the device’s network; protected features of its own pictures 3 tries of each picture",
    ]


def test_what_protections_measured_is_averaged_over_pictures(tmp_path):
    page = page_of(tmp_path, [OPEN, {**CRAFTED, "noted": NOTED, "moved": 0.31, "plain": 0.6}])
    assert page.tables["What each protection did"] == [
        ["protection", "features moved", "MCC of plain features", "MCC of released ones", "batches", "pictures", "distance before", "distance after", "steps"],
        ["unprotected 32×16×16 at stage1", "0 %", "0.61 0.57 to 0.64", "0.61 0.57 to 0.64", "–", "–", "–", "–", "–"],
        # Three pictures with 2.0 and one with 4.0, and so on.
        ["Crafter 32×16×16 at stage1", "31 %", "0.60 0.56 to 0.63", "0.53 0.49 to 0.56", "2", "4", "2.5", "0.75", "90"],
    ]  # fmt: skip
    assert "as its own critic sees it" in page.text


def test_notes_that_are_no_numbers_are_left_to_the_json(tmp_path):
    run = make_run(
        tmp_path / "run",
        [
            {
                **CRAFTED,
                "noted": (
                    {"taps": ["a"], "sure": True, "ratio": 0.5},
                    {"taps": [], "sure": False, "ratio": 1.0},
                ),
            }
        ],
    )
    assert group([read_feature_run(run)])[0].protections[0].measured == {"ratio": 0.75}


def test_controls_and_kinds_of_attack(tmp_path):
    audits = [
        OPEN,
        CRAFTED,
        {**CRAFTED, "attack": {"name": "latent", "tries": 1}, "control": 0.06},
        {**CRAFTED, "defenses": [{"name": "disco"}]},
    ]
    page = page_of(tmp_path, audits, judges=(0.97, 0.89))
    assert page.tables["Positive control of each audit"] == [
        ["attack", "unprotected", "Crafter", "Disco"],
        ["decoder", *["+0.55 at least +0.55 ✓ pass"] * 3],
        ["latent", "–", "+0.01 at least +0.01 ✕ vacuous", "–"],
    ]
    assert [row[1] for row in page.tables["Controls of the judges"]] == [
        "all audits",
        "0.70 and 0.02 ✓ pass",
        "97 % ✓ pass",
        "89 % ! attention",
    ]
    assert page.tables["Kinds of attack tried on each protection"] == [
        ["protection", "black box", "white box", "adaptive"],
        ["unprotected", "✓ tried", "! missing", "–"],
        ["Crafter", "✓ tried", "tried, vacuous", "! missing"],
        # Nothing happens to its features after the network has made them: whoever knows the network knows all.
        ["Disco", "✓ tried", "! missing", "–"],
    ]
    assert (
        "evaluator 2 is right on only 89% of held-out pictures: its verdicts are weak" in page.text
    )
    assert "4 of 4 audits carry warnings" in page.text


def test_most_exposed_people_are_named(tmp_path):
    page = page_of(tmp_path, [{**OPEN, "similarity": 0.5}])
    # Similarity grows with a person's place: ± 0.03 in steps of 0.012.
    assert (
        "unprotected : person 5 (0.53), person 4 (0.52), person 3 (0.51), person 2 (0.49), person 1 (0.48)"
        in page.text
    )
    assert "person 0 (" not in page.text


# Names


def test_cases_name_attacks_and_settings_tell_the_rest_apart(tmp_path):
    audits = [
        {
            **CRAFTED,
            "defenses": [{"name": "crafter", "beta": beta}],
            "attack": {"name": "decoder", "adapt": adapt},
            "label": f"{beta} {adapt}",
        }
        for beta in (1.0, 2.0)
        for adapt in (0, 64)
    ]
    study = group([read_feature_run(make_run(tmp_path / "a", audits))])[0]
    assert [protection.name for protection in study.protections] == [
        "Crafter (beta=1.0)",
        "Crafter (beta=2.0)",
    ]
    assert study.methods == ["decoder (adapt=0)", "decoder (adapt=64)"]
    cases = [
        {**audit, "case": case} for audit, case in zip(audits, ["blind", "seeing"] * 2, strict=True)
    ]
    assert group([read_feature_run(make_run(tmp_path / "b", cases))])[0].methods == [
        "blind",
        "seeing",
    ]
    # Here each protection has a case of its own, so the cases cannot be names of attacks.
    cases = [{**audits[0], "case": "weak"}, {**audits[2], "case": "strong"}]
    assert group([read_feature_run(make_run(tmp_path / "c", cases))])[0].methods == ["decoder"]


def test_protections_that_differ_in_nothing_known_are_told_apart_by_the_grid(tmp_path):
    audits = [
        {**OPEN, "released": epochs, "case": "decoder", "label": f"target.epochs={epochs}, decoder"}
        for epochs in (5, 9)
    ]
    names = [
        protection.name
        for protection in group([read_feature_run(make_run(tmp_path / "run", audits))])[
            0
        ].protections
    ]
    assert names == ["unprotected (label=target.epochs=5)", "unprotected (label=target.epochs=9)"]


def test_runs_on_the_same_pictures_share_a_table_and_shared_audits_appear_once(tmp_path):
    first = make_run(tmp_path / "a", [OPEN])
    second = make_run(tmp_path / "b", [OPEN, CRAFTED])
    other = make_run(tmp_path / "c", [OPEN], judges=(0.96, 0.95), name="apart")
    studies = group([read_feature_run(folder) for folder in (first, second, second, other)])
    assert [[p.name for p in study.protections] for study in studies] == [
        ["unprotected", "Crafter"],
        ["unprotected"],
    ]
    assert [len(study.attempts) for study in studies] == [2, 1]
    page = Page(build_feature_report([first, second, other, first], tmp_path / "report.html"))
    assert [tag for tag, _ in page.tags].count("h1") == 2


# Pictures


def test_pictures_are_the_runs_and_people_keep_their_columns(tmp_path):
    latent = {"name": "latent", "tries": 3}
    audits = [
        CRAFTED,
        {**CRAFTED, "attack": latent, "similarity": 0.35},
        OPEN,
        {**OPEN, "attack": latent},
    ]
    run = make_run(tmp_path / "run", audits, people=20)
    page = Page(build_feature_report([run], tmp_path / "report.html"))
    pixels = load_file(run / "pictures.safetensors")
    places = [round(step * 19 / 11) for step in range(12)]
    head, *rows = page.tables["True and rebuilt pictures"]
    assert head[1:] == [f"person {place}" for place in places]
    assert [row[0] for row in rows] == [
        "true picture stays on the device", "unprotected decoder similarity 0.60", "unprotected latent similarity 0.60", "Crafter latent similarity 0.35",
    ]  # fmt: skip
    # Each attack on plain features, the strongest on the others; always the first try of the first picture.
    shown = [pixels["victims"], pixels["audit.2"], pixels["audit.3"], pixels["audit.1"]]
    assert len(page.images) == 4 * 12
    for row, tensor in enumerate(shown):
        for column, place in enumerate(places):
            np.testing.assert_array_equal(
                page.images[12 * row + column], tensor[place, 0].permute(1, 2, 0).numpy()
            )
    lines = [line for line in csv.DictReader((run / "rows.csv").open()) if line["candidate"] == "0"]
    first = {line["identity"]: line for line in lines[3 * 20 :]}
    expected = [
        f"{float(first[name]['similarity']):.2f} "
        + ("● ◆" if first[name]["top1_1"] == "1" else "○ ◇")
        for name in head[1:]
    ]
    assert rows[2][1:] == expected
    assert (
        "12 of 20 people, chosen by their place in the list, evenly, and not by success"
        in page.text
    )
    assert "Pictures of 3 of 4 audits are here" in page.text
    assert "Shown is always the first try, not the best." in page.text


def test_a_large_run_still_fits_a_phone(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "PICTURE_BYTES", 60_000)
    page = page_of(tmp_path, [OPEN, CRAFTED], size=80)
    assert page.images[0].shape == (64, 64, 3)
    assert len(page.images) == 3
    assert "1 of 6 people, chosen by their place" in page.text


def test_grey_pictures(tmp_path):
    rng = torch.Generator().manual_seed(0)
    grey = torch.zeros(12, 1, 8, 8, dtype=torch.uint8)
    page = page_of(
        tmp_path, [OPEN], victims=grey, rebuilt=[torch.rand(6, 2, 1, 8, 8, generator=rng)]
    )
    assert {image.shape for image in page.images} == {(8, 8)}


# The plot

PLOTTED = [
    OPEN,
    *({**CRAFTED, "defenses": [{"name": "crafter", "beta": beta}], "similarity": found, "mcc": mcc} for beta, found, mcc in [(1.0, 0.2, 0.5), (9.0, 0.4, 0.58)]),
    {**CRAFTED, **FAILED, "defenses": [{"name": "disco"}], "mcc": 0.4},
]  # fmt: skip


def drawn(page: Page) -> dict[str, tuple[float, float]]:
    """Places of the points by the names that start their titles."""
    source = page.raw
    points = re.findall(
        r'<g class="point [^"]*" transform="translate\(([\d.]+) ([\d.]+)\)"><title>([^<]+)</title>',
        source,
    )
    return {plain(title).split(":")[0]: (float(x), float(y)) for x, y, title in points}


def test_points_stand_where_their_numbers_are(tmp_path):
    page = page_of(tmp_path, PLOTTED)
    places = drawn(page)
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
    # Both axes are straight: equal differences are equally long, upwards for more similarity and to the right for more utility.
    per_mcc = (open_[0] - hollow[0]) / (0.61 - 0.4)
    assert per_mcc > 0
    assert weak[0] - strong[0] == pytest.approx(0.08 * per_mcc, abs=0.15)
    per_similarity = (hollow[1] - open_[1]) / (0.6 - 0.06)
    assert per_similarity > 0
    assert strong[1] - weak[1] == pytest.approx(0.2 * per_similarity, abs=0.15)
    # Dashed lines: two photos of one person, and blind draws.
    dashed = [float(y) for y in re.findall(r'<line class="guess" [^>]*y1="([\d.]+)"', page.raw)]
    assert sorted(dashed) == pytest.approx(
        [open_[1] - 0.1 * per_similarity, hollow[1] + 0.01 * per_similarity], abs=0.15
    )
    assert re.search(r">same person<tspan[^>]*>0\.70<", page.raw)
    assert re.search(r">blind draws<tspan[^>]*>0\.05<", page.raw)


def test_strengths_are_joined_bars_are_intervals_and_vacuous_points_hollow(tmp_path):
    page = page_of(tmp_path, PLOTTED)
    places = drawn(page)
    (route,) = re.findall(r'<polyline class="route" points="([^"]+)"', page.raw)
    assert [tuple(map(float, pair.split(","))) for pair in route.split()] == [
        places["Crafter (beta=1.0)"],
        places["Crafter (beta=9.0)"],
    ]
    x, y = places["unprotected"]
    per_mcc = (x - places["Disco (vacuous)"][0]) / (0.61 - 0.4)
    level = [
        tuple(map(float, ends))
        for ends in re.findall(rf'<path class="reach" d="M([\d.]+) {y}H([\d.]+)"', page.raw)
    ]
    assert level == [pytest.approx((x - 0.04 * per_mcc, x + 0.03 * per_mcc), abs=0.15)]
    per_similarity = (places["Disco (vacuous)"][1] - y) / (0.6 - 0.06)
    low, high = interval(torch.linspace(0.57, 0.63, 6))
    upright = [
        tuple(map(float, ends))
        for ends in re.findall(rf'<path class="reach" d="M{x} ([\d.]+)V([\d.]+)"', page.raw)
    ]
    assert upright == [
        pytest.approx(
            (y + (0.6 - low) * per_similarity, y - (high - 0.6) * per_similarity), abs=0.15
        )
    ]
    assert page.raw.count(" hollow") - page.raw.split("</style>")[0].count(" hollow") == 1
    names = re.findall(r'<text class="name"[^>]*>([^<]+)<', page.raw)
    assert names == ["unprotected", "Crafter", "Disco"]


def test_one_protection_needs_no_plot(tmp_path):
    assert (
        "polyline"
        not in page_of(tmp_path, [OPEN, {**OPEN, "attack": ADAPTED}]).raw.split("</style>")[1]
    )
    assert drawn(page_of(tmp_path / "again", [OPEN])) == {}


# The page


def test_page_needs_nothing_from_outside_and_no_script(tmp_path):
    run = make_run(
        tmp_path / "run", [OPEN, CRAFTED], names=["https://example.org/x.png", *map(str, range(5))]
    )
    out = build_feature_report([run], tmp_path / "report.html")
    page, text = Page(out), out.read_text()
    assert not {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "a",
        "base",
        "form",
    }
    assert not [
        name
        for _, values in page.tags
        for name in values
        if name.startswith("on") or name in ("href", "srcset", "action")
    ]
    assert all(values["src"].startswith("data:") for _, values in page.tags if "src" in values)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert str(tmp_path) not in text + out.with_suffix(".json").read_text()


def test_hostile_names_are_text(tmp_path):
    evil = "<script>alert('x')</script>\" onerror=\"alert(1)"
    names = [evil, *(f"{{{{ {place} }}}}" for place in range(5))]
    case = "<img src=x onerror=alert(1)>"
    page = page_of(
        tmp_path,
        [{**OPEN, "case": case}, {**CRAFTED, "case": case}],
        names=names,
        name="</pre><script>'; rm -rf $HOME",
    )
    assert not [tag for tag, values in page.tags if tag == "script" or "onerror" in values]
    assert evil in page.tables["True and rebuilt pictures"][0]
    assert page.tables["Every attack on every protection"][1][0] == case
    assert "{{ 0 }}" in page.text
    assert "frostglass run pre-script-rm--rf-HOME.toml --threads" in page.text


def test_same_runs_same_bytes_and_settings_can_be_run_again(tmp_path):
    settings = {
        "name": "trial",
        "target": {"cut": "stage1", "attributes": ["all"]},
        "grid": {"defenses": [[], CRAFTER]},
    }
    run = make_run(tmp_path / "run", [OPEN, CRAFTED], settings=settings)
    first, second = (
        build_report([run], tmp_path / "a" / "x.html"),
        build_feature_report([run], tmp_path / "b" / "x.html"),
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
    text = re.search(r"Settings of trial</summary><pre>(.*?)</pre>", first.read_text(), re.S)
    assert text is not None
    assert tomllib.loads(text.group(1).replace("&#34;", '"')) == settings


def test_redacted_report_keeps_no_face_and_no_name(tmp_path):
    names = [
        "Anna Schmidt",
        "Bo",
        "007",
        "crafter",
        "encode",
        *(f"Zoe_{place}" for place in range(24)),
    ]
    settings = {
        "name": "trial",
        "data": {"name": "folder", "root": "/data/Anna Schmidt/pictures", "per": {"007": 1}},
    }
    case = "as Anna Schmidt would"
    run = make_run(
        tmp_path / "run", [{**OPEN, "case": case}, {**CRAFTED, "case": case}], people=29, names=names, settings=settings, name="for Zoe_2",
        failed=["disco: Zoe_3 broke it"],
    )  # fmt: skip
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, text, document = Page(out), out.read_text(), out.with_suffix(".json").read_text()
    for name in names:
        if name not in ("Bo", "007", "crafter", "encode"):
            assert name.lower() not in (text + document).lower(), name
    assert not re.search(r"\b(Bo|007)\b", page.text + document)
    assert page.tables["True and rebuilt pictures"][0][1:3] == ["person A", "person D"]
    assert page.tables["Every attack on every protection"][1][0] == "as person A would"
    loaded = json.loads(document)
    assert loaded["redacted"] is True
    assert "Redacted." in page.text
    assert loaded["runs"][0]["identities"][26:28] == ["person AA", "person AB"]
    assert loaded["runs"][0]["settings"]["data"] == {
        "name": "folder",
        "root": "/data/person A/pictures",
        "per": {"person C": 1},
    }
    assert "disco: person I broke it" in page.text
    # Methods and what an attacker is granted keep their names even if a person is called like one.
    assert page.sentences[2].startswith("Crafter lowers this to")
    assert loaded["runs"][0]["audits"][0]["granted"] == ["encode"]
    assert {image.shape for image in page.images} == {(3, 3, 3)}
    whole = build_report([run], tmp_path / "whole.html").read_text()
    pictures = set(re.findall(r"base64,[^\"]+", whole))
    assert len(pictures) == 3 * 12
    assert not [picture for picture in pictures if picture in text]


# Bad input


def broken_run(folder: Path, what: str) -> Path:
    run = make_run(folder, [OPEN, CRAFTED])
    path, document = run / "run.json", json.loads((run / "run.json").read_text())
    pictures = load_file(run / "pictures.safetensors")
    rows, audit = (run / "rows.csv").read_text(), document["audits"][1]
    match what:
        case "no run.json" | "no rows.csv" | "no pictures.safetensors":
            (run / what.removeprefix("no ")).unlink()
            return run
        case "not json":
            path.write_text("{")
            return run
        case "short rows":
            (run / "rows.csv").write_text("".join(rows.splitlines(keepends=True)[:-1]))
        case "more rows":
            (run / "rows.csv").write_text(rows + "crafter,person 0,0\n")
        case "other rows":
            (run / "rows.csv").write_text(rows.replace("person 3", "person 300"))
        case "rows without numbers":
            (run / "rows.csv").write_text(rows.replace(",0.3,", ",often,"))
        case "missing picture":
            del pictures["audit.1"]
        case "float pictures":
            pictures["victims"] = pictures["victims"].float()
        case "fewer people":
            pictures["victims"] = pictures["victims"][1:].contiguous()
        case "odd tries":
            pictures["audit.1"] = pictures["audit.1"][:, :1].contiguous()
        case "format":
            document["format"] = 99
        case "nan":
            audit["scores"]["similarity"]["value"] = float("nan")
        case "other score":
            audit["scores"]["similarity"]["value"] += 0.001
        case "other ssim":
            audit["scores"]["ssim"]["value"] += 0.001
        case "no judge":
            del audit["scores"]["top1_2"]
        case "no blind draws":
            del audit["prior_only"]["similarity"]
        case "no controls":
            audit["controls"]["control_lift"] = {}
        case "no utility":
            del audit["utility"]["mean_mcc_low"]
        case "no key":
            del audit["keys"]["released"]
        case "no audits":
            document["audits"] = []
    path.write_text(json.dumps(document))
    save_file(pictures, run / "pictures.safetensors")
    return run


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("no run.json", StoreError, r"has no run\.json, so it is not a finished run"),
        ("no rows.csv", StoreError, r"has no rows\.csv"),
        ("no pictures.safetensors", StoreError, r"has no pictures\.safetensors"),
        ("not json", StoreError, r"run\.json is not JSON"),
        ("format", StoreError, r"has format 99, expected 1: run again"),
        (
            "short rows",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'crafter'\): run again",
        ),
        ("more rows", DataError, r"has 25 rows where its run\.json explains 24"),
        (
            "other rows",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'undefended'\)",
        ),
        (
            "rows without numbers",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'undefended'\)",
        ),
        ("missing picture", DataError, r"has no audit\.1, which run\.json describes"),
        (
            "float pictures",
            DataError,
            r"victims is torch\.float32 \(6, 2, 3, 8, 8\), expected grey or colour pictures as bytes",
        ),
        (
            "fewer people",
            DataError,
            r"has victims' pictures \(5, 2\) for 6 people with 2 each: run again",
        ),
        (
            "odd tries",
            DataError,
            r"audit 'crafter' rebuilt 1 pictures of each of 6 people, expected a multiple of 2 of 6: run again",
        ),
        (
            "nan",
            DataError,
            r"is damaged \(audits\.1\.scores\.similarity\.value: expected a finite number",
        ),
        (
            "other score",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'crafter'\)",
        ),
        (
            "other ssim",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'crafter'\)",
        ),
        ("no judge", DataError, r"has no top1_2 for audit 'crafter'"),
        ("no blind draws", DataError, r"has no similarity for audit 'crafter'"),
        (
            "no controls",
            DataError,
            r"has no controls for audit 'crafter', so it cannot be believed: run again",
        ),
        (
            "no utility",
            DataError,
            r"is damaged \(audits\.1\.utility\.mean_mcc_low: required, and not given\): run again",
        ),
        ("no key", DataError, r"does not say what audit 'crafter' attacked"),
        ("no audits", DataError, r"is damaged \(audits: "),
    ],
)
def test_damaged_runs_are_refused_in_one_line(tmp_path, what, kind, message):
    run = broken_run(tmp_path / "run", what)
    with pytest.raises(FrostglassError, match=message) as caught:
        build_report([run], tmp_path / "report.html")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "report.json").exists()


def test_features_and_models_are_not_put_on_one_page(tmp_path):
    run, other = make_run(tmp_path / "run", [OPEN]), tmp_path / "other"
    other.mkdir()
    for file in run.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    document = json.loads((run / "run.json").read_text())
    del document["kind"]
    (other / "run.json").write_text(json.dumps(document))
    with pytest.raises(
        DataError,
        match=r"run is about the features of a split model and .*other about a whole one.*: make two reports",
    ):
        build_report([other, run], tmp_path / "report.html")
    with pytest.raises(
        DataError,
        match=r"other.run\.json is not about the features of a split model: make its report with `frostglass report`",
    ):
        build_feature_report([other], tmp_path / "report.html")
    with pytest.raises(DataError, match="at least one run folder"):
        build_feature_report([], tmp_path / "report.html")
    with pytest.raises(StoreError, match="would overwrite a run's own files"):
        build_feature_report([run], run / "run.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.126, "decimal", "0.13"),
        (-0.126, "decimal", "−0.13"),
        (-0.004, "decimal", "0.00"),
        (None, "decimal", "–"),
        (0.55, "change", "+0.55"),
        (-0.2, "change", "−0.20"),
        (0.004, "change", "0.00"),
    ],
)
def test_similarities_as_text(value, kind, text):
    assert number(value, kind) == text
