"""Tables on stdout: scores of a run and estimates of a config."""

import shutil
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from frostglass.auditing.expand import NO_GRID
from frostglass.report.labels import accuracy_images, model_name

Row = dict[str, str]
WIDTH = 160  # columns where stdout is no terminal, as in a log


def print_table(title: str, rows: Sequence[Row], left: Sequence[str] = ()) -> None:
    """Print rows as a table if it fits the terminal, else one block of lines per row.

    Columns in `left` are aligned left and may wrap; others never do, so no digit is lost.
    """
    print(title)
    table = Table()
    for column in rows[0]:
        if column in left:
            table.add_column(column, overflow="fold")
        else:
            width = max(len(column), *(len(row[column]) for row in rows))
            table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*row.values())
    # Brackets and colons in a user's names are plain text.
    console = Console(markup=False, emoji=False, highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    terminal = shutil.get_terminal_size((WIDTH, 24)).columns
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


def print_scores(facts: dict[str, Any]) -> None:
    """Print a run: one row per audit, what the columns mean, and every warning."""
    numbers = range(1, len(facts["evaluators"]) + 1)
    surface = facts["audits"][0]["surface"]
    row = _model_row if surface == "model" else _feature_row
    people = f"{len(facts['identities'])} people attacked"
    if surface == "features":
        people += f", {facts['audits'][0]['images_per_person']} images each"
    rows = [{"audit": _title(audit), **row(audit, numbers)} for audit in facts["audits"]]
    print_table(f"{facts['name']}: {people}", rows, left=["audit"])
    print("evaluator N: share of people whose reconstructions it assigns to them (top-1)")
    _print_accuracy("evaluators' own accuracy", facts["evaluators"])
    if surface == "model":
        _print_accuracy("accuracy", [audit["target"] for audit in facts["audits"]], values=False)
        print("prior only: the same for draws of the prior; target: by the target itself")
    else:
        same, different = (
            facts["audits"][0]["controls"]["references"][name]
            for name in ("same_person", "different_people")
        )
        print(
            f"similarity: {same:.2f} is another image of the same person, {different:.2f} another "
            "person"
        )
        print("prior only: the same for images made without any feature")
    notes: dict[str, list[str]] = {}
    for audit in facts["audits"]:
        for warning in audit["controls"]["warnings"]:
            notes.setdefault(warning, []).append(audit["label"])
    for warning, labels in notes.items():
        where = "all audits" if len(labels) == len(facts["audits"]) > 1 else "; ".join(labels)
        print(f"note ({where}): {warning}")


def _title(audit: dict[str, Any]) -> str:
    """Return the label of an audit; without a grid it is the name of the model."""
    if audit["label"] != NO_GRID:
        return str(audit["label"])
    defenses = [defense["name"] for defense in audit["defenses"]]
    return model_name(defenses, given=audit["target"]["given"])


def _print_accuracy(title: str, models: Sequence[dict[str, Any]], *, values: bool = True) -> None:
    """Say on which images accuracy was measured: given models may have been trained on them."""
    for given in (False, True):
        some = [each for each in models if each["accuracy"] and each.get("given", False) is given]
        shown = [f"{each['model']} {each['accuracy']['test']:.1%}" for each in some if values]
        note = ", which a given model may have been trained on" if given else ""
        ending = f": {', '.join(shown)}" if shown else ""
        if some:
            print(f"{title} on {accuracy_images(given=given)}{note}{ending}")


def _model_row(audit: dict[str, Any], evaluators: Sequence[int]) -> Row:
    scores, baseline = audit["scores"], audit["prior_only"]
    return {
        "accuracy": f"{audit['target']['accuracy']['test']:.1%}",
        **{f"evaluator {n} (95 %)": with_interval(scores[f"top1_{n}"]) for n in evaluators},
        "prior only": ", ".join(f"{baseline[f'top1_{n}']['value']:.1%}" for n in evaluators),
        "target": f"{scores['target_top1']['value']:.1%}",
        **_cost(audit),
    }


def _feature_row(audit: dict[str, Any], evaluators: Sequence[int]) -> Row:
    scores, similarity = audit["scores"], audit["scores"]["similarity"]
    low, high = similarity["low"], similarity["high"]
    assigned = {f"evaluator {n}": f"top1_{n}" for n in evaluators if f"top1_{n}" in scores}
    return {
        "MCC": f"{audit['utility']['mean_mcc']:.2f}",
        "AUC": f"{audit['utility']['mean_auc']:.2f}",
        "similarity (95 %)": f"{similarity['value']:.2f} ({low:.2f} to {high:.2f})",
        **{title: f"{scores[name]['value']:.0%}" for title, name in assigned.items()},
        **({"SSIM": f"{scores['ssim']['value']:.2f}"} if "ssim" in scores else {}),
        "prior only": f"{audit['prior_only']['similarity']['value']:.2f}",
        **_cost(audit),
    }


def _cost(audit: dict[str, Any]) -> Row:
    return {"queries": f"{audit['queries']:,}", "seconds": f"{audit['seconds']:.0f}"}


def with_interval(score: dict[str, float]) -> str:
    return f"{score['value']:.1%} ({score['low']:.1%} to {score['high']:.1%})"


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
    if unknown:
        print(f"the memory estimate is incomplete: {unknown}")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
