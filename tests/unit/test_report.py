import csv
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.audit.config import Experiment, read_config
from frostglass.audit.controls import judge
from frostglass.audit.grid import Run, write_run
from frostglass.audit.pipeline import Audit
from frostglass.core.errors import DataError, FrostglassError, StoreError
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.metrics.base import Rows
from frostglass.report import build
from frostglass.report.arrange import Study, group
from frostglass.report.build import build_report
from frostglass.report.charts import Mark, number, toml, track
from frostglass.report.matrix import attack_notes, matrix
from frostglass.report.plot import MARKS
from frostglass.report.recipes import (
    fact_words,
    training_caption,
    training_notes,
    training_rows,
    words,
)
from frostglass.report.runs import read_run
from frostglass.report.tradeoff import tradeoff
from pages import Page, plain

CALOR = [{"name": "calor", "rank": 3}]
SMOOTHING = [{"name": "label_smoothing"}]
BROKEN = {"hits": (20, 19), "guesses": 1}
DEFENDED = {"defenses": CALOR, "hits": (8, 7), "guesses": 1, "accuracy": 0.967}
FAILED = {"control": (1, 1), "hits": (1, 1)}


def some_rows(people: int, candidates: int, hits: Sequence[int], success: float) -> Rows:
    """Rows in which judge N recognises the first `hits[N - 1]` pictures, counted over all people."""

    def first(count: int) -> torch.Tensor:
        return (torch.arange(people * candidates) < count).float().reshape(people, candidates)

    columns = {
        "target_top1": first(round(success * people * candidates)),
        "target_confidence": torch.full((people, candidates), 0.5),
    }
    for place, count in enumerate(hits, 1):
        columns |= {
            f"top1_{place}": first(count),
            f"top5_{place}": first(min(count + 1, people * candidates)),
        }
    far = torch.linspace(0.2, 0.3, people * candidates).reshape(people, candidates)
    return Rows(
        labels=torch.arange(people),
        columns=columns | {"distance": far, "distance_squared": far**2, "manifold": far},
    )


def make_run(
    folder: Path,
    audits: Sequence[dict[str, Any]],
    *,
    people: int = 20,
    candidates: int = 1,
    names: Sequence[str] = (),
    size: int = 8,
    judges: Sequence[float] = (0.97, 0.95),
    settings: dict[str, Any] | None = None,
    name: str = "trial",
    private: torch.Tensor | None = None,
) -> Path:
    """A run folder, written by the code that writes real ones, of audits that went as told.

    Each audit may tell `defenses`, `hits` (pictures each judge recognises), `accuracy`, `loss`, `success`, `guesses`, `control` (pictures
    each judge recognises in the positive control, or None for no control), `model`, `seed`, `far` (manifold ratio), `pictures`, `recipe`
    (settings of the training), `seconds` (of the training; the undefended one takes 60), `info` (what else is known of the target), `case`,
    `attack` (instead of GMI), `steps` (of each search) and `partial` (places of people whose search broke off).
    """
    names, total = (
        tuple(names) or tuple(f"person {place}" for place in range(people)),
        people * candidates,
    )
    random = torch.Generator().manual_seed(1)
    if private is None:
        private = torch.randint(
            0, 256, (people, 3, size, size), generator=random, dtype=torch.uint8
        )
    pictures = Images(private, torch.arange(people), names, tuple(names))
    split = Split(
        pictures,
        pictures,
        pictures,
        pictures,
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
            "seconds": 60.0,
        }
        return Target(nn.Identity(), names, (3, size, size), "head", info=info | more, key=key)

    evaluators = tuple(
        network("resnet", accuracy, f"judge{place}:{accuracy}")
        for place, accuracy in enumerate(judges)
    )
    made = []
    for place, told in enumerate(audits):
        rows = some_rows(
            people,
            candidates,
            told.get("hits", (total,) * len(judges))[: len(judges)],
            told.get("success", 1.0),
        )
        blind = some_rows(people, candidates, [told.get("guesses", 0)] * len(judges), 0.0)
        control = told.get("control", (total,) * len(judges))
        against = (
            None
            if control is None
            else (some_rows(people, candidates, control[: len(judges)], 1.0), blind)
        )
        rows = replace(
            rows,
            columns={**rows.columns, "manifold": rows.columns["manifold"] * told.get("far", 1.0)},
            key=f"{name}{place}",
        )
        shown = told.get(
            "pictures", torch.rand((people, candidates, 3, size, size), generator=random)
        )
        found = Reconstructions(
            shown, torch.arange(people), torch.zeros(people), torch.zeros(people), 31_200, 75.5, f"attack{place}",
            steps=torch.tensor(told["steps"]) if "steps" in told else None,
            partial=torch.tensor([person in told["partial"] for person in range(people)]) if "partial" in told else None,
        )  # fmt: skip
        model = told.get("model", "cnn")
        recipe = {"model": model, **told.get("recipe", {})}
        chosen = {
            "name": name,
            "case": told.get("case", ""),
            "seed": told.get("seed", 0),
            "defenses": told.get("defenses", []),
        }
        attack = told.get("attack", {"name": "gmi", "loss": told.get("loss", "margin"), "keep": 1})
        experiment = Experiment.parse(chosen | {"target": recipe, "attack": attack})
        learned = {"trainable": 12345, "seconds": told.get("seconds", 60.0), **told.get("info", {})}
        target = network(model, told.get("accuracy", 0.982), f"target{place}", **learned)
        undefended = None if control is None else network(model, 0.982, "undefended")
        prior: Any = SimpleNamespace(
            info={"method": {"name": told.get("prior", "wgan")}}, key="prior"
        )
        broken_off = len(told.get("partial", ()))
        controls = judge(
            rows,
            blind,
            against,
            margin=0.2,
            target=target,
            evaluators=evaluators,
            partial=broken_off,
        )
        made.append(
            Audit(
                experiment,
                split,
                target,
                evaluators,
                prior,
                found,
                rows,
                blind,
                controls,
                undefended,
            )
        )
    labels = tuple(
        " + ".join(d["name"] for d in told.get("defenses", [])) or "undefended" for told in audits
    )
    return write_run(
        Run(name, settings if settings is not None else {"name": name}, labels, tuple(made)), folder
    )


def sentences(tmp_path: Path, audits: Sequence[dict[str, Any]], **how: Any) -> list[str]:
    return Page(
        build_report([make_run(tmp_path / "run", audits, **how)], tmp_path / "report.html")
    ).sentences


# The answer


def test_answer_says_what_leaks_and_what_the_defense_changes(tmp_path):
    leak, change = sentences(tmp_path, [BROKEN, DEFENDED])
    assert leak == (
        "From the undefended model, an attacker who has its weights and public pictures of other people rebuilt 19 of 20 people so well "
        "that the stricter of two independent judges recognised them (95 %, interval 85–100 %; guessing with the same prior: 5 %)."
    )
    assert change == (
        "CALoR lowers this to 35 % (interval 15–55.1 %) and costs 1.5 points of accuracy on held-out pictures (98.2 → 96.7 %)."
    )


def test_answer_without_a_defended_model_claims_nothing_about_defenses(tmp_path):
    _, change = sentences(tmp_path, [BROKEN])
    assert (
        change
        == "No defended model is part of this report, so it does not say what a defense would change."
    )


def test_a_defense_whose_interval_overlaps_does_not_help(tmp_path):
    _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (19, 17), "accuracy": 0.982}])
    assert change.startswith("CALoR does not clearly lower it: 85 % (interval ")
    assert change.endswith(
        "beyond chance on the same people; it costs no accuracy on held-out pictures (98.2 → 98.2 %)."
    )


def test_a_defense_helps_only_if_every_judge_says_so(tmp_path):
    _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (19, 4)}])
    assert change.startswith("CALoR does not clearly lower it: 20 % (interval ")
    assert (
        "; 95 % by the other judge), where the judges do not all see a difference beyond chance on the same people; it costs 1.5 points"
        in change
    )


def test_a_defense_may_do_harm(tmp_path):
    _, change = sentences(
        tmp_path, [{"hits": (10, 9)}, {**DEFENDED, "hits": (20, 20), "accuracy": 0.99}]
    )
    assert re.match(
        r"CALoR does not lower it but raises it to 100 % \(interval 83\.2–100 %\) and gains 0\.8 points of accuracy",
        change,
    )


def test_a_stalled_attack_is_not_called_privacy(tmp_path):
    _, change = sentences(tmp_path, [BROKEN, {**DEFENDED, "hits": (0, 0), "success": 0.1}])
    assert change.startswith("CALoR lowers this to 0 %")
    assert change.endswith(
        "(the model itself accepts 10 % of the pictures), which may be masked gradients and not privacy."
    )


def test_up_to_three_defended_models_are_listed(tmp_path):
    two = {**DEFENDED, "defenses": [{"name": "calor", "rank": 5}], "hits": (19, 19)}
    _, change = sentences(tmp_path, [BROKEN, DEFENDED, two, {**DEFENDED, "defenses": SMOOTHING}])
    first, second, third = change.split("; CALoR (rank=5)")[0], change, change.rsplit("; ", 1)[1]
    assert first.startswith("CALoR (rank=3) lowers this to 35 %")
    assert "; CALoR (rank=5) does not clearly lower it: 95 %" in second
    assert third.startswith("LS lowers this to 35 %")


