"""The first sentences of a report on features."""

import re

import pytest

from feature_folders import (
    ADAPTED,
    CRAFTED,
    CRAFTER,
    OPEN,
    WEAK,
    feature_page,
    interval_text,
    scores_of,
)


def test_answer_says_what_leaves_what_is_reconstructed_and_what_protection_costs(tmp_path):
    leaves, leak, change = feature_page(tmp_path, [OPEN, CRAFTED]).sentences
    plain_scores, crafted = (scores["similarity"] for scores in scores_of(tmp_path))
    assert leaves == (
        "Instead of each image, its feature leaves the device, so that a server can "
        "predict 3 attributes: "
        "8 192 numbers (32×16×16), the output of layer stage1 of a cnn."
    )
    assert leak == (
        f"From unprotected features, the attack decoder reconstructed images of 8 "
        f"people that resemble the true ones with a similarity of {interval_text(plain_scores)}; "
        "two photos of one person reach 0.70, photos of two people 0.02 and the "
        "prior-only baseline 0.05. By 25 % of them the person would be recognised (prior-only "
        "baseline 0 %): a face verifier (evaluator 3, faces32, never trained on these people) "
        "accepts them at a false-accept rate of 1 %."
    )
    assert change == (
        f"Crafter lowers this to a similarity of {interval_text(crafted)} by decoder and costs "
        f"0.08 of utility (MCC 0.61 → 0.53)."
    )


@pytest.mark.parametrize(
    ("similarity", "mcc", "said"),
    [
        (
            0.6,
            0.61,
            (
                r"Crafter does not clearly lower it: a similarity of 0\.60 .* by decoder, no "
                r"difference beyond chance on the same people; it costs no utility \(MCC 0\.61 "
                r"→ 0\.61\)\."
            ),
        ),
        (
            0.601,
            0.53,
            (
                r"Crafter does not lower it but raises it to a similarity of 0\.60 .* and costs "
                r"0\.08 of utility"
            ),
        ),
        (
            0.599,
            0.66,
            (
                r"Crafter lowers this to a similarity of 0\.60 .* and gains 0\.05 of utility "
                r"\(MCC 0\.61 → 0\.66\)\."
            ),
        ),
        (
            0.05,
            0.53,
            (
                r"Crafter lowers this to a similarity of 0\.05 .* by decoder, not above the "
                r"prior-only baseline beyond chance, and costs"
            ),
        ),
    ],
)
def test_protections_are_compared_person_by_person(tmp_path, similarity, mcc, said):
    # The intervals overlap widely; person by person the difference is the same for everybody.
    change = feature_page(
        tmp_path, [OPEN, {**CRAFTED, "similarity": similarity, "mcc": mcc}]
    ).sentences[2]
    assert re.fullmatch(said if said.endswith(r"\.") else f"{said}.*", change), change


def test_the_strongest_sound_attack_counts(tmp_path):
    latent = {"name": "latent", "tries": 2}
    audits = [
        {**OPEN, "case": "decoder"},
        {**OPEN, "case": "search", "attack": latent, "similarity": 0.64, "hits": 32},
        {**CRAFTED, "case": "decoder"},
        {**CRAFTED, "case": "search", "attack": latent, "similarity": 0.25},
        {**CRAFTED, "case": "A1", "attack": ADAPTED, "similarity": 0.41, "control": 0.06},
    ]
    page = feature_page(tmp_path, audits)
    assert page.sentences[1].startswith(
        "From unprotected features, the strongest of 2 attacks (search) reconstructed "
        "images of 8 people"
    )
    assert "By 100 % of them the person would be recognised" in page.sentences[1]
    assert page.sentences[2].startswith("Crafter lowers this to a similarity of 0.30 ")
    assert "by decoder and costs" in page.sentences[2]
    text = page.text.replace(" ,", ",").replace(" .", ".").replace(" :", ":")
    assert "the strongest sound one counts: unprotected (search), Crafter (decoder)." in text
    # A leak is a leak, even in a vacuous audit.
    assert (
        "On Crafter a vacuous audit (A1) scores more than the strongest sound one, "
        "0.41: a leak is a leak all the same."
    ) in page.text
    reason = "the same attack does not break the undefended model"
    assert f"These audits are vacuous and prove nothing: Crafter · A1 ({reason}" in page.text
    assert "VACUOUS" not in page.text


