"""What the commands about a study with people print."""

import json
from collections import Counter
from typing import Any

from frostglass.cli.tables import percent, print_table
from frostglass.study.agreement import Agreement
from frostglass.study.correlation import Correlation, MetricRow
from frostglass.study.folder import LINKS, StudyFolder
from frostglass.study.resampling import Estimate
from frostglass.study.results import StudyResults
from frostglass.study.tables import ClassScores, Identified


def print_design(folder: StudyFolder, *, as_json: bool) -> None:
    """Say what a study asks of whom."""
    facts = _facts(folder)
    if as_json:
        print(json.dumps(facts))
        return
    print(f"study of {facts['name']}: {'; '.join(facts['models'])}")
    for protocol, each in facts["protocols"].items():
        print(
            f"{protocol}: {each['items']} items, each judged by {folder.design.raters} of "
            f"{each['participants']} participants; {each['trials']} trials for one at most, "
            f"{each['checks']} of them attention checks"
        )
    for warning in facts["warnings"]:
        print(f"note: {warning}")
    print(f"links: {facts['links']} (frostglass study links {folder.path})")
    print(f"next: frostglass study serve {folder.path}")


def _facts(folder: StudyFolder) -> dict[str, Any]:
    design = folder.design
    items = Counter(item.protocol for item in design.items if not item.check)
    participants = Counter(each.protocol for each in design.participants)
    protocols = {
        protocol: {
            "items": count,
            "participants": participants[protocol],
            "trials": max(len(p.trials) for p in design.participants if p.protocol == protocol),
            "checks": sum(i.check and i.protocol == protocol for i in design.items)
            // participants[protocol],
        }
        for protocol, count in items.items()
    }
    return {
        "study": str(folder.path),
        "name": design.name,
        "models": [f"{each.label} ({each.attack})" for each in design.models],
        "people": len({each.person for each in design.reconstructions}),
        "protocols": protocols,
        "links": str(folder.path / LINKS),
        "warnings": [
            f"the audit of {each.label} is vacuous ({each.vacuous})"
            for each in design.models
            if each.vacuous
        ],
    }


def print_results(found: StudyResults) -> None:
    """Print every table of a study that has answers."""
    part = found.participation
    print(
        f"study of {found.name}: {part.invited} invited, {part.consented} agreed, {part.finished} "
        f"finished, {part.withdrawn} withdrew"
    )
    median = "" if part.median_seconds is None else f" (median {part.median_seconds:.1f} s)"
    print(
        f"{part.answers} answers count{median}, {part.timed_out} timed out; participants left out: "
        f"{part.excluded} failed attention checks, {part.unchecked} met none"
    )
    if found.compared:
        _print_compared(found)
    if found.identified:
        _print_identified(found.identified)
    for protocol, each in found.agreement.items():
        print(f"agreement ({protocol}): {_agreement(each)}")
    if found.metrics:
        _print_metrics(found.metrics)
    if part.answers:
        print(
            "intervals: 95 %; of shares and macro-F1 over participants and people, of alpha over "
            "items, of ρ over people"
        )


def _print_compared(found: StudyResults) -> None:
    rows = [{"model": each.model, "chosen": _share(each.share)} for each in found.chosen]
    print_table("pairwise: which resembles the person more", rows, ["model"])
    if len(found.chosen) > 2:
        pairs = [
            {"model": each.model, "chosen over": each.other, "share": _share(each.share)}
            for each in found.compared
        ]
        print_table("pairwise, every two models", pairs, ["model", "chosen over"])


def _print_identified(rows: list[Identified]) -> None:
    table = [
        {
            "model": each.model,
            "macro-F1": _decimal(each.macro_f1),
            "accuracy": _share(each.accuracy),
            "found, if shown": _share(each.found) if each.found else "–",
            "answers": str(each.accuracy.answers),
        }
        for each in rows
    ]
    print_table("identification: whom of four people, or none", table, ["model"])
    classes = [
        {"model": each.model, "option": score.name, **_class_cells(score)}
        for each in rows
        for score in each.classes
    ]
    print_table("identification by option", classes, ["model", "option"])
    print("guessing gives a macro-F1 of 0.2; found, if shown: share of items with the person")


def _class_cells(score: ClassScores) -> dict[str, str]:
    values = {"recall": score.recall, "precision": score.precision, "F1": score.f1}
    return {name: "–" if value is None else _decimal(value) for name, value in values.items()}


def _print_metrics(rows: list[MetricRow]) -> None:
    table = [
        {
            "metric": each.metric,
            "higher one chosen": _share(each.preferred) if each.preferred else "–",
            "ρ pairwise": _rho(each.pairwise),
            "ρ identification": _rho(each.identification),
        }
        for each in rows
    ]
    print_table("metrics of the run beside people's judgement", table, ["metric"])
    print(
        "higher one chosen: how often people chose the image with the higher value, equal values "
        "counting half; ρ: Spearman's rank correlation, negative if people prefer lower values"
    )


def _share(each: Estimate) -> str:
    low = percent(each.low).removesuffix("%")
    return f"{percent(each.value)} ({low}–{percent(each.high)})"


def _decimal(each: Estimate) -> str:
    return f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})"


def _rho(each: Correlation | None) -> str:
    if each is None or each.rho is None:
        return "–"
    return f"{each.rho:+.2f} ({each.low:+.2f} to {each.high:+.2f})"


def _agreement(each: Agreement) -> str:
    over = f"over {each.items} items with at least two answers"
    if each.alpha is None:
        return f"Krippendorff's alpha has no value {over}"
    return f"Krippendorff's alpha {each.alpha:.2f} ({each.low:.2f} to {each.high:.2f}) {over}"