def test_more_defended_models_are_a_range_and_failures_are_named(tmp_path):
    ranks = [
        {
            **DEFENDED,
            "defenses": [{"name": "calor", "rank": rank}],
            "hits": (hits, hits),
            "accuracy": accuracy,
        }
        for rank, hits, accuracy in [(2, 3, 0.9), (3, 4, 0.95), (4, 5, 0.97), (5, 19, 0.982)]
    ]
    _, change = sentences(tmp_path, [BROKEN, *ranks])
    assert change == (
        "With the 4 defended models it is between 15 % and 95 %, and they cost between 0 and 8.2 points of accuracy on held-out pictures; "
        "CALoR (rank=5) does not clearly lower it."
    )


def test_the_strongest_attack_on_each_model_counts(tmp_path):
    audits = [
        {**BROKEN, "loss": "ce", "hits": (10, 10)},
        BROKEN,
        {**DEFENDED, "loss": "ce"},
        {**DEFENDED, "hits": (2, 2)},
    ]
    run = make_run(tmp_path / "run", audits)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "rebuilt 19 of 20 people" in page.sentences[0]
    assert page.sentences[1].startswith("CALoR lowers this to 35 %")
    assert "the strongest counts: undefended (loss=margin), CALoR (loss=ce)." in page.text.replace(
        " ,", ","
    ).replace(" .", ".")


def test_several_candidates_are_counted_as_pictures(tmp_path):
    leak, _ = sentences(tmp_path, [{"hits": (58, 57)}], candidates=3)
    assert (
        "rebuilt 20 people, and the stricter of two independent judges recognised the right person in 95 % of 60 pictures (interval"
        in leak
    )


def test_one_judge_is_no_two(tmp_path):
    leak, _ = sentences(tmp_path, [{"hits": (19,)}], judges=[0.97])
    assert "rebuilt 19 of 20 people so well that an independent judge recognised them (95 %" in leak


def test_defended_alone_leans_on_the_positive_control(tmp_path):
    leak, rest = sentences(tmp_path, [DEFENDED])
    assert leak.startswith("From the model defended with CALoR, an attacker who has its weights")
    assert rest == (
        "The same attack on an undefended model scores 95 points above guessing (at least 85), so it works there; "
        "that model is not part of this report, so the price of defending in accuracy cannot be told."
    )


