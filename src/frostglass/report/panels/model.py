"""The panel of audits of models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from frostglass.auditing.controls import (
    DISAGREEMENT,
    LOW_TARGET_SUCCESS,
    LUCKY_PRIOR,
    OFF_MANIFOLD,
)
from frostglass.auditing.experiment import Judging
from frostglass.metrics._significance import LEVEL
from frostglass.report import parts
from frostglass.report.charts import scale, shape, track
from frostglass.report.entry import Entry
from frostglass.report.panels import common
from frostglass.report.panels.matrix import has_matrix, matrix_section
from frostglass.report.panels.measures import measures_sections
from frostglass.report.recipes import (
    TrainingRow,
    training_caption,
    training_notes,
    training_rows,
)
from frostglass.report.recognition import rate, top1_short, verifier_name
from frostglass.report.study import Study
from frostglass.report.text import Kind, number, p_value_text, span

CONVENTIONS = {
    "mean": "mean over all images and people (KED-MI, BiDO, LOMMA, TL-DMI, PPA, PLG-MI, CALoR)",
    "selected": "only the image with the highest confidence of the model (GMI)",
    "any": "a person counts when any image succeeds (GMI, “acc5”)",
    "first": "only the first image (BREP-MI)",
    "std_draws": "spread over images, as a standard deviation (BiDO)",
    "var_draws": "spread over images, as a variance (KED-MI)",
    "std_identities": "spread over people (VMI)",
    "top5": "among the evaluator's five best guesses, mean",
    "top5_last": "among the five best guesses, last image only (LOMMA, TL-DMI)",
}
MAX_DRAWN = 6  # audits on one scale that are not folded away
Check = tuple[str, str, list[parts.Cell]]  # name, meaning, and a cell for each audit or for all


def model_panel(study: Study, look: common.Look) -> parts.Panel:
    matrix = [matrix_section(study)] if has_matrix(study) else []
    papers = parts.Section("Papers", "How the papers would have counted it", _conventions(study))
    appendix = [_all_scores(study), *measures_sections(study), _training(study), papers]
    notes = [*_definitions(study), *training_notes(study)]
    findings = [*matrix, _scores(study)]
    return common.panel(study, look, notes, findings, _controls(study), appendix)


def _definitions(study: Study) -> list[str]:
    entry, candidates = study.entries[0], number(study.candidates, "count")
    accepted = entry.evaluators[entry.verifier - 1].verifier.true_accepts[0]
    text = (
        f"“Recognised” means that a face verifier ({verifier_name(entry)}) takes the "
        f"reconstruction for that person, as it takes {number(accepted, 'percent')} of the "
        f"person’s held-out images and {rate(entry)} of strangers. “Top-1” means that a classifier "
        "of the private people ranks the person first: one of them always is first, so this is not "
        "recognition. Intervals hold 95 % and are taken over people."
    )
    if study.candidates > 1:
        text += f" Shares are means over the {candidates} images kept per person."
    others = study.by_text(
        (f"{verifier_name(each)}, at a false-accept rate of {rate(each)}", each)
        for each in study.entries
        if each.verifier != entry.verifier
    )
    text += "".join(f" In {audits} another one decides: {name}." for name, audits in others.items())
    rule = "Where several attacks were tried on a model, the strongest counts"
    return [text, *common.strongest_note(study, rule)]


def _scores(study: Study) -> parts.Section:
    lines = [
        (
            entry.label,
            f"{'vacuous · ' if entry.vacuous else ''}model accuracy "
            f"{number(entry.facts.target.accuracy.test, 'percent')}",
            track(entry.marks),
        )
        for entry in study.shown
    ]
    text = (
        "Further left is more private. A good defense moves its marks towards the dashed line and "
        "keeps the model accurate. Two models are compared on the same people, one by one, so they "
        "may differ although their bars overlap."
    )
    if study.vacuous:
        text = "This audit is vacuous: marks on the left mean a weak attack, not a private model."
    if len(study.shown) < len(study.entries):
        many = number(len(study.entries), "count")
        text += f" Drawn are the audits that have images above; the table has all {many}."
    legend: list[str] = [
        Markup("{}, with 95 % interval").format(common.recognised_head(study)),
        *(
            Markup("{} top-1 of evaluator {}").format(shape(each, False), each + 1)
            for each in (int(name.rpartition("_")[2]) - 1 for name in study.first.top1)
        ),
    ]
    drawn: list[parts.Part] = [
        parts.Tracks(lines, scale()),
        parts.Items([*legend, "┆ prior only: random images from the same generator"], "legend"),
        parts.Note(text, "note after"),
    ]
    if len(lines) > MAX_DRAWN:
        drawn = [parts.Details(f"Scores of {len(lines)} audits on one scale", drawn)]
    content = [*common.tradeoff_parts(study), *drawn]
    return parts.Section("Scores", "How much leaks, and what a defense costs", content)


def _all_scores(study: Study) -> parts.Section:
    content = [_scores_table(study), parts.Note(_scores_note(study))]
    return parts.Section("All scores", "All scores", content)


def _scores_table(study: Study) -> parts.Table:
    top1 = study.first.top1
    top5 = [name.replace("top1", "top5") for name in top1]
    distance = all("distance" in entry.facts.scores for entry in study.entries)
    head: list[str] = ["audit", f"model accuracy on {study.tested_on}"]
    head += [common.recognised_head(study), *map(common.top1_head, top1)]
    head += [f"top-5 of evaluator {name.rpartition('_')[2]}" for name in top5]
    head += ["model itself accepts", *["distance to the person"] * distance, "queries", "time"]

    def row(entry: Entry) -> list[parts.Cell | str]:
        facts = entry.facts
        far: list[parts.Cell] = []
        if distance:
            score, baseline = facts.scores["distance"], facts.prior_only["distance"]
            ends = f"{number(score.low)}–{number(score.high)}"
            far = [parts.Cell(number(score.value), [ends, f"prior only {number(baseline.value)}"])]
        steps = [] if facts.steps is None else [f"{number(facts.steps, 'count')} steps"]
        return [
            common.entry_cell(entry),
            number(facts.target.accuracy.test, "percent"),
            *(
                common.score_cell(entry, name)
                for name in (entry.verified, *top1, *top5, "target_top1")
            ),
            *far,
            parts.Cell(number(facts.queries, "count"), steps),
            number(facts.seconds, "seconds"),
        ]

    rows = [row(entry) for entry in study.entries]
    return parts.Table("Scores of each audit", head, rows, long=study.many)


def _scores_note(study: Study) -> str:
    steps = any(entry.facts.steps is not None for entry in study.entries)
    return (
        "Small figures: 95 % interval over people, then the prior-only baseline: random images "
        "from the attacker's generator. Top-5: the person is among a classifier's five best "
        "guesses. Distance is measured between the first evaluator's "
        "features of a reconstruction and of the nearest private image of the person; smaller is "
        "closer. Queries are images the attack passes to the model, without those used to train a "
        f"prior{', steps the mean over its searches' if steps else ''}."
    )


def _crowd(row: TrainingRow) -> list[str]:
    """Whom else the model takes for its people."""
    shares = row.training.strangers_accepted, row.entry.facts.agreement
    return [number(share, "percent") for share in shares]


def _training(study: Study) -> parts.Section:
    rows = training_rows(study)
    staged, reported = any(row.stage for row in rows), any(row.facts for row in rows)
    differing = any(row.own for row in rows)
    crowded = any("decoys" in row.training.facts for row in rows)
    head = ["model", "weights", "training time", "relative to undefended", "epoch kept"]
    head += ["strangers accepted", "agreement"] * crowded
    head += ["first stage"] * staged + ["reported by its defenses"] * reported
    head += ["own recipe"] * differing
    body: list[list[parts.Cell | str]] = []
    for row in rows:
        total, trainable = row.entry.facts.target.parameters, row.training.trainable
        part = [] if trainable in (None, total) else [f"{number(trainable, 'count')} trainable"]
        stage, seconds = parts.Cell("–"), number(row.training.first_stage_seconds, "seconds")
        if row.stage:
            stage = parts.Cell(row.stage, [seconds])
        pairs = row.facts
        facts = Markup("").join(
            Markup("<p>{}</p>").format(common.bold(n, f" {t}")) for n, t in pairs
        )
        wrapped = [stage] * staged + [parts.Cell(facts or "–")] * reported
        wrapped += [parts.Cell(row.own or "–")] * differing
        body.append(
            [
                parts.named_cell(row.label),
                parts.Cell(number(total, "count"), part),
                number(row.training.seconds, "seconds"),
                number(row.training.times_undefended, "ratio"),
                row.epoch,
                *(_crowd(row) if crowded else ()),
                *(replace(cell, css="wrapped") for cell in wrapped),
            ]
        )
    text = "Times hold for the machine of this run."
    if staged:
        text += " The time of a first stage is not part of the training time."
    if crowded:
        text += (
            " Strangers accepted: the share of public images of which the model is as sure as of "
            "95 % of the held-out private ones. Agreement: the share of draws of the prior to "
            "which model and evaluators give the same name; it falls where a class is several "
            "people."
        )
    table = parts.Table("Training of each model", head, body, "trained")
    content = [parts.Note(training_caption(study)), table, parts.Note(text)]
    return parts.Section("Training", "How the models were trained", content)


def checks(study: Study) -> list[Check]:
    """Return each control with a verdict for each audit; what passes in a vacuous one is void."""

    def row(name: str, meaning: str, weigh: Callable[[Entry], parts.Cell]) -> Check:
        cells = [(entry, weigh(entry)) for entry in study.entries]
        return name, meaning, [_void(c) if e.vacuous and c.status == "ok" else c for e, c in cells]

    def positive(entry: Entry) -> parts.Cell:
        return _positive(entry)

    def limited(
        value: Any, kind: Kind, fine: Callable[[float], bool], absent: str = ""
    ) -> parts.Cell:
        if value is None:
            return parts.verdict(absent, "look")
        return parts.verdict(number(value, kind), "ok" if fine(value) else "look")

    def baseline(entry: Entry) -> parts.Cell:
        names = (*entry.facts.verified, *entry.top1)
        most = max(entry.facts.prior_only[name].value for name in names)
        return limited(most, "percent", lambda v: v <= LUCKY_PRIOR)

    def control(name: str, kind: Kind, fine: Callable[[float], bool], absent: str) -> Any:
        return lambda e: limited(getattr(e.facts.controls, name), kind, fine, absent)

    def success(entry: Entry) -> parts.Cell:
        value = entry.facts.scores["target_top1"].value
        return limited(value, "percent", lambda v: v >= LOW_TARGET_SUCCESS)

    def contradiction(entry: Entry) -> parts.Cell:
        status: parts.Status = "look" if entry.facts.controls.fooled else "ok"
        return parts.verdict(number(entry.score.value, "percent"), status, top1_short(entry))

    one, agree = "one classifier only", 1 - DISAGREEMENT
    return [
        row("Positive control", POSITIVE, positive),
        row("Prior only", PRIOR_ONLY, baseline),
        row("Classifiers agree", AGREE, control("agreement", "percent", lambda v: v >= agree, one)),
        row("Not fooled", FOOLED, contradiction),
        row(
            "Realistic images",
            REALISTIC,
            control("manifold", "ratio", lambda v: v <= OFF_MANIFOLD, "not measured"),
        ),
        row("Target success", SUCCESS, success),
        *((name, meaning, [cell]) for name, meaning, cell in common.evaluator_checks(study)),
    ]


POSITIVE = (
    "The same attack on an undefended model: share recognised above the prior-only baseline. "
    "Vacuous if a paired test over people gives p ≥ "
    f"{LEVEL:g}, or the difference is below the margin ({number(Judging().margin, 'points')} "
    "points unless set): if it fails there, its failure elsewhere proves nothing. A useless attack "
    f"passes in at most {number(LEVEL, 'rate')} of audits."
)
PRIOR_ONLY = (
    "Random images from the attacker's generator, evaluated the same way: the highest share that "
    "an evaluator accepts or a classifier ranks first by luck."
)
AGREE = "Share of reconstructions on which all classifiers agree whether the person is first."
FOOLED = (
    "Share recognised, and top-1. Where classifiers rank the person first and the face verifier "
    "does not accept the image, the image fools networks and no person."
)
REALISTIC = (
    "Distance to real public images, relative to the generator's own images. Far above 1 the "
    "reconstructions no longer resemble real images."
)
SUCCESS = (
    "Does the attacked model itself accept the images? If not, the attack did not converge, which "
    "is not privacy. High here and low for the evaluators: the model was fooled, and the person "
    "was not reconstructed."
)


def _positive(entry: Entry) -> parts.Cell:
    controls = entry.facts.controls
    if not controls.control_lift:
        return parts.verdict("not run", "fail")
    lift = controls.control_lift[entry.measure]
    needed = controls.people_needed
    people = f"{number(needed, 'count')} people would do" if needed else "nothing to show"
    small = [f"interval {span(lift, 'points')}", p_value_text(controls.p_value), people]
    status: parts.Status = "fail" if controls.vacuous else "ok"
    return parts.verdict(number(lift.value, "gain"), status, *small)


def _void(cell: parts.Cell) -> parts.Cell:
    return parts.verdict(cell.text, "void", *cell.small)


def _controls(study: Study) -> parts.Section:
    content: list[parts.Part] = [
        *_checks_table(study),
        *common.void_note(study),
        parts.Heading("Kinds of attack tried"),
        parts.Note(
            "A defense can hide its gradients from one loss and still leak to another. Each model "
            "should face every kind. An adaptive attack knows the defense: it averages over noise "
            "or changed answers, passes gradients through saturated layers, aims at the "
            "confidence that CALoR trains for, erases what MIDRE erases, or leaves the search to "
            "networks that never saw a trapdoor."
        ),
        common.kinds_table(study),
        *(
            parts.Note(
                f"Missing or vacuous for {names}: {kinds}. Masked gradients are not ruled out."
            )
            for kinds, names in study.untried.items()
        ),
        *common.closing_controls(study),
    ]
    return parts.Section("Controls", "Controls: can these numbers be believed?", content)


def _checks_table(study: Study) -> list[parts.Part]:
    """One column for each audit, or if they are many, one row."""
    controls, label = checks(study), "Controls of each audit"
    if not study.many:
        count = len(study.entries)
        rows: list[list[parts.Cell | str]] = [
            [parts.Cell(name, [meaning]), *(cells if len(cells) == count else cells * count)]
            for name, meaning, cells in controls
        ]
        heads = [parts.named_cell(entry.label) for entry in study.entries]
        return [parts.Table(label, ["control", *heads], rows, "checks")]
    each = [check for check in controls if len(check[2]) > 1]
    rows = [
        [parts.named_cell(entry.label), *(cells[place] for _, _, cells in each)]
        for place, entry in enumerate(study.entries)
    ]
    notes = [
        common.bold(name, f": {meaning}{f' {cells[0].text} {cells[0].tag}' * (len(cells) == 1)}")
        for name, meaning, cells in controls
    ]
    head = ["audit", *(name for name, _, _ in each)]
    table = parts.Table(label, head, rows, long=True)
    shown = parts.folded_if(True, f"Controls of all {len(rows)} audits", table)
    return [shown, parts.Items(notes, "plain note")]


def _conventions(study: Study) -> list[parts.Part]:
    rows: list[list[parts.Cell | str]] = []
    for entry in study.entries:
        for place in range(1, len(entry.top1) + 1):
            counted = entry.facts.conventions.get(f"evaluator {place}", {})
            values = [
                number(counted.get(name), "plain" if name == "var_draws" else "percent")
                for name in CONVENTIONS
            ]
            rows.append([parts.named_cell(entry.label), number(place), *values])
    head = ["audit", "evaluator", *CONVENTIONS]
    return [
        parts.Note(
            "Papers report top-1, averaged over images and people in different ways. These are all "
            "of them."
        ),
        parts.Table("Conventions of the papers", head, rows, long=study.many),
        parts.Items(
            [common.bold(name, f": {text}") for name, text in CONVENTIONS.items()], "plain note"
        ),
    ]
