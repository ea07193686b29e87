"""Many attacks on several models."""

import json
import re
from pathlib import Path

import pytest

from frostglass.report.arrange import group
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.panels.matrix import attack_notes, has_matrix
from frostglass.report.text import number
from pages import Page, plain
from run_folders import (
    BIDO,
    BREPMI,
    BROKEN,
    CALOR,
    DEFENDED,
    KEDMI,
    SMOOTHING,
    STRAIGHT,
    edit_run,
    make_run,
    study_of,
    tried,
)

MATRIX = "Every attack on every model"


def test_attacks_are_named_as_the_config_or_the_papers_call_them(tmp_path):
    by_case = [
        tried("KED-MI", 9, attack=KEDMI),
        tried("GMI, straight", 9, attack=STRAIGHT, prior="kplus1"),
    ]
    study = study_of(
        tmp_path / "case", [*by_case, *({**audit, "defenses": CALOR} for audit in by_case)]
    )
    assert [entry.label for entry in study.entries] == [
        "undefended · KED-MI",
        "undefended · GMI, straight",
        "CALoR · KED-MI",
        "CALoR · GMI, straight",
    ]
    attacks = [{"name": name} for name in ("gmi", "kedmi", "lomma", "plgmi", "brepmi", "vmi")]
    study = study_of(tmp_path / "title", [tried("", 9, attack=attack) for attack in attacks])
    assert [entry.label for entry in study.entries] == [
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
    edit_run(run, document)
    return run


def test_what_a_case_does_not_tell_apart_is_told_by_what_differs(tmp_path):
    same = [
        tried("strong", 9),
        tried("strong", 9, loss="ce"),
        tried("strong", 9, attack=KEDMI),
        tried("weak", 9),
        tried("weak", 9, seed=1),
    ]
    assert [entry.label for entry in study_of(tmp_path, same).entries] == [
        "undefended · strong · GMI · loss=margin",
        "undefended · strong · GMI · loss=ce",
        "undefended · strong · KED-MI",
        "undefended · weak · seed=0",
        "undefended · weak · seed=1",
    ]
    # One attack needs no name, and settings that differ keep theirs.
    assert [
        entry.label
        for entry in study_of(
            tmp_path / "one", [tried("GMI", 9), {**DEFENDED, "case": "GMI"}]
        ).entries
    ] == [
        "undefended",
        "CALoR",
    ]
    losses = study_of(tmp_path / "losses", [BROKEN, {**BROKEN, "loss": "ce"}])
    assert [entry.label for entry in losses.entries] == [
        "undefended · loss=margin",
        "undefended · loss=ce",
    ]


def test_the_matrix_has_the_numbers_of_the_run_and_marks_the_strongest(tmp_path):
    audits = [
        {**tried("GMI", 19), "hits": (20, 19)},
        {**tried("KED-MI", 12, baseline=3), "hits": (12, 14)},
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
        ["prior only random images from the attacks' generators", "5–15 %", "5 %", "5 %"],
        ["GMI", "95 % ★ top-1 100 % and 95 %", "30 % top-1 30 % best of 2", "–"],
        [
            "KED-MI",
            "60 % top-1 60 % and 70 %",
            "45 % ★ top-1 45 % vacuous",
            "0 % top-1 0 %",
        ],
        [
            "strongest",
            "95 % 85–100 % GMI",
            "45 % 25–65 % KED-MI",
            "0 % 0–16.8 % nobody recognised",
        ],
    ]
    written = json.loads((run / "run.json").read_text())["audits"]
    recognised = [audit["scores"]["verified_3"]["value"] for audit in written]
    shown = [plain(number(recognised[place], "percent")) for place in (0, 1, 3, 4, 5)]
    assert shown == ["95 %", "60 %", "30 %", "45 %", "0 %"]
    table = re.search(
        rf'aria-label="{MATRIX}">\n<table.*?</table>', out.read_text(), re.DOTALL
    ).group()
    assert re.findall(r'<td class="hollow"[^>]*>.*?45', table) != []
    assert table.count('class="hollow"') == 1
    assert re.findall(r'<b class="share">([\d.]+)', table) == ["95", "45"]
    headers = set(re.findall(r"<th(?: [^>]*)?>", table))
    assert headers == {f"<th scope={x}>" for x in ('"col"', '"row"', '"row" class="sum"')}
    assert "★ strongest attack on the model" in page.text
    assert "Dashed and slanted: vacuous, proves nothing" in page.text
    assert "– not tried" in page.text


def test_one_attack_or_one_model_needs_no_matrix(tmp_path):
    for name, audits in {
        "attack": [BROKEN, DEFENDED, {**DEFENDED, "loss": "ce"}],
        "case": [tried("GMI", 9), tried("GMI", 8, defenses=CALOR)],
        "model": [tried("GMI", 9), tried("KED-MI", 8)],
    }.items():
        assert not has_matrix(study_of(tmp_path / name, audits))
        assert attack_notes(study_of(tmp_path / name, audits)) == []
        assert (
            MATRIX
            not in build_report([tmp_path / name / "run"], tmp_path / f"{name}.html").read_text()
        )
    assert has_matrix(study_of(tmp_path / "both", [{**BROKEN, "attack": KEDMI}, DEFENDED]))


def test_the_matrix_is_said_in_words(tmp_path):
    audits = [
        tried("GMI", 19),
        tried("KED-MI", 18),
        tried("GMI", 9, defenses=CALOR),
        tried("KED-MI", 9, defenses=CALOR),
        tried("GMI", 0, defenses=BIDO),
        tried("KED-MI", 0, defenses=BIDO),
        tried("GMI", 3, defenses=SMOOTHING, control=(1, 1)),
    ]
    run = make_run(tmp_path / "run", audits)
    out = build_report([run], tmp_path / "report.html")
    notes = json.loads(out.with_suffix(".json").read_text())["answers"][0]["attacks"]
    assert notes == [
        (
            "GMI is the strongest attack on 2 of 3 models whose audits are not vacuous and "
            "KED-MI on 1; where attacks are equally strong, each counts."
        ),
        "No reconstruction from BiDO would be recognised, whatever the attack.",
    ]
    assert all(note in Page(out).text for note in notes)
    alone = attack_notes(
        study_of(
            tmp_path / "all",
            [tried("GMI, long", 19), tried("KED-MI", 9), tried("GMI, long", 9, defenses=CALOR)],
        )
    )
    assert alone == ["“GMI, long” is the strongest attack on all 2 models."]
    one = [tried("GMI", 19), tried("KED-MI", 9), tried("GMI", 9, defenses=CALOR, control=(1, 1))]
    assert attack_notes(study_of(tmp_path / "one", one)) == [
        "GMI is the strongest attack on the one model whose audits are not vacuous."
    ]
    assert (
        attack_notes(study_of(tmp_path / "void", [{**audit, "control": (1, 1)} for audit in one]))
        == []
    )


@pytest.mark.parametrize(
    ("attack", "bare", "defended", "vacuous", "said"),
    [
        (
            BREPMI,
            (9, 9),
            (9, 12),
            False,
            ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."],
        ),
        (
            STRAIGHT,
            (9, 9),
            (9, 12),
            False,
            ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."],
        ),
        (
            KEDMI | {"samples": 8},
            (9, 9),
            (9, 12),
            False,
            ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."],
        ),
        (
            {"name": "gmi", "loss": "aim"},
            (9, 9),
            (9, 12),
            False,
            ["{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients."],
        ),
        # Ten points are not more than ten; an attack that is stronger everywhere proves no masking.
        (
            BREPMI,
            (9, 9),
            (7, 9),
            False,
            [
                (
                    "An adaptive or label-only attack exceeds the others by more than 10 points on "
                    "none of the 2 models with both kinds."
                )
            ],
        ),
        (
            BREPMI,
            (9, 13),
            (9, 12),
            False,
            [
                "{} on CALoR (special 60 % against plain 45 %): a sign of masked gradients.",
                "It also does so on undefended (special 65 % against plain 45 %), where no "
                "defense masks anything: it may simply be the stronger attack, "
                "and its lead on other models is no proof of masking.",
            ],
        ),
        (
            BREPMI,
            (9, 13),
            (9, 9),
            False,
            [
                "{} on undefended (special 65 % against plain 45 %), where no defense "
                "masks anything: it may simply be the stronger attack, "
                "and its lead on other models is no proof of masking.",
            ],
        ),
        # A plain attack that fails without any defense is weak.
        (
            BREPMI,
            (9, 9),
            (1, 12),
            True,
            [
                (
                    "An adaptive or label-only attack exceeds the others by more than 10 points on "
                    "none of the 1 model with both kinds."
                )
            ],
        ),
        (KEDMI, (9, 9), (9, 12), False, []),
    ],
)
def test_attacks_that_need_no_honest_gradient_tell_of_masked_ones(
    tmp_path, attack, bare, defended, vacuous, said
):
    control = {"control": (1, 1)} if vacuous else {}
    audits = [
        tried("plain", bare[0]),
        tried("special", bare[1], attack=attack),
        tried("plain", defended[0], defenses=CALOR, **control),
        tried("special", defended[1], defenses=CALOR, attack=attack),
    ]
    notes = [
        plain(note) for note in attack_notes(study_of(tmp_path, audits)) if "strongest" not in note
    ]
    assert notes == [
        note.format(
            "An adaptive or label-only attack exceeds every other one by more than 10 points"
        )
        for note in said
    ]


@pytest.mark.parametrize(
    ("attack", "kinds"),
    [
        ({"name": "gmi", "samples": 2}, ["CE", "adaptive"]),
        (
            {"name": "gmi", "straight_through": True, "loss": "margin"},
            ["margin or logit", "adaptive"],
        ),
        ({"name": "gmi", "loss": "aim"}, ["adaptive"]),
        ({"name": "gmi", "variant": "subtract"}, ["margin or logit", "adaptive"]),
        (
            {"name": "members", "base": {"name": "gmi", "variant": "margin"}},
            ["margin or logit", "adaptive"],
        ),
        ({"name": "unlearn", "base": {"name": "gmi", "loss": "ce"}}, ["CE", "adaptive"]),
        ({"name": "gmi", "variant": "students"}, ["adaptive"]),  # no gradient of the target
        ({"name": "gmi", "samples": 1}, ["CE"]),
        ({"name": "brepmi"}, ["label-only"]),
        ({"name": "brepmi", "samples": 8, "max_queries": 2000}, ["label-only", "adaptive"]),
        ({"name": "lomma"}, ["margin or logit"]),
    ],
)
def test_kinds_of_attack(tmp_path, attack, kinds):
    study = study_of(tmp_path, [{**BROKEN, "attack": attack}, {**DEFENDED, "attack": attack}])
    assert study.entries[0].attack_kinds == kinds
    undefended, defended = (subject.attack_kinds for subject in study.subjects)
    assert [kind for kind, state in defended.items() if state == "tried"] == kinds
    # Without a defense there is nothing to adapt to.
    assert undefended["adaptive"] == ("tried" if "adaptive" in kinds else "needless")
    assert defended["adaptive"] == ("tried" if "adaptive" in kinds else "missing")
    assert ("adaptive" in next(iter(study.untried))) == ("adaptive" not in kinds)