def test_a_model_brought_as_weights_is_not_called_undefended(tmp_path):
    run = make_run(tmp_path / "run", [{**BROKEN, "recipe": {"weights": "w.safetensors"}}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences[0].startswith("From the given model, an attacker")
    assert (
        page.sentences[1]
        == "The same attack on an undefended model scores 95 points above guessing (at least 85), so it works there."
    )


def test_a_vacuous_audit_says_so_first_and_nothing_reassuring(tmp_path):
    run = make_run(tmp_path / "run", [FAILED, {**FAILED, "defenses": CALOR}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.sentences == [
        "This audit is VACUOUS: the attack fails even on a model without any defense, so its failure on any other model proves nothing.",
        "A low number means a weak attack here, not a safe model.",
    ]
    assert any(
        tag == "div" and values.get("class") == "void" and values.get("role") == "alert"
        for tag, values in page.tags
    )
    assert json.loads((run / "run.json").read_text())["vacuous"][0].split(": ", 1)[1] in page.text
    assert "✓" not in page.text
    assert "lowers" not in page.text
    assert "Further left is more private" not in page.text


def test_no_control_is_vacuous_and_a_leak_stays_a_leak(tmp_path):
    first, _, third = sentences(tmp_path, [{**BROKEN, "control": None}])
    assert first.startswith("This audit is VACUOUS: no positive control was run")
    assert third.startswith(
        "A high number is a leak all the same: 95 % (interval 85–100 %) for undefended"
    )


def test_a_vacuous_model_is_named_beside_sound_ones(tmp_path):
    first, second, leak, change = sentences(
        tmp_path, [BROKEN, {**DEFENDED, **FAILED}, {**DEFENDED, "defenses": SMOOTHING}]
    )
    assert first.startswith("For CALoR this audit is VACUOUS: the attack fails")
    assert second == "A low number means a weak attack here, not a safe model."
    assert leak.startswith("From the undefended model")
    assert change.startswith("LS lowers this to 35 %")
    assert "CALoR" not in leak + change


def test_each_defense_is_compared_with_its_own_architecture(tmp_path):
    audits = [
        BROKEN,
        {"model": "lenet", "hits": (9, 9), "accuracy": 0.9},
        {**DEFENDED, "model": "lenet", "hits": (8, 8), "accuracy": 0.89},
    ]
    leak, change = sentences(tmp_path, audits)
    assert leak.startswith("From the undefended model (model=cnn)")
    assert change.startswith("CALoR does not clearly lower it: 40 %")
    assert change.endswith("it costs 1 point of accuracy on held-out pictures (90 → 89 %).")


# The page


def test_numbers_on_the_page_are_those_of_the_json(tmp_path):
    out = build_report([make_run(tmp_path / "run", [BROKEN, DEFENDED])], tmp_path / "report.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    assert document["runs"] == [json.loads((tmp_path / "run" / "run.json").read_text())]
    assert [plain(sentence) for sentence in document["answers"][0]["sentences"]] == page.sentences

    def percent(value: float) -> float:
        return round(100 * value, 1)

    head, *rows = page.tables["Scores of each audit"]
    assert len(rows) == 2
    for row, audit in zip(rows, document["runs"][0]["audits"], strict=True):
        cells = dict(zip(head, row, strict=True))
        assert (
            cells["model is right on held-out pictures"]
            == f"{percent(audit['target']['accuracy']['test'])} %"
        )
        for column, name in [
            ("◆ judge 2 recognises", "top1_2"),
            ("judge 1, five best guesses", "top5_1"),
            ("model itself accepts", "target_top1"),
        ]:
            score, guess = audit["scores"][name], audit["prior_only"][name]
            expected = [
                percent(x) for x in (score["value"], score["low"], score["high"], guess["value"])
            ]
            assert [float(x) for x in re.findall(r"[\d.]+", cells[column])] == expected
        assert cells["distance to the person"].startswith(
            f"{audit['scores']['distance']['value']:.3g} "
        )
        assert (cells["queries"], cells["time"]) == ("31 200", "75.5 s")
    counted = page.tables["Conventions of the papers"]
    assert counted[0][:4] == ["audit", "judge", "mean", "selected"]
    assert counted[4][:3] == ["CALoR", "2", "35 %"]


def test_pictures_are_the_runs_and_people_keep_their_columns(tmp_path):
    run = make_run(tmp_path / "run", [DEFENDED, BROKEN], people=20, candidates=1)
    page = Page(build_report([run], tmp_path / "report.html"))
    pixels = load_file(run / "pictures.safetensors")
    shown = [round(step * 19 / 15) for step in range(16)]
    head, private, undefended, defended = page.tables["Private and rebuilt pictures"][:4]
    assert head[1:] == [f"person {place}" for place in shown]
    assert (private[0][:7], undefended[0], defended[0]) == (
        "private",
        "undefended 95 % recognised",
        "CALoR 35 % recognised",
    )
    # Undefended first, whatever the order in the run: it is audit 1 there.
    for row, (tensor, places) in enumerate(
        [
            (pixels["private"], shown),
            (pixels["audit.1"][:, 0], shown),
            (pixels["audit.0"][:, 0], shown),
        ]
    ):
        for column, place in enumerate(places):
            np.testing.assert_array_equal(
                page.images[16 * row + column], tensor[place].permute(1, 2, 0).numpy()
            )
    assert (
        "16 of 20 people, chosen by their place in the list, evenly, and not by success."
        in page.text
    )
    assert len(page.images) == 3 * 20
    verdicts = {
        line["identity"]: (line["top1_1"], line["top1_2"])
        for line in csv.DictReader((run / "rows.csv").open())
        if line["audit"] == "calor"
    }
    assert [cell.split() for cell in defended[1:]] == [
        ["●" if verdicts[name][0] == "1" else "○", "◆" if verdicts[name][1] == "1" else "◇"]
        for name in head[1:]
    ]


def test_a_large_run_still_fits_a_phone(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PICTURE_BYTES", 30_000)
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], people=20, size=80)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.images[0].shape == (64, 64, 3)
    assert len(page.images) == 3
    assert "19 people are left out to keep this page small" in page.text


def test_grey_pictures(tmp_path):
    run = make_run(
        tmp_path / "run",
        [{"pictures": torch.rand(20, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))}],
        private=torch.zeros(20, 1, 8, 8, dtype=torch.uint8),
    )
    assert {
        image.shape for image in Page(build_report([run], tmp_path / "report.html")).images
    } == {(8, 8)}


def test_page_needs_nothing_from_outside_and_no_script(tmp_path):
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        names=["https://example.org/x.png", *map(str, range(19))],
    )
    out = build_report([run], tmp_path / "report.html")
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
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        names=[evil, *(f"{{{{ {place} }}}}" for place in range(19))],
        name="</pre><script>'; rm -rf $HOME",
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert not [tag for tag, values in page.tags if tag == "script" or "onerror" in values]
    assert evil in page.tables["Private and rebuilt pictures"][0]
    assert "{{ 0 }}" in page.text
    assert "frostglass run pre-script-rm--rf-HOME.toml --threads 1" in page.text


def test_same_runs_same_bytes(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    first, second = (
        build_report([run], tmp_path / "a" / "x.html"),
        build_report([run], tmp_path / "b" / "x.html"),
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
    assert sorted(path.name for path in first.parent.iterdir()) == ["x.html", "x.json"]


def test_kinds_of_attack_that_were_not_run_are_named(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED, {**DEFENDED, "loss": "poincare", **FAILED}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.tables["Kinds of attack tried on each model"] == [
        ["model", "CE", "margin or logit", "Poincaré", "label-only", "adaptive"],
        ["undefended", "! missing", "✓ tried", "! missing", "! missing", "–"],
        ["CALoR", "! missing", "✓ tried", "tried, vacuous", "! missing", "! missing"],
    ]
    assert (
        "Missing or vacuous for CALoR: CE, Poincaré, label-only and adaptive. Masked gradients are not ruled out there."
        in page.text.replace(" .", ".")
    )
    assert "These audits are vacuous and prove nothing: CALoR · loss=poincare" in page.text


@pytest.mark.parametrize(
    ("control", "told", "how", "warning"),
    [
        ("Only one accepts", {"hits": (20, 15)}, {}, None),
        ("Only one accepts", {"hits": (20, 14)}, {}, "the evaluators disagree on 30%"),
        ("Still a real picture?", {"far": 1.49}, {}, None),
        ("Still a real picture?", {"far": 1.51}, {}, "times as far from real pictures"),
        ("Target success", {"success": 0.5}, {}, None),
        ("Target success", {"success": 0.45}, {}, "the target itself says y for only 45%"),
        # Exactly at the limit, which single precision would overshoot.
        ("Prior-only", {"guesses": 4}, {}, None),
        ("Prior-only", {"guesses": 5}, {}, "prior-only draws already score 25%"),
        ("Judge 2 itself", {}, {"judges": (0.97, 0.9)}, None),
        ("Judge 2 itself", {}, {"judges": (0.97, 0.89)}, "evaluator 2 is right on only 89%"),
        ("Judges agree", {}, {"judges": (0.97,)}, "only one evaluator"),
    ],
)
def test_attention_is_asked_exactly_where_the_controls_warn(tmp_path, control, told, how, warning):
    run = make_run(tmp_path / "run", [told], **how)
    page = Page(build_report([run], tmp_path / "report.html"))
    verdict = next(
        row[1] for row in page.tables["Controls of each audit"] if row[0].startswith(control)
    )
    warnings = json.loads((run / "run.json").read_text())["audits"][0]["controls"]["warnings"]
    assert all(text in page.text for text in warnings)
    if warning is None:
        assert verdict.endswith("✓ pass")
        assert warnings == []
    else:
        assert verdict.endswith("! attention")
        assert [text for text in warnings if warning in text] == warnings


def test_most_exposed_people_are_named(tmp_path):
    page = Page(
        build_report(
            [make_run(tmp_path / "run", [{"hits": (2, 1), "control": (20, 20)}])],
            tmp_path / "report.html",
        )
    )
    assert "undefended : person 0 (100 %), person 1 (50 %)" in page.text
    assert "person 2 (" not in page.text


def test_equal_labels_are_told_apart(tmp_path):
    run = make_run(
        tmp_path / "run",
        [
            BROKEN,
            DEFENDED,
            {**DEFENDED, "defenses": [{"name": "calor", "rank": 5}], "hits": (3, 3)},
        ],
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert [row[0] for row in page.tables["Scores of each audit"][1:]] == [
        "undefended",
        "CALoR rank=3",
        "CALoR rank=5",
    ]
    assert [row[2].split(" %")[0] for row in page.tables["Scores of each audit"][1:]] == [
        "100",
        "40",
        "15",
    ]


# Training

BIDO = [{"name": "bido"}]
STAGE = {
    "data": "public",
    "epochs": 12,
    "classes": 200,
    "accuracy": {"train": 1.0, "validation": 0.95, "test": 0.934},
}
TRANSFER = {
    **DEFENDED, "defenses": [{"name": "transfer"}], "seconds": 90.0,
    "info": {
        "trainable": 345, "first_stage": STAGE, "stage_seconds": 240.0,
        "facts": {"transfer": {"last_frozen_layer": "features.6", "trainable": 345, "frozen": 12000}},
    },
}  # fmt: skip


def study(folder: Path, audits: Sequence[dict[str, Any]], **how: Any) -> Study:
    (found,) = group([read_run(make_run(folder / "run", audits, **how))])
    return found


def bido(**settings: Any) -> dict[str, Any]:
    return {**DEFENDED, "defenses": [{"name": "bido", **settings}]}


def test_models_of_one_recipe_are_said_to_be_alike(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, "seed": 1}])
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    assert "not trained alike" not in page.text
    assert "first training" not in page.text
    assert (
        "All models were trained by one recipe: model cnn, epochs 20, batch 64, optimizer adamw, lr 0.001, weight decay 0.0001, "
        "schedule cosine, flip yes, keep best." in page.text
    )
    assert json.loads(out.with_suffix(".json").read_text())["answers"][0]["notes"] == []
    assert "own recipe" not in page.tables["Training of each model"][0]


def test_models_of_different_recipes_are_named_with_what_differs(tmp_path):
    run = make_run(
        tmp_path / "run",
        [{**BROKEN, "recipe": {"lr": 0.01}}, bido(), {**DEFENDED, "recipe": {"lr": 0.01}}],
    )
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    said = "The models were not trained alike: lr is 0.01 for undefended and CALoR and 0.001 for BiDO; part of a difference may come from that."
    assert said in page.text
    assert json.loads(out.with_suffix(".json").read_text())["answers"][0]["notes"] == [said]
    place = [tag for tag, _ in page.tags].index("ol")
    assert "li" in [tag for tag, _ in page.tags[place:]]
    assert "trained by one recipe" not in page.text
    assert (
        "In common: model cnn, epochs 20, batch 64, optimizer adamw, weight decay 0.0001"
        in page.text
    )
    head, *rows = page.tables["Training of each model"]
    assert head[-1] == "own recipe"
    assert [row[-1] for row in rows] == ["lr 0.01", "lr 0.001", "lr 0.01"]


def test_settings_that_separate_the_same_models_are_said_together(tmp_path):
    slow = {"optimizer": "sgd", "epochs": 40, "start": "begin.safetensors", "shift": 2}
    found = study(
        tmp_path, [{**BROKEN, "recipe": {"shift": 2}}, {**bido(), "recipe": slow}, DEFENDED]
    )
    assert training_notes(found) == [
        "The models were not trained alike: "
        "start none, epochs 20 and optimizer adamw for undefended and CALoR, but start begin.safetensors, epochs 40 and optimizer sgd for BiDO; "
        "shift is 2 for undefended and BiDO and 0 for CALoR; part of a difference may come from that."
    ]
    # What only SGD uses is no difference to a model that does not use it, and nothing they share.
    assert [row.own for row in training_rows(found)[1:]] == [
        "start begin.safetensors, epochs 40, optimizer sgd, momentum 0.9, nesterov yes, shift 2",
        "start none, epochs 20, optimizer adamw, shift 0",
    ]
    assert "momentum" not in training_notes(found)[0] + training_caption(found)
    backwards = study(tmp_path / "backwards", [{**BROKEN, "recipe": slow}, DEFENDED])
    assert "momentum" not in training_notes(backwards)[0] + training_caption(backwards)


def test_settings_without_effect_are_no_difference(tmp_path):
    idle = {"momentum": 0.5, "nesterov": False, "milestones": [0.5], "decay": 0.2}
    found = study(tmp_path, [BROKEN, {**DEFENDED, "recipe": idle}])
    assert training_notes(found) == []
    used = [
        {**BROKEN, "recipe": {"optimizer": "sgd"}},
        {**DEFENDED, "recipe": {"optimizer": "sgd", "momentum": 0.5}},
    ]
    assert training_notes(study(tmp_path / "used", used))[0].startswith(
        "The models were not trained alike: momentum is 0.9 for undefended and 0.5 for CALoR;"
    )


def test_many_models_are_counted_and_not_listed(tmp_path):
    ranks = [{**DEFENDED, "defenses": [{"name": "calor", "rank": rank}]} for rank in range(2, 9)]
    strong = [
        {**bido(lambda_x=0.1 * place), "recipe": {"batch": 128, "lr": 0.00123456}}
        for place in range(1, 6)
    ]
    (note,) = training_notes(study(tmp_path, [BROKEN, *ranks, *strong]))
    assert note == (
        "The models were not trained alike: batch 128 and lr 0.00123456 for 5 BiDO models, but batch 64 and lr 0.001 for 8 other models; "
        "part of a difference may come from that."
    )


def test_recipes_that_differ_make_models_that_differ(tmp_path):
    """A grid over a setting of the training gives several undefended models, and each defense has its own to be compared with."""
    pair = [BROKEN, {**DEFENDED, "accuracy": 0.981}]
    audits = [
        *pair,
        *(
            {**told, "recipe": {"epochs": 5}, "hits": hits, "accuracy": 0.9}
            for told, hits in zip(pair, [(18, 18), (17, 17)], strict=True)
        ),
    ]
    found = study(tmp_path, audits)
    assert [aim.name for aim in found.aims] == [
        "undefended (epochs=20)",
        "undefended (epochs=5)",
        "CALoR (epochs=20)",
        "CALoR (epochs=5)",
    ]
    change = Page(build_report([tmp_path / "run"], tmp_path / "report.html")).sentences[1]
    assert "CALoR (epochs=5) does not clearly lower it: 85 %" in change
    assert change.endswith("costs no accuracy on held-out pictures (90 → 90 %).")


def test_more_training_is_said_apart(tmp_path):
    found = study(tmp_path, [BROKEN, TRANSFER, DEFENDED])
    assert training_notes(found) == [
        "TL began from a first training (12 epochs on 200 public people) that the other models did not have: "
        "part of a difference may come from more training."
    ]
    assert training_caption(found).startswith("All models were trained by one recipe: model cnn,")
    private = {**TRANSFER, "info": {"first_stage": {**STAGE, "data": "private", "classes": 20}}}
    assert (
        "(12 epochs on the 20 private people)"
        in training_notes(study(tmp_path / "private", [BROKEN, private]))[0]
    )
    assert (
        training_notes(
            study(
                tmp_path / "all",
                [{**told, "info": {"first_stage": STAGE}} for told in (BROKEN, DEFENDED)],
            )
        )
        == []
    )


def test_training_times_stages_and_facts_are_shown(tmp_path):
    noisy = {
        **DEFENDED,
        "defenses": [{"name": "dpsgd"}],
        "seconds": 9000.0,
        "control": None,
        "info": {"facts": {"dpsgd": {"steps": 940}}},
    }
    run = make_run(tmp_path / "run", [BROKEN, TRANSFER, noisy, {**bido(), "seconds": 150.0}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.tables["Training of each model"] == [
        ["model", "weights", "training time", "beside undefended", "epoch kept", "first stage", "what its defenses tell"],
        ["undefended", "12 345", "60 s", "1.00 ×", "4 of 20", "–", "–"],
        [
            "TL", "12 345 345 trainable", "90 s", "1.50 ×", "4 of 20",
            "12 epochs on 200 public people, right on 93.4 % of held-out pictures 4 min",
            "TL last frozen layer features.6; trainable 345; frozen 12 000",
        ],
        ["DP-SGD", "12 345", "2.5 h", "–", "4 of 20", "–", "DP-SGD steps 940"],
        ["BiDO", "12 345", "2.5 min", "2.50 ×", "4 of 20", "–", "–"],
    ]  # fmt: skip


def test_models_of_several_seeds_have_rows_of_their_own(tmp_path):
    audits = [
        BROKEN,
        {**BROKEN, "seed": 1, "seconds": 30.0},
        {**BROKEN, "seed": 1, "loss": "ce", "seconds": 30.0},
        DEFENDED,
    ]
    rows = training_rows(study(tmp_path, audits))
    assert [(row.label, row.training.seconds) for row in rows] == [
        ("undefended · seed=0", 60),
        ("undefended · seed=1", 30),
        ("CALoR", 60),
    ]


def test_nothing_is_claimed_of_a_training_that_was_not_seen(tmp_path):
    brought = {
        "recipe": {"weights": "w.safetensors", "lr": 0.5},
        "info": {"selected_epoch": None, "trainable": None},
    }
    alone = study(tmp_path / "alone", [{**BROKEN, **brought}])
    assert training_notes(alone) == []
    assert (
        training_caption(alone)
        == "The weights were brought, so how they were trained is not known."
    )
    found = study(tmp_path, [BROKEN, {**DEFENDED, **brought}, bido()])
    assert training_notes(found) == [
        "How CALoR was trained is not known: the weights were brought."
    ]
    assert training_caption(found).startswith(
        "All models but those whose weights were brought were trained by one recipe: "
    )
    row = training_rows(found)[1]
    assert (row.label, row.epoch, row.own, row.training.seconds, row.training.times_undefended) == (
        "CALoR",
        "–",
        "",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"epsilon": 4.2345, "delta": 1e-5, "noise": 1.1, "sample_rate": 0.02134, "accountant": "rdp", "note": "not for inversion"},
            "ε = 4.23 at δ = 1e−05; noise 1.1; sample rate 0.0213; accountant rdp; not for inversion",
        ),
        ({"epsilon": "Infinity", "delta": 1e-5}, "ε = ∞ at δ = 1e−05"),
        ({"epsilon": None, "delta": 1e-5, "accountant": None, "note": "without noise there is no guarantee"}, "without noise there is no guarantee"),
        ({"taps": ["block1", "block2"]}, "taps block1, block2"),
        ({"frozen": 13_900_000, "strict": True, "kept": {"a": 1, "b": [2.5]}}, "frozen 13 900 000; strict yes; kept (a 1, b 2.5)"),
        ({}, ""),
    ],
)  # fmt: skip
def test_facts_in_words(facts, text):
    assert plain(fact_words(facts)) == text


def test_values_of_a_recipe_keep_their_digits():
    assert (words(0.123456), words(0.123456, exact=True), words([0.1, -1e-5], exact=True)) == (
        "0.123",
        "0.123456",
        "0.1/−1e−05",
    )
    assert (words(None), words([]), words(False), words(0)) == ("none", "none", "no", "0")


def test_defenses_are_titled_and_told_apart(tmp_path):
    strengths = [
        ("hsic_nocco", 0.05),
        ("hsic_nocco", 0.1),
        ("coco_frobenius", 5.0),
        ("coco_frobenius", 10.0),
    ]
    both = {**TRANSFER, "defenses": [{"name": "transfer"}, {"name": "bido"}]}
    found = study(
        tmp_path,
        [BROKEN, *(bido(measure=measure, lambda_x=weight) for measure, weight in strengths), both],
    )
    assert [entry.label for entry in found.entries] == [
        "undefended",
        "BiDO · measure=hsic_nocco · lambda_x=0.05",
        "BiDO · measure=hsic_nocco · lambda_x=0.1",
        "BiDO · measure=coco_frobenius · lambda_x=5.0",
        "BiDO · measure=coco_frobenius · lambda_x=10.0",
        "TL + BiDO",
    ]
    layers = study(tmp_path / "layers", [bido(layers=["a", "b"]), bido(layers=["a", "c"]), bido()])
    assert [aim.name for aim in layers.aims] == [
        "BiDO (layers=a/b)",
        "BiDO (layers=a/c)",
        "BiDO (layers=none)",
    ]


# Utility against leakage


class Drawing(HTMLParser):
    """What a plot draws: points with their places, classes and shapes; names with their boxes; lines by class."""

    def __init__(self, drawn: str):
        super().__init__()
        self.points: list[dict[str, Any]] = []
        self.names: list[dict[str, Any]] = []
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.title = ""
        self._open: list[str] = []
        self.feed(drawn)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        kind = (values.get("class") or "").split(" ")[0]
        if kind == "point":
            x, y = map(float, re.findall(r"[\d.]+", values["transform"]))
            self.points.append({"x": x, "y": y, "class": values["class"], "title": "", "shape": ""})
        elif kind == "name":
            self.names.append({**values, "text": ""})
        elif tag == "path" and not kind:
            self.points[-1]["shape"] = values["d"]
        elif kind:
            self.lines.setdefault(kind, []).append(values)
        self._open.append(tag if kind != "name" else "name")

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open[-1] == "name":
            self.names[-1]["text"] += data
        elif self._open[-1] == "title" and self.points:
            self.points[-1]["title"] += data
        elif self._open[-1] == "title":
            self.title += data

    @property
    def boxes(self) -> list[tuple[float, float, float, float]]:
        """Left, top, right and bottom of the names, in letters of seven pixels."""
        found = []
        for name in self.names:
            wide, x, y = 7 * len(name["text"]), float(name["x"]), float(name["y"])
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[name["text-anchor"]]
            found.append((left, y - 10, left + wide, y))
        return found


def many(defenses: int = 8) -> list[dict[str, Any]]:
    """An undefended model and eight defenses at three strengths, some of them close together."""
    settings: list[list[dict[str, Any]]] = [
        [{"name": "mid", "weight": weight} for weight in (0.003, 0.01, 0.02)],
        [
            {"name": "bido", "measure": "hsic_nocco", "lambda_y": weight}
            for weight in (0.5, 1.0, 2.5)
        ],
        [
            {"name": "bido", "measure": "coco_frobenius", "lambda_x": weight}
            for weight in (5.0, 10.0, 15.0)
        ],
        [{"name": "label_smoothing", "alpha": alpha} for alpha in (-0.05, -0.1, -0.3)],
        [{"name": "transfer", "ratio": ratio} for ratio in (0.5, 0.6, 0.7)],
        [{"name": "calor", "rank": rank} for rank in (7, 5, 3)],
        [{"name": "dpsgd", "noise": noise} for noise in (0.5, 1.0, 2.0)],
        [{"name": "calor", "activation": "relu", "rank": rank} for rank in (7, 5, 3)],
    ]
    audits = [{**BROKEN, "accuracy": 0.96}]
    for place, strengths in enumerate(settings[:defenses]):
        for step, chosen in enumerate(strengths):
            hits = 18 - 2 * place - step
            audits.append(
                {
                    **BROKEN,
                    "defenses": [chosen],
                    "accuracy": 0.955 - 0.01 * step - 0.004 * place,
                    "hits": (hits, hits),
                }
            )
    return audits


def test_a_plot_has_a_point_for_each_model_where_its_numbers_are(tmp_path):
    audits = [
        {**BROKEN, "loss": "ce", "hits": (10, 10)},
        BROKEN,
        {**DEFENDED, "accuracy": 0.962},
        {**bido(), "accuracy": 0.972, "hits": (0, 0), "guesses": 3},
    ]
    drawn = tradeoff(study(tmp_path, audits))
    drawing = Drawing(drawn)
    assert [(point["class"], plain(point["title"])) for point in drawing.points] == [
        ("point c0", "undefended: right on 98.2 %, recognised 95 % (85–100 %)"),
        ("point c1", "CALoR: right on 96.2 %, recognised 35 % (15–55.1 %)"),
        ("point c2", "BiDO: right on 97.2 %, recognised 0 % (0–16.8 %)"),
    ]
    base, calor, last = drawing.points
    # Half way between the two in accuracy, and 60 of 95 parts of the way down.
    assert last["x"] == pytest.approx((base["x"] + calor["x"]) / 2, abs=0.11)
    assert (calor["y"] - base["y"]) / (last["y"] - base["y"]) == pytest.approx(60 / 95, abs=0.002)
    assert [float(re.findall(r"[\d.]+", line["d"])[0]) for line in drawing.lines["reach"]] == [
        p["x"] for p in drawing.points
    ]
    low, high = map(
        float, re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", drawing.lines["reach"][1]["d"]).groups()
    )
    assert high < calor["y"] < low
    # Guessing reaches one of 20, three in another audit; thin lines cross at the undefended model.
    guesses = [float(line["y1"]) for line in drawing.lines["guess"]]
    assert (last["y"] - guesses[0]) / (last["y"] - base["y"]) == pytest.approx(5 / 95, abs=0.002)
    assert (last["y"] - guesses[1]) / (last["y"] - base["y"]) == pytest.approx(15 / 95, abs=0.002)
    assert len(guesses) == 2
    assert "5–15 %" in plain(drawn)
    (guide,) = drawing.lines["guide"]
    assert f"M62 {base['y']:.1f}H" in guide["d"]
    assert f"M{base['x']:.1f} 16V" in guide["d"]
    assert plain(drawing.title).startswith(
        "Accuracy on held-out pictures and share of people recognised, for 3 models. undefended: right on 98.2 %"
    )
    assert "route" not in drawing.lines


def test_strengths_of_a_defense_are_joined_in_order_of_accuracy(tmp_path):
    drawing = Drawing(tradeoff(study(tmp_path, many())))
    assert len(drawing.points) == 25
    assert [name["text"] for name in drawing.names] == [
        "undefended", "MID", "BiDO hsic nocco", "BiDO coco frobenius", "LS", "TL", "CALoR tanh", "DP-SGD", "CALoR relu",
    ]  # fmt: skip
    routes = [
        [tuple(map(float, pair.split(","))) for pair in line["points"].split()]
        for line in drawing.lines["route"]
    ]
    assert [len(route) for route in routes] == [3] * 8
    assert all(route == sorted(route) for route in routes)
    assert {pair for route in routes for pair in route} == {
        (point["x"], point["y"]) for point in drawing.points[1:]
    }
    looks = [(point["class"], point["shape"]) for point in drawing.points]
    assert len(set(looks)) == 9
    assert len({shape for _, shape in looks}) == 9
    assert len({colour for colour, _ in looks}) == 9
    assert len(set(MARKS)) == len(MARKS) == 11
    assert len(drawing.lines["guess"]) == 1


def test_names_on_a_plot_cover_neither_each_other_nor_points(tmp_path):
    drawing = Drawing(tradeoff(study(tmp_path, many())))
    boxes = drawing.boxes
    marks = [
        (point["x"] - 5, point["y"] - 5, point["x"] + 5, point["y"] + 5) for point in drawing.points
    ]

    def overlap(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
        return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]

    assert [
        (i, j)
        for i, one in enumerate(boxes)
        for j, two in enumerate(boxes)
        if i < j and overlap(one, two)
    ] == []
    assert [
        (i, j) for i, one in enumerate(boxes) for j, mark in enumerate(marks) if overlap(one, mark)
    ] == []
    assert all(
        left >= 62 and right <= 748 and top >= 0 and bottom <= 446
        for left, top, right, bottom in boxes
    )


def test_a_plot_is_zoomed_to_the_accuracies(tmp_path):
    same = [{**BROKEN, "accuracy": 1.0}, {**DEFENDED, "accuracy": 1.0}, {**bido(), "accuracy": 1.0}]
    ticks = re.compile(r'y="466" text-anchor="middle">([\d.]+)')
    assert ticks.findall(tradeoff(study(tmp_path, same))) == [
        "99",
        "99.2",
        "99.4",
        "99.6",
        "99.8",
        "100",
    ]
    wide = [
        {**told, "accuracy": accuracy}
        for told, accuracy in zip(same, (0.95, 0.2, 0.6), strict=True)
    ]
    assert ticks.findall(tradeoff(study(tmp_path / "wide", wide))) == [
        "20",
        "30",
        "40",
        "50",
        "60",
        "70",
        "80",
        "90",
    ]


def test_vacuous_models_are_hollow_on_a_plot(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, **FAILED}, bido()])
    drawing = Drawing(tradeoff(group([read_run(run)])[0]))
    assert [point["class"] for point in drawing.points] == [
        "point c0",
        "point c1 hollow",
        "point c2",
    ]
    assert drawing.points[1]["title"].startswith("CALoR (vacuous): ")
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "Hollow points are vacuous and prove nothing." in page.text
    void = make_run(
        tmp_path / "void", [FAILED, {**FAILED, "defenses": CALOR}, {**FAILED, "defenses": BIDO}]
    )
    page = Page(build_report([void], tmp_path / "void.html"))
    assert "Right and low is best" not in page.text
    assert "low points mean a weak attack, not a private model" in page.text


def test_two_models_need_no_plot(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    assert tradeoff(group([read_run(run)])[0]) == ""
    assert (
        "Accuracy and leakage of each model"
        not in Page(build_report([run], tmp_path / "report.html")).tables
    )
    more = make_run(tmp_path / "more", [BROKEN, DEFENDED, bido()])
    assert (
        "Accuracy and leakage of each model"
        in Page(build_report([more], tmp_path / "more.html")).tables
    )


def test_a_plot_escapes_names_and_keeps_its_bytes(tmp_path):
    evil = '<script>alert(1)</script>&"'
    run = make_run(
        tmp_path / "run",
        [
            {**BROKEN, "recipe": {"start": evil}},
            BROKEN,
            bido(),
            {**DEFENDED, "recipe": {"start": evil}},
        ],
    )
    first, second = (tradeoff(group([read_run(run)])[0]) for _ in range(2))
    assert str(first) == str(second)
    assert "<script" not in first
    assert first.count("&lt;script&gt;") >= 2
    assert Drawing(first).names[0]["text"].endswith(evil)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "script" not in [tag for tag, _ in page.tags]
    assert evil in page.text


# Several runs


def test_runs_with_the_same_judges_share_a_table_and_shared_audits_appear_once(tmp_path):
    first, second = (
        make_run(tmp_path / "first", [BROKEN]),
        make_run(tmp_path / "second", [BROKEN, DEFENDED]),
    )
    page = Page(
        build_report(
            [first, second, tmp_path / "second" / ".." / "first"], tmp_path / "report.html"
        )
    )
    assert [row[0] for row in page.tables["Scores of each audit"]] == [
        "audit",
        "undefended",
        "CALoR",
    ]
    assert page.sentences[1].startswith("CALoR lowers this to 35 %")


def test_runs_with_other_judges_stand_apart(tmp_path):
    first, second = (
        make_run(tmp_path / "first", [BROKEN]),
        make_run(tmp_path / "second", [DEFENDED], judges=(0.99, 0.98), name="other"),
    )
    out = build_report([first, second], tmp_path / "report.html")
    page = Page(out)
    assert len(page.sentences) == 4
    assert not any("lowers" in sentence for sentence in page.sentences)
    assert [
        answer["runs"] for answer in json.loads(out.with_suffix(".json").read_text())["answers"]
    ] == ["trial", "other"]


# Redacting


def test_redacted_report_keeps_no_face_and_no_name(tmp_path):
    names = [
        "Anna Schmidt",
        "Bo",
        "007",
        "calor",
        "İpek",
        "anna schmidt",
        *(f"Zoe_{place}" for place in range(24)),
    ]
    settings = {
        "name": "trial",
        "data": {
            "name": "folder",
            "root": "/data/Anna Schmidt/pictures",
            "skip": ["/x/Bo/1.png", "photo_of_zoe_3_b"],
            "per": {"007": 1, "Zoe_1": 2},
        },
    }
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        people=30,
        names=names,
        settings=settings,
        name="for Zoe_2",
    )
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, text, document = Page(out), out.read_text(), out.with_suffix(".json").read_text()
    for name in names:
        if name not in ("Bo", "007", "calor"):
            assert name.lower() not in (text + document).lower(), name
    assert not re.search(r"\b(Bo|007)\b", page.text + document)
    assert page.tables["Private and rebuilt pictures"][0][1:4] == [
        "person A",
        "person C",
        "person E",
    ]
    assert page.tables["Private and rebuilt pictures"][4][1] == "person B"
    # A method keeps its name even if a person is called like it.
    assert page.sentences[1].startswith("CALoR lowers this to 23.3 %")
    loaded = json.loads(document)
    assert loaded["redacted"] is True
    assert "Redacted." in page.text
    assert loaded["runs"][0]["identities"][:7] == [f"person {letter}" for letter in "ABCDEFG"]
    assert loaded["runs"][0]["identities"][26:28] == ["person AA", "person AB"]
    assert loaded["runs"][0]["settings"]["data"] == {
        "name": "folder",
        "root": "/data/person A/pictures",
        "skip": ["/x/person B/1.png", "photo_of_person J_b"],
        "per": {"person C": 1, "person H": 2},
    }
    assert len(page.images) == 3 * 30
    assert {image.shape for image in page.images} == {(3, 3, 3)}
    averages = load_file(run / "pictures.safetensors")["private"][0].float()
    assert abs(int(page.images[0][1, 1, 0]) - averages[0, 2:6, 2:6].mean().item()) <= 1
    whole = build_report([run], tmp_path / "whole.html").read_text()
    pictures = set(re.findall(r"base64,[^\"]+", whole))
    assert len(pictures) == 3 * 30
    assert not [picture for picture in pictures if picture in text]


def test_redacting_spares_what_defenses_tell_and_hides_paths(tmp_path):
    names = ["features.6", "public", "Cosine", "Anna Schmidt", *map(str, range(16))]
    starts = {**TRANSFER, "recipe": {"start": "/data/Anna Schmidt/w.safetensors", "model": "cnn"}}
    run = make_run(
        tmp_path / "run", [{**BROKEN, "recipe": {"start": "public"}}, starts], names=names
    )
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, loaded = Page(out), json.loads(out.with_suffix(".json").read_text())
    first, second = (audit["training"] for audit in loaded["runs"][0]["audits"])
    assert second["facts"] == {
        "transfer": {"last_frozen_layer": "features.6", "trainable": 345, "frozen": 12000}
    }
    assert second["first_stage"] == STAGE
    assert (first["recipe"]["start"], first["recipe"]["schedule"]) == ("public", "cosine")
    assert second["recipe"]["start"] == "/data/person D/w.safetensors"
    assert "start is public for undefended and /data/person D/w.safetensors for TL" in page.text
    assert "Anna Schmidt" not in out.read_text() + out.with_suffix(".json").read_text()


# Bad input


def broken_run(folder: Path, what: str) -> Path:
    run = make_run(folder, [BROKEN, DEFENDED])
    path, document = run / "run.json", json.loads((run / "run.json").read_text())
    pictures = load_file(run / "pictures.safetensors")
    audit = document["audits"][1]
    match what:
        case "no run.json" | "no rows.csv" | "no pictures.safetensors":
            (run / what.removeprefix("no ")).unlink()
            return run
        case "not json":
            path.write_text("{")
            return run
        case "list":
            path.write_text("[]")
            return run
        case "cut pictures":
            (run / "pictures.safetensors").write_bytes(
                (run / "pictures.safetensors").read_bytes()[:-100]
            )
            return run
        case "binary rows":
            (run / "rows.csv").write_bytes(b"\xff\xfe\x00")
            return run
        case "short rows":
            (run / "rows.csv").write_text(
                "".join((run / "rows.csv").read_text().splitlines(keepends=True)[:-1])
            )
            return run
        case "more rows":
            (run / "rows.csv").write_text((run / "rows.csv").read_text() + "calor,person 0,0\n")
            return run
        case "other rows":
            (run / "rows.csv").write_text(
                (run / "rows.csv").read_text().replace("person 3", "person 300")
            )
            return run
        case "missing picture":
            del pictures["audit.1"]
        case "float pictures":
            pictures["audit.0"] = pictures["audit.0"].float()
        case "fewer people":
            pictures["private"] = pictures["private"][1:].contiguous()
        case "format":
            document["format"] = 99
        case "nan":
            audit["scores"]["top1_1"]["value"] = float("nan")
        case "other score":
            audit["scores"]["top1_1"]["value"] = 0.05
        case "no judge":
            del audit["scores"]["top1_2"]
        case "no controls":
            audit["controls"]["control_lift"] = {}
        case "no training":
            del audit["training"]
        case "endless training":
            audit["training"]["seconds"] = float("inf")
        case "no case" | "no steps" | "no partial":
            del audit[what.removeprefix("no ")]
        case "steps as text":
            audit["steps"] = "12"
        case "fewer than no steps":
            audit["steps"] = -1
        case "endless steps":
            audit["steps"] = float("inf")
        case "partial stranger":
            audit["partial"] = ["nobody"]
        case "case as number":
            audit["case"] = 3
        case "no audits":
            document["audits"] = []
    path.write_text(json.dumps(document))
    save_file(pictures, run / "pictures.safetensors")
    return run


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        (
            "no run.json",
            StoreError,
            r"has no run\.json, so it is not a finished run: give the folder",
        ),
        ("no rows.csv", StoreError, r"has no rows\.csv"),
        ("no pictures.safetensors", StoreError, r"has no pictures\.safetensors"),
        ("not json", StoreError, r"run\.json is not JSON"),
        ("list", StoreError, r"has format null, expected 3"),
        ("format", StoreError, r"has format 99, expected 3: run again"),
        ("cut pictures", StoreError, r"is not a whole safetensors file"),
        ("missing picture", DataError, r"has no audit\.1"),
        ("float pictures", DataError, r"audit\.0 is torch\.float32"),
        ("fewer people", DataError, r"has 19 private pictures for 20 identities"),
        ("binary rows", DataError, r"rows\.csv is not a table"),
        ("short rows", DataError, r"rows\.csv does not belong to its run\.json \(audit 'calor'\)"),
        ("more rows", DataError, r"has 41 rows where its run\.json explains 40"),
        (
            "other rows",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'undefended'\)",
        ),
        (
            "nan",
            DataError,
            r"is damaged \(audits\.1\.scores\.top1_1\.value: expected a finite number",
        ),
        ("other score", DataError, r"rows\.csv does not belong to its run\.json \(audit 'calor'\)"),
        ("no judge", DataError, r"has no top1_2 for audit 'calor'"),
        ("no controls", DataError, r"has no controls for audit 'calor'"),
        (
            "no training",
            DataError,
            r"is damaged \(audits\.1\.training: required, and not given\): run again",
        ),
        ("endless training", DataError, r"is damaged \(audits\.1\.training\.seconds: "),
        ("no audits", DataError, r"is damaged \(audits: "),
        (
            "no case",
            DataError,
            r"is damaged \(audits\.1\.case: required, and not given\): run again",
        ),
        (
            "no steps",
            DataError,
            r"is damaged \(audits\.1\.steps: required, and not given\): run again",
        ),
        (
            "no partial",
            DataError,
            r"is damaged \(audits\.1\.partial: required, and not given\): run again",
        ),
        ("steps as text", DataError, r"is damaged \(audits\.1\.steps: "),
        ("fewer than no steps", DataError, r"is damaged \(audits\.1\.steps: "),
        ("endless steps", DataError, r"is damaged \(audits\.1\.steps: "),
        ("case as number", DataError, r"is damaged \(audits\.1\.case: "),
        (
            "partial stranger",
            DataError,
            r"rows\.csv does not belong to its run\.json \(audit 'calor'\)",
        ),
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


