"""The panel of audits of features that leave a device."""

import torch

from frostglass.metrics._lda import lda_chance
from frostglass.report import parts
from frostglass.report.entry import Entry
from frostglass.report.facts import Utility
from frostglass.report.panels import common
from frostglass.report.panels.measures import measures_sections
from frostglass.report.recognition import rate
from frostglass.report.study import Study
from frostglass.report.text import number, span

ACCESS = {
    "encode": "plain features of its own images",
    "encoder": "the device’s network",
    "protection": "protected features of its own images",
}
MEASURES = {
    "emd_start": "distance before",
    "emd_end": "distance after",
    "residual_start": "inversion error before",
    "residual_end": "inversion error after",
    "deviation": "mean square change",
    "gradient_end": "gradient norm at the end",
    "terms": "terms of the inverse",
    "bits": "bits of a feature",
    "beyond_limit": "share beyond the limit",
}
SCORE_NOTES = (
    "Small figures: 95 % interval over people, then the prior-only baseline; “above” is the "
    "difference from that baseline, person by person.",
    "SSIM, PSNR and FSIM compare pixels and shapes with the true image, not identities. “Feature "
    "explained” is how much of the released feature the reconstruction accounts for: 1 for all of "
    "it, 0 for no more than the mean of all features; it may be negative.",
)
COST_NOTES = (
    "EMD is the earth mover’s distance between reconstructions and the prior-only baseline, "
    "Crafter’s privacy index; the floor is that between two sets of prior-only images. Near the "
    "floor, or below it for blurred images, reconstructions look like anybody.",
    "LDA is the distance between reconstructed people relative to the variation within each; a "
    "higher value means more leakage.",
    "Distance to real images is measured to the nearest public image, in an evaluator’s features. "
    "Queries are images the attack passes to the device. Every attacker has the released features "
    "and the public images, of other people.",
)


def features_panel(study: Study, look: common.Look) -> parts.Panel:
    plot = common.tradeoff_parts(study)
    title = "What a protection gains, and what it costs"
    findings = [_matrix(study), *([parts.Section("Trade-off", title, plot)] if plot else [])]
    appendix = [_scores(study), *measures_sections(study), _protections(study)]
    notes = [*_definitions(study), *feature_notes(study)]
    return common.panel(study, look, notes, findings, _controls(study), appendix)


def _definitions(study: Study) -> list[str]:
    facts = study.subjects[0].facts
    scale = facts.controls.references
    same, other = (number(x, "decimal") for x in (scale.same_person, scale.different_people))
    images = number(len(study.first.identities) * facts.images_per_person, "count")
    rule = "Where several attacks were tried on a protection, the strongest sound one counts"
    return [
        "“Similarity” is the cosine between the embeddings of the reconstruction and of the true "
        f"image, by a separate network trained on public people: {same} for two photos of one "
        f"person, {other} for photos of two people. The prior-only baseline is what an attacker "
        "has without any feature: random images of a generator, or, without one, images of other "
        "people. Every image and every reconstruction counts; intervals hold 95 % and are taken "
        "over people.",
        f"“Utility” is how well the server predicts attributes of the same {images} held-out "
        "images: MCC, the mean over attributes of Matthews correlation, is 1 for perfect "
        "predictions and 0 for random ones.",
        f"“Recognised” means that evaluator {study.entries[0].verifier} accepts the image as the "
        f"person, at a false-accept rate of {rate(study.entries[0])}. “Top-1” means that a "
        "classifier of the private people ranks the person first, which is not recognition.",
        *common.strongest_note(study, rule),
    ]


def feature_notes(study: Study) -> list[str]:
    """Name vacuous audits that score more than the sound ones."""
    notes = []
    for subject in study.subjects:
        best = max(subject.entries, key=lambda entry: entry.score.value)
        if best is not subject.strongest and best.vacuous:
            notes.append(
                f"On {subject.name} a vacuous audit ({best.method}) scores more than the strongest "
                f"sound one, {number(best.score.value, 'decimal')}: a leak is a leak all the same."
            )
    return notes


def _useful(utility: Utility, name: str, css: str = "") -> parts.Cell:
    value, low, high = (
        number(getattr(utility, f"{name}{end}"), "decimal") for end in ("", "_low", "_high")
    )
    return parts.Cell(value, [f"{low} to {high}"], css=css)


def _limit(utility: Utility | None) -> parts.Cell | str:
    return "–" if utility is None else _useful(utility, "mean_mcc")


