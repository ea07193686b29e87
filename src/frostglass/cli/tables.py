"""Tables on stdout: scores of a run and estimates of a config."""

import shutil
from collections.abc import Sequence
from typing import Any

from rich.box import HEAVY_HEAD, SIMPLE, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from frostglass.auditing.expand import NO_GRID
from frostglass.report.labels import accuracy_images, model_name
from frostglass.report.tables import SPACES

Row = dict[str, str]
WIDTH = 160  # columns where stdout is no terminal, as in a log


def print_table(title: str, rows: Sequence[Row], left: Sequence[str] = ()) -> None:
    """Print rows as a table, without a frame if that fits better, else one block per row.

    Columns in `left` are aligned left and may wrap; others never do, so no digit is lost.
    """
    print(title)
    # Brackets and colons in a user's names are plain text.
    console = Console(markup=False, emoji=False, highlight=False)
    terminal = shutil.get_terminal_size((WIDTH, 24)).columns
    for frame in (HEAVY_HEAD, SIMPLE):
        table = _table(rows, left, frame)
        needed = Measurement.get(console, console.options.update(max_width=1000), table)
        if needed.minimum <= terminal:
            console.width = min(needed.maximum, terminal)
            console.print(table)
            return
    widest = max(map(len, rows[0]))
    for row in rows:
        heading, *others = row.items()
        print(heading[1])
        for column, value in others:
            print(f"  {column:<{widest}}  {value}")


def _table(rows: Sequence[Row], left: Sequence[str], frame: Box) -> Table:
    framed = frame is HEAVY_HEAD
    padding = (0, 1) if framed else (0, 1, 0, 0)
    table = Table(box=frame, padding=padding, pad_edge=framed, show_edge=framed)
    for column in rows[0]:
        if column in left:
            table.add_column(column, overflow="fold")
        else:
            width = max(len(column), *(len(row[column]) for row in rows))
            table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row.values())
    return table


def print_scores(facts: dict[str, Any]) -> None:
    """Print a run: one row per audit, what the columns mean, and every warning."""
    surface = facts["audits"][0]["surface"]
    row = _model_row if surface == "model" else _feature_row
    people = f"{len(facts['identities'])} people attacked"
    if surface == "features":
        people += f", {facts['audits'][0]['images_per_person']} images each"
    several = any(
        score["any"] != score["first"]
        for audit in facts["audits"]
        for score in audit["scores"].values()
        if "any" in score
    )
    rows = [{"audit": _title(audit), **row(audit, several)} for audit in facts["audits"]]
    print_table(f"{facts['name']}: {people}", rows, left=["audit"])
    for line in _explained(facts, surface):
        print(line)
    if several and surface == "model":
        print("first, any: shares recognised by the first, and by any, of a person's candidates")
    notes: dict[str, list[str]] = {}
    for audit in facts["audits"]:
        for warning in audit["controls"]["warnings"]:
            notes.setdefault(warning, []).append(audit["label"])
    for warning, labels in notes.items():
        where = "all audits" if len(labels) == len(facts["audits"]) > 1 else "; ".join(labels)
        print(f"note ({where}): {warning}")
    for missing in facts["not_run"]:
        print(f"not run: {missing}")


def print_answers(answers: Sequence[dict[str, Any]]) -> None:
    """Print pass, fail or inconclusive for each model or protection with thresholds."""
    for answer in answers:
        reasons = f" ({'; '.join(answer['reasons'])})" if answer["reasons"] else ""
        text = f"{answer['outcome'].upper()}: {answer['subject']}{reasons}"
        print(text.translate(SPACES))


def _explained(facts: dict[str, Any], surface: str) -> list[str]:
    """Say what the columns mean, and how good each evaluator is on real images."""
    lines = [
        *_deciders(facts["audits"]),
        "top-1: share that each classifier of the private people ranks first, which is not "
        "recognition",
        "evaluators on held-out images: "
        + ", ".join(_quality(number, each) for number, each in enumerate(facts["evaluators"], 1)),
    ]
    if surface == "model":
        return [
            *lines,
            "prior only: share recognised of prior-only draws; target: top-1 of the target itself",
            *_accuracies([audit["target"] for audit in facts["audits"]]),
        ]
    references = facts["audits"][0]["controls"]["references"]
    same, different = (references[name] for name in ("same_person", "different_people"))
    return [
        *lines,
        f"similarity: {same:.2f} is another image of the same person, {different:.2f} another "
        "person",
        "prior only: similarity of images made without any feature",
    ]


def _deciders(audits: Sequence[dict[str, Any]]) -> list[str]:
    """Say which evaluator decides; data without an embedder may have another one."""
    labels: dict[int, list[str]] = {}
    for audit in audits:
        labels.setdefault(_deciding(audit), []).append(audit["label"])
    first = {_deciding(audit): audit for audit in reversed(audits)}
    lines = []
    for number, named in labels.items():
        evaluator = first[number]["evaluators"][number - 1]
        where = f" ({'; '.join(named)})" if len(labels) > 1 else ""
        lines.append(
            f"recognised{where}: share that a face verifier (evaluator {number}, "
            f"{evaluator['model']}) accepts as the person, at a false-accept rate of "
            f"{100 * evaluator['verifier']['rates'][0]:.2g}% (95% interval)"
        )
    return lines