def test_places_that_cannot_hold_a_report_are_refused(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN])
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(
        StoreError, match=r"missing is not a folder: give the folder of a finished run"
    ):
        build_report([tmp_path / "missing"], tmp_path / "report.html")
    with pytest.raises(DataError, match="at least one run folder"):
        build_report([], tmp_path / "report.html")
    for out in (tmp_path / "report.json", tmp_path):
        with pytest.raises(StoreError, match="no place for a page: give the name of a file"):
            build_report([run], out)
    for out in (run / "run.html", run / "rows.csv", tmp_path / "run" / ".." / "run" / "run.htm"):
        with pytest.raises(StoreError, match="would overwrite a run's own files"):
            build_report([run], out)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*report\.html"):
        build_report([run], tmp_path / "file" / "report.html")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


# Text and marks


def test_settings_can_be_run_again(tmp_path):
    settings = {
        "name": 'a "b" \\ ü\x7f',
        "seed": 3,
        "target": {"epochs": 30, "lr": 1e-05, "flip": True, "options": {"width": 32}},
        "evaluators": [{"model": "resnet", "options": {"depth": 1}}, {"model": "lenet"}],
        "attack": {"name": "gmi", "clamp": "Infinity"},
        "grid": {
            "defenses": [[], [{"name": "calor", "rank": 3}]],
            "attack.loss": ["ce", "margin"],
            "seed": [0, 1],
            "case": [
                {
                    "case": "KED-MI, long",
                    "prior": {"name": "kplus1"},
                    "attack": {"name": "kedmi", "steps": 9},
                },
                {"case": "GMI"},
            ],
        },
    }
    (tmp_path / "run.toml").write_text(toml(settings), encoding="utf-8")
    assert tomllib.loads(toml(settings)) == {
        **settings,
        "attack": {"name": "gmi", "clamp": float("inf")},
    }
    assert read_config(tmp_path / "run.toml")["grid"] == settings["grid"]
    assert tomllib.loads(toml({"a": None, "b": {}, "c": {"d": {"e": 1}}})) == {
        "b": {},
        "c": {"d": {"e": 1}},
    }


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.975, "percent", "97.5 %"),
        (1.0, "percent", "100 %"),
        (-0.0004, "percent", "0 %"),
        (-0.05, "gain", "−5 points"),
        (0.91, "gain", "+91 points"),
        (31_200, "count", "31 200"),
        (75.5, "seconds", "75.5 s"),
        (150, "seconds", "2.5 min"),
        (9000, "seconds", "2.5 h"),
        (0.9518, "ratio", "0.95 ×"),
        (0.15644, "plain", "0.156"),
        (12345, "plain", "12345"),
        (None, "percent", "–"),
    ],
)
def test_numbers_as_text(value, kind, text):
    assert number(value, kind).replace("\u202f", " ") == text