def test_an_attack_that_predicts_embeddings_makes_no_image(tmp_path):
    page = feature_page(tmp_path, [{**OPEN, "attack": {"name": "mapper"}}])
    assert page.sentences[1].startswith(
        "From unprotected features, the attack mapper predicted face embeddings, "
        "without making an image: for 8 people with a similarity of 0.60 "
    )
    assert "recognised" not in page.sentences[1]
    assert page.sentences[2] == (
        "No protected features are part of this report, so it does not say what a "
        "protection would change."
    )
    assert "its row shows the public image nearest to the embedding" in page.text
    head, row = page.tables["Scores of each audit"]
    assert row[head.index("similarity")].endswith("image shown 0.59")


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
            "similarity": similarity,
            "mcc": mcc,
        }
        for beta, similarity, mcc in strengths
    ]
    page = feature_page(tmp_path, [OPEN, *audits])
    assert page.sentences[2] == (
        "With 5 protections it is between 0.12 under Crafter (beta=0.1) and 0.60, and "
        "they cost between 0.01 and 0.30 of utility (MCC); "
        "Crafter (beta=4.0) does not clearly lower it."
    )


def test_without_unprotected_features_the_control_speaks(tmp_path):
    rest = feature_page(
        tmp_path,
        [
            {**CRAFTED, "plain": 0.6},
            {**CRAFTED, "defenses": [{"name": "disco"}], "similarity": 0.2},
        ],
    ).sentences[2]
    similarity = scores_of(tmp_path)[1]["similarity"]
    assert rest == (
        f"For Disco it is a similarity of {interval_text(similarity)}; on unprotected features the "
        f"same attack scores 0.55 above the prior-only baseline (at least 0.55), so it "
        f"works there; "
        "compared with plain features of the same network Crafter costs 0.07 of "
        "utility (MCC 0.60 → 0.53)."
    )


def test_what_a_trained_protection_costs_is_not_guessed(tmp_path):
    page = feature_page(tmp_path, [{**CRAFTED, "defenses": [{"name": "disco"}]}])
    assert page.sentences[1].startswith(
        "From features protected by Disco, the attack decoder reconstructed"
    )
    assert page.sentences[2].endswith(
        "those are not part of this report, so the cost of a protection is not known."
    )


def test_each_protection_is_compared_with_its_own_layer(tmp_path):
    deeper = {"cut": "stage2", "shape": (64, 8, 8)}
    audits = [
        OPEN,
        {**OPEN, **deeper, "similarity": 0.3, "mcc": 0.7},
        {**CRAFTED, **deeper, "mcc": 0.65},
    ]
    leaves, leak, change = feature_page(tmp_path, audits).sentences
    assert leaves.endswith(
        ": depending on the cut, 8 192 numbers (32×16×16), the output of layer stage1 of a cnn; or "
        "4 096 numbers (64×8×8), the output of layer stage2 of a cnn."
    )
    assert leak.startswith("From unprotected features (cut=stage1), the attack decoder")
    assert change.startswith("Crafter does not clearly lower it: a similarity of 0.30")
    assert change.endswith("it costs 0.05 of utility (MCC 0.70 → 0.65).")