def _matrix(study: Study) -> parts.Section:
    subjects = study.subjects
    rows: list[list[parts.Cell | str]] = []
    for method, row in common.squares(study).items():
        cells = [
            common.square_cell(
                square, subject, [span(square.entry.score, "decimal")] if square.entry else []
            )
            for square, subject in zip(row, subjects, strict=True)
        ]
        rows.append([method, *cells])
    prior_only = parts.Cell("prior only", ["images without any feature"], css="sum")
    baselines = [number(subject.strongest.baseline, "decimal") for subject in subjects]
    rows.append([prior_only, *(parts.Cell(text, css="sum") for text in baselines)])
    for name in ("mcc", "auc"):
        header = parts.Cell(f"server’s {name.upper()}", ["mean over attributes"], css="sum")
        rows.append([header, *(_useful(s.utility, f"mean_{name}", "sum") for s in subjects)])
    same = number(subjects[0].facts.controls.references.same_person, "decimal")
    label = "Every attack on every protection"
    head = ["attack", *(subject.name for subject in subjects)]
    content: list[parts.Part] = [
        parts.Note(
            f"Similarity of reconstructions to the true images; two photos of one person reach "
            f"{same}. Below: the prior-only baseline, and the utility for the server."
        ),
        parts.Table(label, head, rows, "pairs leaving"),
        common.matrix_legend(study, "strongest sound attack"),
    ]
    return parts.Section("Attacks and protections", label, content)


def _scores(study: Study) -> parts.Section:
    head: list[parts.Cell | str] = ["audit", "similarity", common.recognised_head(study)]
    head += [common.top1_head(name) for name in study.first.top1]
    head += ["SSIM", "PSNR, dB", "FSIM", "feature explained"]
    more = ["audit", "EMD to prior only", "separation of people (LDA)", "distance to real images"]
    more += ["queries", "time", "attacker’s access"]
    content: list[parts.Part] = [
        parts.Table(
            "Scores of each audit", head, list(map(_score_row, study.entries)), long=study.many
        ),
        parts.Items(SCORE_NOTES, "plain note"),
        parts.Table(
            "Cost and distances", more, list(map(_cost_row, study.entries)), long=study.many
        ),
        parts.Items(COST_NOTES, "plain note"),
    ]
    return parts.Section("Scores", "All scores", content)


def _score_row(entry: Entry) -> list[parts.Cell | str]:
    facts, lift = entry.facts, entry.facts.controls.lift["similarity"]
    similarity = common.score_cell(entry, "similarity")
    low, high = (number(x, "change") for x in (lift.low, lift.high))
    small = [*similarity.small, f"above {number(lift.value, 'change')} ({low} to {high})"]
    if entry.embeds:
        small.append(f"image shown {number(facts.scores['face_similarity'].value, 'decimal')}")
    names = (entry.verified, *entry.top1, "ssim", "psnr", "fsim")
    return [
        common.entry_cell(entry),
        parts.Cell(similarity.text, small),
        *(common.score_cell(entry, name) for name in names),
        number(facts.explained, "decimal"),
    ]


def _cost_row(entry: Entry) -> list[parts.Cell | str]:
    facts, release = entry.facts, entry.facts.facts
    far, baseline = facts.scores["manifold"].value, facts.prior_only["manifold"].value
    people, candidates = entry.reconstructions.shape[:2]
    by_chance = []
    if release.lda is not None:  # one image a person has no score, and no chance either
        chance = lda_chance(torch.arange(people).repeat_interleave(candidates))
        by_chance.append(f"by chance {number(chance)}")
    access = "; ".join(ACCESS.get(each, each) for each in facts.access)
    count = candidates // facts.images_per_person
    each = [f"{number(count, 'count')} reconstructions per image"] if count > 1 else []
    return [
        common.entry_cell(entry),
        parts.Cell(number(release.emd), [f"floor {number(release.emd_floor)}"]),
        parts.Cell(number(release.lda), by_chance),
        parts.Cell(number(far), [f"prior only {number(baseline)}"]),
        number(facts.queries, "count"),
        number(facts.seconds, "seconds"),
        parts.Cell(access or "the released features alone", each, css="wrapped"),
    ]