def test_marks_stand_where_their_values_are():
    drawn = track([Mark(0.5, 0.4, 0.6, 0.1), Mark(1.0, 0.9, 1.0, None)])
    assert drawn.count('<svg x="50.00%"') == 1
    assert drawn.count('x1="40.20%" x2="59.80%"') == 1
    assert drawn.count('class="guess" x1="10.80%"') == 1
    assert drawn.count('class="guess"') == 1
    assert drawn.count('<svg x="99.00%"') == 1
    assert "judge 2: 100\u202f%, interval 90\u202f% to 100\u202f%</title>" in drawn


def test_a_model_audited_with_and_without_a_control_is_spoken_for_by_the_control(tmp_path):
    runs = [
        make_run(tmp_path / "a", [{**DEFENDED, "control": None}]),
        make_run(tmp_path / "b", [DEFENDED]),
    ]
    page = build_report(runs, tmp_path / "report.html").read_text()
    assert "the same attack on an undefended model scores" in page.lower()


def test_models_are_compared_on_the_same_people(tmp_path):
    """Bars that overlap do not hide a difference that person by person is clear."""
    _, change = sentences(tmp_path, [{"hits": (18, 18)}, {**DEFENDED, "hits": (12, 12)}])
    assert change.startswith("CALoR lowers this to 60 %")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    bars = [audit["scores"]["top1_1"] for audit in run["audits"]]
    assert bars[0]["low"] < bars[1]["high"]