def _accuracies(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Say on which images accuracy was measured: given models may have been trained on them."""
    notes = {False: "", True: ", which a given model may have been trained on"}
    return [
        f"accuracy: on {accuracy_images(given=given)}{note}"
        for given, note in notes.items()
        if any(target["given"] is given for target in targets)
    ]


def _quality(number: int, evaluator: dict[str, Any]) -> str:
    accuracy = evaluator["accuracy"]
    right = f"{percent(accuracy['test'])} correct, " if accuracy else ""
    accepts = f"accepts {percent(evaluator['verifier']['true_accepts'][0])}"
    excluded = ", excluded" if evaluator["excluded"] else ""
    return f"{number} {evaluator['model']} ({right}{accepts}{excluded})"


def _deciding(audit: dict[str, Any]) -> int:
    """Return the number of the evaluator whose verification decides."""
    return 1 + next(n for n, each in enumerate(audit["evaluators"]) if each["decides"])


def _top1(audit: dict[str, Any]) -> Row:
    """Return the shares of all classifiers in one column."""
    scores = audit["scores"]
    names = [f"top1_{number}" for number in range(1, len(audit["evaluators"]) + 1)]
    shares = [percent(scores[name]["value"]) for name in names if name in scores]
    return {"top-1": ", ".join(shares)} if shares else {}


def _title(audit: dict[str, Any]) -> str:
    """Return the label of an audit; without a grid it is the name of the model."""
    if audit["label"] != NO_GRID:
        return str(audit["label"])
    defenses = [defense["name"] for defense in audit["defenses"]]
    return model_name(defenses, given=audit["target"]["given"])


def _guesses(score: dict[str, float], several: bool) -> Row:
    """Return the shares by the first candidate of each person and by any of them."""
    if not several:
        return {}
    return {"first, any": f"{percent(score['first'])}, {percent(score['any'])}"}


def _model_row(audit: dict[str, Any], several: bool) -> Row:
    name = f"verified_{_deciding(audit)}"
    return {
        "recognised": with_interval(audit["scores"][name]),
        **_guesses(audit["scores"][name], several),
        "prior only": percent(audit["prior_only"][name]["value"]),
        **_top1(audit),
        "accuracy": percent(audit["target"]["accuracy"]["test"]),
        "target": percent(audit["scores"]["target_top1"]["value"]),
        **_cost(audit),
    }


def _feature_row(audit: dict[str, Any], several: bool) -> Row:
    scores, similarity = audit["scores"], audit["scores"]["similarity"]
    low, high = similarity["low"], similarity["high"]
    return {
        "MCC": f"{audit['utility']['mean_mcc']:.2f}",
        "AUC": f"{audit['utility']['mean_auc']:.2f}",
        "similarity (95 %)": f"{similarity['value']:.2f} ({low:.2f} to {high:.2f})",
        "prior only": f"{audit['prior_only']['similarity']['value']:.2f}",
        "recognised": percent(scores[f"verified_{_deciding(audit)}"]["value"]),
        **_top1(audit),
        **({"SSIM": f"{scores['ssim']['value']:.2f}"} if "ssim" in scores else {}),
        **_cost(audit),
    }


def _cost(audit: dict[str, Any]) -> Row:
    return {"queries": f"{audit['queries']:,}", "seconds": f"{audit['seconds']:.0f}"}


def percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def with_interval(score: dict[str, float]) -> str:
    low = percent(score["low"]).removesuffix("%")
    return f"{percent(score['value'])} ({low}–{percent(score['high'])})"


def print_costs(costs: dict[str, Any]) -> None:
    """Print what a config would run, how long that takes and how much memory."""
    rows = [
        {
            "step": row["step"],
            "for": row["label"],
            "work": row["work"],
            "about": "done" if row["done"] else duration(row["seconds"]),
        }
        for row in costs["steps"]
    ]
    print_table("what this config would run", rows, left=["step", "for", "work"])
    unknown = costs["memory_unknown"]
    step = f" ({costs['memory_step']})" if costs["memory_step"] else ""
    memory = f"{'at least' if unknown else 'about'} {costs['memory_mib'] / 1024:.1f} GiB"
    print(
        f"no problems; about {duration(costs['seconds'])} on this machine, {memory} of memory{step}"
    )
    print("estimated by a dry run without data: nothing was trained")
    print(f"this is `frostglass run`; not estimated: {', '.join(costs['not_estimated'])}")
    if unknown:
        print(f"the memory estimate is incomplete: {unknown}")


def print_advice(advice: Sequence[tuple[str, float]]) -> None:
    """Print what would make a long run shorter, each with the time it would then take."""
    if advice:
        print("to make it shorter:")
    for text, seconds in advice:
        print(f"  {text}: about {duration(seconds)}")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