def _protections(study: Study) -> parts.Section:
    columns = list(dict.fromkeys(name for s in study.subjects for name in s.noted))
    priced = all(subject.facts.facts.device_share is not None for subject in study.subjects)
    head = ["protection", *["computed on the device"] * priced, "features changed"]
    head += ["MCC of plain features", "MCC of released features"]
    limited = any(subject.facts.ceiling_utility for subject in study.subjects)
    head += ["MCC at the start"] * limited
    head += ["batches", *(MEASURES.get(name, name.replace("_", " ")) for name in columns)]
    rows: list[list[parts.Cell | str]] = []
    for subject in study.subjects:
        facts, noted = subject.facts, subject.noted
        size = "×".join(map(str, facts.facts.feature_shape))
        rows.append(
            [
                parts.named_cell(subject.label, f"{size} at {facts.cut}"),
                *[number(facts.facts.device_share, "percent")] * priced,
                number(facts.facts.relative_deviation, "percent"),
                _useful(facts.plain_utility, "mean_mcc"),
                _useful(facts.utility, "mean_mcc"),
                *([_limit(facts.ceiling_utility)] if limited else []),
                number(len(facts.released), "count") if facts.released else "–",
                *(number(noted.get(n), "count" if n == "images" else "plain") for n in columns),
            ]
        )
    text = (
        "“Features changed” is the mean square change of a feature by its protection, relative to "
        "the mean square of plain features; 0 where features are released as the network computes "
        "them, although it may have been trained to reveal less. Plain features are those of the "
        "same network."
    )
    if priced:
        text += " “Computed on the device” is the share of the network’s multiply-adds."
    if limited:
        text += (
            " “At the start” are features of the generated images that a protection in latent "
            "space starts from: its ceiling, because it releases features of generated images only."
        )
    if columns:
        text += " The other figures are what a protection noted by batch, as means over images"
        if "emd_end" in columns:
            text += (
                "; “distance” is the earth mover’s distance between what its simulated attack "
                "reconstructs and random draws of the prior, according to its own critic"
            )
        text += "."
    title = "What each protection did"
    return parts.Section("Protections", title, [parts.Table(title, head, rows), parts.Note(text)])


def _positive_control(study: Study, entry: Entry | None) -> parts.Cell | str:
    if entry is None:
        return "–"
    lift = entry.facts.controls.control_lift.get("similarity")
    if lift is None:
        return parts.verdict("not run", "fail")
    # With a weak embedder the control means nothing.
    status: parts.Status = "void" if study.weak_embedder else "fail" if entry.vacuous else "ok"
    return parts.verdict(
        number(lift.value, "change"), status, f"at least {number(lift.low, 'change')}"
    )


def _evaluators_table(study: Study) -> parts.Table:
    references, embedder = study.subjects[0].facts.controls.references, study.first.networks[-1]
    same, other = (
        number(x, "decimal") for x in (references.same_person, references.different_people)
    )
    status: parts.Status = "fail" if study.weak_embedder else "void" if study.vacuous else "ok"
    meaning = (
        "Similarity of two photos of one person, and of two people, according to the network that "
        f"compares them ({embedder.model}, trained on public people). If they hardly differ, no "
        "similarity means anything."
    )
    checks = [
        ("Embedder", meaning, parts.verdict(f"{same} and {other}", status)),
        *common.evaluator_checks(study),
    ]
    rows = [[parts.Cell(name, [text]), cell] for name, text, cell in checks]
    return parts.Table("Controls of the evaluators", ["control", "all audits"], rows, "checks")


def _controls(study: Study) -> parts.Section:
    positive = [
        [method, *(_positive_control(study, square.entry) for square in row)]
        for method, row in common.squares(study).items()
    ]
    head = ["attack", *(subject.name for subject in study.subjects)]
    content: list[parts.Part] = [
        parts.Heading("Positive control"),
        parts.Note(
            "The same attack on unprotected features of an undefended network: its similarity "
            "above the prior-only baseline. If it fails there, its failure elsewhere proves "
            "nothing."
        ),
        parts.Table("Positive control of each audit", head, positive),
        parts.Heading("The evaluators"),
        _evaluators_table(study),
        *common.void_note(study),
        parts.Heading("Kinds of attack tried"),
        parts.Note(
            "A protection can stop one kind of attack and still leak to another. Each should face "
            "every kind: one that queries the device for plain features of its own images (black "
            "box), one that has the device’s half of the network (white box), one that sees "
            "protected features of its own images, or repeated releases of the victims’ "
            "(adaptive). Where features are released as the network computes them, every attack "
            "that learns from the network is adaptive."
        ),
        common.kinds_table(study),
        *common.closing_controls(study),
    ]
    return parts.Section("Controls", "Controls: can these numbers be believed?", content)