# Many attacks

KEDMI, BREPMI, STRAIGHT = (
    {"name": "kedmi"},
    {"name": "brepmi"},
    {"name": "gmi", "straight_through": True},
)
MATRIX = "Every attack on every model"


def tried(case: str, hits: int, **told: Any) -> dict[str, Any]:
    """An attack that both judges see the same of."""
    return {**BROKEN, "case": case, "hits": (hits, hits), **told}


def crossed(cases: Sequence[str], **told: Any) -> list[dict[str, Any]]:
    """Each attack on an undefended model and on CALoR, each stronger than the one before."""
    defended = [tried(case, 5 + place, defenses=CALOR, **told) for place, case in enumerate(cases)]
    return [*(tried(case, 12 + place % 8, **told) for place, case in enumerate(cases)), *defended]


def test_attacks_are_named_as_the_config_or_the_papers_call_them(tmp_path):
    by_case = [
        tried("KED-MI", 9, attack=KEDMI),
        tried("GMI, straight", 9, attack=STRAIGHT, prior="kplus1"),
    ]
    found = study(tmp_path / "case", [*by_case, *({**told, "defenses": CALOR} for told in by_case)])
    assert [entry.label for entry in found.entries] == [
        "undefended · KED-MI", "undefended · GMI, straight", "CALoR · KED-MI", "CALoR · GMI, straight",
    ]  # fmt: skip
    attacks = [{"name": name} for name in ("gmi", "kedmi", "lomma", "plgmi", "brepmi", "vmi")]
    found = study(tmp_path / "title", [tried("", 9, attack=attack) for attack in attacks])
    assert [entry.label for entry in found.entries] == [
        f"undefended · {title}" for title in ("GMI", "KED-MI", "LOMMA", "PLG-MI", "BREP-MI", "VMI")
    ]
    other = broken_attack_name(tmp_path / "other")
    assert [entry.label for entry in group([read_run(other)])[0].entries] == [
        "undefended · GMI",
        "undefended · my_attack",
    ]