def test_a_vacuous_audit_says_so_first_and_nothing_reassuring(tmp_path):
    page = feature_page(tmp_path, [WEAK, {**WEAK, "defenses": CRAFTER}])
    assert page.sentences[:2] == [
        (
            "This audit is VACUOUS: the attack fails even on unprotected features, so its "
            "failure on others proves nothing."
        ),
        "A low number means a weak attack here, not a safe feature.",
    ]
    assert len(page.sentences) == 3
    assert page.sentences[2].startswith("Instead of each image, its feature leaves the device")
    assert any(
        tag == "div" and values.get("class") == "void" and values.get("role") == "alert"
        for tag, values in page.tags
    )
    assert "it cannot show that a defense works" in page.text
    assert "This audit is vacuous: low points mean a weak attack, not a safe feature." in page.text
    assert not [
        sign
        for sign in ("✓ pass", "✓ tried", "lowers", "Right and low is best")
        if sign in page.text
    ]
    assert not [tag for tag, values in page.tags if values.get("aria-label") == "strongest"]


def test_no_control_is_vacuous_and_a_leak_stays_a_leak(tmp_path):
    sentences = feature_page(tmp_path, [{**OPEN, "control": None}]).sentences
    assert sentences[0] == (
        "This audit is VACUOUS: no positive control was run, so a failed attack cannot "
        "be distinguished from a good protection."
    )
    assert sentences[2] == (
        f"A high number is a leak all the same: a similarity of "
        f"{interval_text(scores_of(tmp_path)[0]['similarity'])} for unprotected · decoder."
    )


def test_each_reason_is_told_with_the_attacks_it_holds_for(tmp_path):
    audits = [
        {**WEAK, "case": "A"},
        {**OPEN, "case": "B", "control": None},
        {**OPEN, "case": "C", "partial": 5},
        {**WEAK, "case": "D"},
    ]
    page = feature_page(tmp_path, audits)
    assert page.sentences[0] == (
        "This audit is VACUOUS: the attack fails even on unprotected features, so its "
        "failure on others proves nothing (A and D); "
        "no positive control was run, so a failed attack cannot be distinguished from "
        "a good protection (B); "
        "the search stopped early for most people, so a low number says nothing about "
        "the features (C)."
    )
    assert "the search stopped early for 5 of 8 people" in page.text
    alone = feature_page(tmp_path / "alone", [{**OPEN, "partial": 5}]).sentences[0]
    assert alone == (
        "This audit is VACUOUS: the search stopped early for most people, so a low "
        "number says nothing about the features."
    )


def test_a_weak_embedder_makes_every_similarity_worthless(tmp_path):
    page = feature_page(tmp_path, [OPEN, CRAFTED], references=(0.3, 0.15))
    assert page.sentences[:2] == [
        (
            "This audit is VACUOUS: the network that compares faces hardly tells people "
            "apart, so no similarity on this page means anything."
        ),
        "A low number means a weak embedder here, not a safe feature.",
    ]
    assert len(page.sentences) == 3
    assert page.tables["Controls of the evaluators"][1][1] == "0.30 and 0.15 ✕ vacuous"
    assert page.tables["Positive control of each audit"][1][1] == "+0.55 at least +0.55 void"


def test_a_vacuous_protection_is_named_beside_sound_ones(tmp_path):
    sentences = feature_page(
        tmp_path, [OPEN, {**CRAFTED, **WEAK}, {**CRAFTED, "defenses": [{"name": "disco"}]}]
    ).sentences
    assert sentences[0].startswith(
        "For Crafter this audit is VACUOUS: the attack fails even on unprotected features"
    )
    assert sentences[4].startswith("Disco lowers this to a similarity of 0.30")
    assert "Crafter" not in "".join(sentences[2:])


def test_missing_audits_and_kinds_are_said(tmp_path):
    page = feature_page(
        tmp_path, [OPEN, CRAFTED], failed=["crafter, A1: no search came to its end"]
    )
    assert page.text.count("crafter, A1: no search came to its end") == 2
    assert "No sound attack of these kinds was run on Crafter: white box and adaptive." in page.text
    assert "was run on unprotected" not in page.text
