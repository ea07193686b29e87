"""What a hardening writes: the recommended model, the frontier, tables, and the report."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frostglass.auditing.expand import UNDEFENDED
from frostglass.auditing.results import Audit
from frostglass.core.types import Target
from frostglass.hardening.card import CardFacts, card
from frostglass.hardening.final import OTHER_HALF, Final, Finalist, Model, dominated
from frostglass.hardening.frontier import frontier
from frostglass.hardening.space import described
from frostglass.hardening.study import Trial
from frostglass.hardening.tuning import first_guess, held_out
from frostglass.models.checkpoint import save_target
from frostglass.report.build import build_report
from frostglass.report.seeds import seed_table
from frostglass.report.text import number
from frostglass.store.files import full_disk_reported, write_bytes

FORMAT = 1
TRIAL_COLUMNS = ("candidate", "number", "settings", "accuracy", "leak", "low", "high", "reason")


def write_results(
    out: Path,
    *,
    name: str,
    accuracy: float,
    seeds: int,
    chosen: Sequence[Finalist],
    trials: Sequence[Trial],
    final: Final,
    target: Target,
    baseline: Audit,
    left_out: Mapping[str, str],
    redact: bool,
) -> dict[str, Any]:
    """Write all files below `out`, and return the content of result.json."""
    beaten = dominated(final.models[OTHER_HALF])
    remark = _remark(chosen[0], beaten, final.models[OTHER_HALF])
    facts: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "accuracy": accuracy,
        "seeds": seeds,
        "recommended": {
            "title": chosen[0].title,
            "defenses": chosen[0].tables,
            "accuracy": chosen[0].accuracy,
            "tuning": asdict(chosen[0].trial.outcome),
            "remark": remark,
        },
        "dominated": beaten,
        "not_compared": _not_compared(chosen, trials),
        "attacks_left_out": dict(left_out),
        "undefended_in_tuning": _undefended(baseline),
        "final": {
            population: [_plain(model) for model in models]
            for population, models in final.models.items()
        },
        "failed": list(final.failed),
        "vacuous": list(final.vacuous),
    }
    with full_disk_reported(out):
        for form, suffix in (("markdown", "md"), ("csv", "csv")):
            write_bytes(out / f"table.{suffix}", seed_table(final.runs, form).encode())
        write_bytes(out / "trials.csv", _trials(trials).encode())
        for population, models in final.models.items():
            drawing = frontier(models, population)
            write_bytes(out / f"frontier-{population.replace(' ', '-')}.svg", drawing.encode())
        _write_model(out / "model", name, accuracy, seeds, chosen[0], target, final, remark)
        page = build_report(final.folders, out / "report.html", redact=redact)
        facts["report"], facts["model"] = str(page), str(out / "model")
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        write_bytes(out / "result.json", text.encode())
    return facts


def _write_model(
    folder: Path,
    name: str,
    accuracy: float,
    seeds: int,
    recommended: Finalist,
    target: Target,
    final: Final,
    remark: str,
) -> None:
    first = final.runs[0].facts.audits[0]
    evaluator = next(each for each in first.evaluators if each.decides)
    kind = "a face verifier" if evaluator.kind == "embedder" else "a classifier's embedding"
    pairs = {
        population: tuple(_named(models, title) for title in (UNDEFENDED, recommended.title))
        for population, models in final.models.items()
    }
    facts = CardFacts(
        name=name,
        finalist=recommended,
        target=target,
        accuracy=accuracy,
        models=pairs,  # type: ignore[arg-type]
        seeds=seeds,
        evaluator=f"{kind} ({evaluator.model})",
        rate=number(evaluator.verifier.rates[0], "rate"),
        remark=remark,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_target(target, folder)
    write_bytes(folder / "README.md", card(facts).encode())


def _named(models: Sequence[Model], title: str) -> Model:
    return next(model for model in models if model.title == title)


def _remark(recommended: Finalist, beaten: Mapping[str, str], models: Sequence[Model]) -> str:
    """Say if the final table prefers another defense; choosing by it would flatter the choice."""
    better = beaten.get(recommended.title)
    if not better:
        return ""
    leak = _named(models, better).leak
    return (
        f"In the final table {better} is at least as accurate and leaks no more ({leak}). "
        f"{recommended.title} leaked least in tuning, which decides: a choice by the final table "
        "would make its figures look better than they are."
    )


def _not_compared(chosen: Sequence[Finalist], trials: Sequence[Trial]) -> dict[str, str]:
    """Return the candidates that are not in the final table, with the reason."""
    reasons = {}
    titles = {each.title for each in chosen}
    for title in dict.fromkeys(trial.candidate.title for trial in trials):
        own = [trial.outcome for trial in trials if trial.candidate.title == title]
        if title in titles:
            continue
        attacked = [outcome.leak for outcome in own if outcome.leak is not None]
        best = max((outcome.accuracy or 0.0 for outcome in own), default=0.0)
        reasons[title] = (
            f"leaked {min(attacked):.1%} at least in tuning, or its model of everybody misses the "
            "accuracy"
            if attacked
            else f"no trial counts: accuracy {best:.1%} at most ({own[-1].reason})"
        )
    return reasons


def _undefended(baseline: Audit) -> dict[str, float]:
    score = first_guess(baseline)
    accuracy = held_out(baseline.target)
    return {"accuracy": accuracy, "leak": score.value, "low": score.low, "high": score.high}


def _plain(model: Model) -> dict[str, Any]:
    return {
        "title": model.title,
        "defenses": model.settings,
        "accuracy": asdict(model.accuracy),
        "verified_first": asdict(model.leak),
        "verified_any": asdict(model.any),
        "attack": model.attack,
        "by_attack": {
            case: {name: asdict(share) for name, share in row.shares.items()}
            | {"notes": list(row.notes)}
            for case, row in model.rows.items()
        },
    }


def _trials(trials: Sequence[Trial]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(TRIAL_COLUMNS)
    for trial in trials:
        outcome = trial.outcome
        measured = (outcome.accuracy, outcome.leak, outcome.low, outcome.high)
        cells = ["" if value is None else f"{value:.6g}" for value in measured]
        writer.writerow(
            [trial.candidate.title, trial.number, described(trial.tables), *cells, outcome.reason]
        )
    return text.getvalue()