def broken_attack_name(folder: Path) -> Path:
    """A run whose second attack is not known to this version."""
    run = make_run(folder, [BROKEN, BROKEN])
    document = json.loads((run / "run.json").read_text())
    document["audits"][1]["attack"]["name"] = "my_attack"
    (run / "run.json").write_text(json.dumps(document))
    return run


def test_what_a_case_does_not_tell_apart_is_told_by_what_differs(tmp_path):
    same = [
        tried("strong", 9),
        tried("strong", 9, loss="ce"),
        tried("strong", 9, attack=KEDMI),
        tried("weak", 9),
        tried("weak", 9, seed=1),
    ]
    assert [entry.label for entry in study(tmp_path, same).entries] == [
        "undefended · strong · GMI · loss=margin", "undefended · strong · GMI · loss=ce", "undefended · strong · KED-MI",
        "undefended · weak · seed=0", "undefended · weak · seed=1",
    ]  # fmt: skip
    # One attack needs no name, and settings that differ keep theirs.
    assert [
        entry.label
        for entry in study(tmp_path / "one", [tried("GMI", 9), {**DEFENDED, "case": "GMI"}]).entries
    ] == [
        "undefended",
        "CALoR",
    ]
    losses = study(tmp_path / "losses", [BROKEN, {**BROKEN, "loss": "ce"}])
    assert [entry.label for entry in losses.entries] == [
        "undefended · loss=margin",
        "undefended · loss=ce",
    ]


def test_the_matrix_has_the_numbers_of_the_run_and_marks_the_strongest(tmp_path):
    audits = [
        {**tried("GMI", 19), "hits": (20, 19)},
        {**tried("KED-MI", 12, guesses=3), "hits": (12, 14)},
        tried("GMI", 4, defenses=CALOR, loss="ce"),
        tried("GMI", 6, defenses=CALOR),
        tried("KED-MI", 9, defenses=CALOR, control=(1, 1)),
        tried("KED-MI", 0, defenses=BIDO),
    ]
    run = make_run(tmp_path / "run", audits)
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    assert page.tables[MATRIX] == [
        ["attack", "undefended", "CALoR", "BiDO"],
        ["prior-only random pictures of the attacks' generators", "5–15 %", "5 %", "5 %"],
        ["GMI", "95 % ★ judge 1: 100 %", "30 % judge 2: 30 % best of 2", "–"],
        ["KED-MI", "60 % judge 2: 70 %", "45 % ★ judge 2: 45 % vacuous", "0 % judge 2: 0 %"],
        [
            "strongest",
            "95 % 85–100 % GMI",
            "45 % 25–65 % KED-MI",
            "0 % 0–16.8 % none found anybody",
        ],
    ]
    written = json.loads((run / "run.json").read_text())["audits"]
    strictest = [
        min(audit["scores"][f"top1_{place}"]["value"] for place in (1, 2)) for audit in written
    ]
    assert [plain(number(strictest[place], "percent")) for place in (0, 1, 3, 4, 5)] == [
        "95 %",
        "60 %",
        "30 %",
        "45 %",
        "0 %",
    ]
    table = re.search(
        rf'aria-label="{MATRIX}">\n<table.*?</table>', out.read_text(), re.DOTALL
    ).group()
    assert re.findall(r'<td class="hollow">.*?45', table) != []
    assert table.count('class="hollow"') == 1
    assert re.findall(r'<b class="share">([\d.]+)', table) == ["95", "45"]
    assert set(re.findall(r"<th(?: [^>]*)?>", table)) == {'<th scope="col">', '<th scope="row">'}
    assert "★ strongest attack on the model" in page.text
    assert "Dashed and slanted: vacuous, proves nothing" in page.text
    assert "– not tried" in page.text


def test_one_attack_or_one_model_needs_no_matrix(tmp_path):
    for name, audits in {
        "attack": [BROKEN, DEFENDED, {**DEFENDED, "loss": "ce"}],
        "case": [tried("GMI", 9), tried("GMI", 8, defenses=CALOR)],
        "model": [tried("GMI", 9), tried("KED-MI", 8)],
    }.items():
        assert matrix(study(tmp_path / name, audits)) is None
        assert attack_notes(study(tmp_path / name, audits)) == []
        assert (
            MATRIX
            not in build_report([tmp_path / name / "run"], tmp_path / f"{name}.html").read_text()
        )
    assert matrix(study(tmp_path / "both", [{**BROKEN, "attack": KEDMI}, DEFENDED])) is not None


def test_the_matrix_is_said_in_words(tmp_path):
    audits = [
        tried("GMI", 19), tried("KED-MI", 18),
        tried("GMI", 9, defenses=CALOR), tried("KED-MI", 9, defenses=CALOR),
        tried("GMI", 0, defenses=BIDO), tried("KED-MI", 0, defenses=BIDO),
        tried("GMI", 3, defenses=SMOOTHING, control=(1, 1)),
    ]  # fmt: skip
    run = make_run(tmp_path / "run", audits)
    out = build_report([run], tmp_path / "report.html")
    notes = json.loads(out.with_suffix(".json").read_text())["answers"][0]["attacks"]
    assert notes == [
        "GMI is the strongest attack on 2 of 3 models whose audits are not vacuous and KED-MI on 1; where attacks are equally strong, each counts.",
        "Nobody rebuilt from BiDO was recognised by the strictest judge, whatever the attack.",
    ]
    assert all(note in Page(out).text for note in notes)
    alone = attack_notes(
        study(
            tmp_path / "all",
            [tried("GMI, long", 19), tried("KED-MI", 9), tried("GMI, long", 9, defenses=CALOR)],
        )
    )
    assert alone == ["“GMI, long” is the strongest attack on all 2 models."]
    one = [tried("GMI", 19), tried("KED-MI", 9), tried("GMI", 9, defenses=CALOR, control=(1, 1))]
    assert attack_notes(study(tmp_path / "one", one)) == [
        "GMI is the strongest attack on the one model whose audits are not vacuous."
    ]
    assert (
        attack_notes(study(tmp_path / "void", [{**told, "control": (1, 1)} for told in one])) == []
    )


@pytest.mark.parametrize(
    ("attack", "bare", "defended", "vacuous", "said"),
    [
        (BREPMI, (9, 9), (9, 12), False, ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."]),
        (STRAIGHT, (9, 9), (9, 12), False, ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."]),
        (KEDMI | {"samples": 8}, (9, 9), (9, 12), False, ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."]),
        ({"name": "gmi", "loss": "aim"}, (9, 9), (9, 12), False, ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."]),
        # Ten points are not more than ten, and an attack that is stronger everywhere proves no masking.
        (BREPMI, (9, 9), (7, 9), False, ["An adaptive or label-only attack exceeds the plain ones by more than 10 points on none of the 2 models that met both."]),
        (BREPMI, (9, 13), (9, 12), False, [
            "{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients.",
            "It does so also on undefended (special 65 % against plain 45 %), where no defense masks anything: it may be the stronger attack anyway, "
            "and what it finds more on other models is no proof of masking.",
        ]),
        (BREPMI, (9, 13), (9, 9), False, [
            "{} on undefended (special 65 % against plain 45 %), where no defense masks anything: it may be the stronger attack anyway, "
            "and what it finds more on other models is no proof of masking.",
        ]),
        # A plain attack that fails without any defense is weak, and an attack of the same kind is no other.
        (BREPMI, (9, 9), (1, 12), True, ["An adaptive or label-only attack exceeds the plain ones by more than 10 points on none of the 1 model that met both."]),
        (KEDMI, (9, 9), (9, 12), False, []),
    ],
)  # fmt: skip
def test_attacks_that_need_no_honest_gradient_tell_of_masked_ones(
    tmp_path, attack, bare, defended, vacuous, said
):
    control = {"control": (1, 1)} if vacuous else {}
    audits = [
        tried("plain", bare[0]), tried("special", bare[1], attack=attack),
        tried("plain", defended[0], defenses=CALOR, **control), tried("special", defended[1], defenses=CALOR, attack=attack),
    ]  # fmt: skip
    notes = [
        plain(note) for note in attack_notes(study(tmp_path, audits)) if "strongest" not in note
    ]
    assert notes == [
        note.format(
            "An adaptive or label-only attack exceeds every plain one by more than 10 points"
        )
        for note in said
    ]


def test_of_many_audits_the_strongest_and_those_without_a_defense_are_pictured(tmp_path):
    cases = [f"attack {place}" for place in range(7)]
    run = make_run(tmp_path / "run", crossed(cases))
    page = Page(build_report([run], tmp_path / "report.html"))
    shown = [f"undefended {case}" for case in cases] + ["CALoR attack 6"]
    rows = page.tables["Private and rebuilt pictures"]
    assert [row[0].rsplit(" ", 3)[0] for row in rows[2:10]] == shown
    assert len(page.images) == 9 * 20
    pixels = load_file(run / "pictures.safetensors")
    np.testing.assert_array_equal(
        page.images[16 * 8], pixels["audit.13"][0, 0].permute(1, 2, 0).numpy()
    )
    assert (
        "Pictures of 8 of 14 audits are here, to keep this page small: the strongest attack on each model, and each attack on undefended."
        in page.text.replace(" .", ".")
    )
    assert "Drawn are the audits that have pictures above; the table has all 14." in page.text
    assert sum(values.get("class") == "track" for _, values in page.tags) == 8
    assert len(page.tables["Scores of each audit"]) == 1 + 14
    assert len(page.tables[MATRIX]) == 1 + 1 + 7 + 1
    # The controls have a line for each audit, and what the judges are worth stands apart.
    head, *lines = page.tables["Controls of each audit"]
    assert head == [
        "audit",
        "Positive control",
        "Prior-only",
        "Judges agree",
        "Only one accepts",
        "Still a real picture?",
        "Target success",
    ]
    assert lines[-1] == [
        "CALoR attack 6",
        "+95 points at least 85 ✓ pass",
        "5 % ✓ pass",
        "100 % ✓ pass",
        "0 % ✓ pass",
        "1.00 × ✓ pass",
        "100 % ✓ pass",
    ]
    assert len(lines) == 14
    assert "A weak judge overlooks leaks. 97 % ✓ pass" in page.text
    assert "In the 12 audits by other attacks" in page.text


def test_up_to_twelve_audits_are_all_pictured(tmp_path):
    found = study(tmp_path, crossed([f"attack {place}" for place in range(6)]))
    assert found.shown == found.entries
    page = Page(build_report([tmp_path / "run"], tmp_path / "report.html"))
    assert len(page.images) == 13 * 20
    assert "to keep this page small" not in page.text
    assert "by other attacks" not in page.text
    assert page.tables["Controls of each audit"][0][0] == "control"
    # Models are never left out, however many there are.
    models = study(tmp_path / "models", many(5))
    assert models.many
    assert models.shown == models.entries


def test_a_page_of_many_attacks_stays_small(tmp_path):
    noise = torch.rand(40, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    audits = [
        tried(
            f"attack {place}",
            10,
            defenses=[{"name": "calor", "rank": rank + 1}] if rank else [],
            pictures=noise,
        )
        for rank in range(6)
        for place in range(12)
    ]
    run = make_run(tmp_path / "run", audits, people=40, size=32)
    out = build_report([run], tmp_path / "report.html")
    assert out.stat().st_size < 3_000_000
    page = Page(out)
    assert len({row[0] for row in page.tables["Scores of each audit"]}) == 73
    # Twelve attacks without a defense, the strongest on five other models and the private pictures: room for 25 people.
    assert len(page.images) == (12 + 5 + 1) * 25
    assert "15 people are left out to keep this page small" in page.text


def test_warnings_of_many_audits_are_not_listed_one_by_one(tmp_path):
    cases = [f"attack {place}" for place in range(13)]
    found = study(tmp_path, crossed(cases, far=2.0))
    assert list(found.warnings.values()) == ["all 26 audits"]
    some = [
        told
        | ({"far": 2.0} if told.get("defenses") or told["case"] in ("attack 3", "attack 5") else {})
        for told in crossed(cases)
    ]
    assert list(study(tmp_path / "some", some).warnings.values()) == [
        "undefended · attack 3, undefended · attack 5 and all 13 of CALoR"
    ]


def test_searches_that_broke_off_and_their_steps_are_shown(tmp_path):
    run = make_run(
        tmp_path / "run", [BROKEN, {**DEFENDED, "partial": [0, 4], "steps": [[100], [120]]}]
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert json.loads((run / "run.json").read_text())["audits"][1]["partial"] == [
        "person 0",
        "person 4",
    ]
    head, _, undefended, defended = page.tables["Private and rebuilt pictures"][:4]
    assert [
        name for name, cell in zip(head, defended, strict=True) if "search broke off" in cell
    ] == ["person 0", "person 4"]
    assert "search broke off" not in " ".join(undefended)
    assert sum(values.get("class") == "partial" for _, values in page.tags) == 2
    assert "Dashed frame: the search broke off, so the picture says little" in page.text
    assert "partial: the search broke off for 2 of 20 people" in page.text
    assert [row[-2] for row in page.tables["Scores of each audit"]] == [
        "queries",
        "31 200",
        "31 200 110 steps",
    ]
    assert (
        "Queries are pictures the attack shows to the model, without those a prior was fitted with, steps the mean of the searches."
        in page.text.replace(" ,", ",").replace(" .", ".")
    )
    whole = Page(
        build_report([make_run(tmp_path / "whole", [BROKEN, DEFENDED])], tmp_path / "whole.html")
    )
    assert "broke off" not in whole.text
    assert "steps the mean" not in whole.text


@pytest.mark.parametrize(
    ("attack", "kinds"),
    [
        ({"name": "gmi", "samples": 2}, ["CE", "adaptive"]),
        (
            {"name": "gmi", "straight_through": True, "loss": "margin"},
            ["margin or logit", "adaptive"],
        ),
        ({"name": "gmi", "loss": "aim"}, ["adaptive"]),
        ({"name": "gmi", "samples": 1}, ["CE"]),
        ({"name": "brepmi"}, ["label-only"]),
        ({"name": "brepmi", "samples": 8, "budget": 2000}, ["label-only", "adaptive"]),
        ({"name": "lomma"}, ["margin or logit"]),
    ],
)
def test_kinds_of_attack(tmp_path, attack, kinds):
    found = study(tmp_path, [{**BROKEN, "attack": attack}, {**DEFENDED, "attack": attack}])
    assert found.entries[0].attack_kinds == kinds
    undefended, defended = (aim.attack_kinds for aim in found.aims)
    assert [kind for kind, state in defended.items() if state == "tried"] == kinds
    # Without a defense there is nothing to adapt to.
    assert undefended["adaptive"] == ("tried" if "adaptive" in kinds else "needless")
    assert defended["adaptive"] == ("tried" if "adaptive" in kinds else "missing")
    assert ("adaptive" in next(iter(found.untried))) == ("adaptive" not in kinds)


def test_redacting_hides_who_broke_off_and_names_in_cases(tmp_path):
    names = ["Anna Schmidt", "Bo", "7", *(f"Zoe_{place}" for place in range(17))]
    audits = [
        tried("for Zoe_3", 9, partial=[0, 1, 2]),
        tried("KED-MI", 9),
        tried("for Zoe_3", 9, defenses=CALOR, partial=[5]),
    ]
    run = make_run(tmp_path / "run", audits, names=names)
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, loaded = Page(out), json.loads(out.with_suffix(".json").read_text())["runs"][0]
    assert [audit["partial"] for audit in loaded["audits"]] == [
        ["person A", "person B", "person C"],
        [],
        ["person F"],
    ]
    assert [audit["case"] for audit in loaded["audits"]] == [
        "for person G",
        "KED-MI",
        "for person G",
    ]
    assert [row[0] for row in page.tables[MATRIX][2:4]] == ["for person G", "KED-MI"]
    assert sum(values.get("class") == "partial" for _, values in page.tags) == 4
    for name in ("Anna", "Schmidt", "Zoe"):
        assert name not in out.read_text() + out.with_suffix(".json").read_text()


def test_hostile_cases_are_text(tmp_path):
    evil = '<script>alert(1)</script>&" onload="x'
    run = make_run(
        tmp_path / "run", [tried(evil, 9), tried("{{ 1 }}", 8), tried(evil, 7, defenses=CALOR)]
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert not [tag for tag, values in page.tags if tag == "script" or "onload" in values]
    assert [row[0] for row in page.tables[MATRIX][2:4]] == [evil, "{{ 1 }}"]
