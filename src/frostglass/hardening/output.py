"""What a hardening writes: the recommended model, the frontier, tables, and the report."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostglass.auditing.expand import UNDEFENDED
from frostglass.core.types import Target
from frostglass.hardening.card import CardFacts, card
from frostglass.hardening.final import OTHER_HALF, Final, Finalist, Model, dominated
from frostglass.hardening.frontier import frontier
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import described
from frostglass.hardening.study import Outcome, Trial
from frostglass.report.build import build_report
from frostglass.report.seeds import Share, seed_table
from frostglass.report.text import number
from frostglass.store.files import full_disk_reported, write_bytes

FORMAT = 1


@dataclass(frozen=True)
class Findings:
    """What a hardening found; `deliver` writes what is shipped and returns its model.

    `baseline` is the undefended model in tuning, `left_out` are
    attacks and pairs of defenses, with the reason.
    """

    name: str
    goal: Goal
    seeds: int
    chosen: Sequence[Finalist]
    trials: Sequence[Trial]
    final: Final
    baseline: Outcome
    left_out: Mapping[str, str]
    deliver: Callable[[Path], Target]


def write_results(out: Path, found: Findings, *, redact: bool) -> dict[str, Any]:
    """Write all files below `out`, and return the content of result.json."""
    goal, final, recommended = found.goal, found.final, found.chosen[0]
    beaten = dominated(final.models[OTHER_HALF])
    remark = _remark(found, beaten)
    baseline = found.baseline.plain(goal.key)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "name": found.name,
        **goal.asked(),
        "seeds": found.seeds,
        "recommended": {
            "title": recommended.title,
            "defenses": recommended.tables,
            goal.key: recommended.utility,
            "tuning": recommended.trial.outcome.plain(goal.key),
            "remark": remark,
        },
        "dominated": beaten,
        "not_compared": _not_compared(found),
        "left_out": dict(found.left_out),
        "undefended_in_tuning": {key: baseline[key] for key in baseline if key != "reason"},
        "final": {
            population: [_plain(model, goal) for model in models]
            for population, models in final.models.items()
        },
        "failed": list(final.failed),
        "vacuous": list(final.vacuous),
    }
    with full_disk_reported(out):
        for form, suffix in (("markdown", "md"), ("csv", "csv")):
            write_bytes(out / f"table.{suffix}", seed_table(final.runs, form).encode())
        write_bytes(out / "trials.csv", _trials(found.trials, goal).encode())
        for population, models in final.models.items():
            drawing = frontier(models, population, goal)
            write_bytes(out / f"frontier-{population.replace(' ', '-')}.svg", drawing.encode())
        _write_model(out / "model", found, remark)
        page = build_report(final.folders, out / "report.html", redact=redact)
        facts["report"], facts["model"] = str(page), str(out / "model")
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        write_bytes(out / "result.json", text.encode())
    return facts


def _write_model(folder: Path, found: Findings, remark: str) -> None:
    recommended, final = found.chosen[0], found.final
    first = final.runs[0].facts.audits[0]
    evaluator = next(each for each in first.evaluators if each.decides)
    kind = "a face verifier" if evaluator.kind == "embedder" else "a classifier's embedding"
    pairs = {
        population: tuple(_named(models, title) for title in (UNDEFENDED, recommended.title))
        for population, models in final.models.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    facts = CardFacts(
        name=found.name,
        goal=found.goal,
        finalist=recommended,
        target=found.deliver(folder),
        models=pairs,  # type: ignore[arg-type]
        seeds=found.seeds,
        evaluator=f"{kind} ({evaluator.model})",
        rate=number(evaluator.verifier.rates[0], "rate"),
        remark=remark,
    )
    write_bytes(folder / "README.md", card(facts).encode())


def _named(models: Sequence[Model], title: str) -> Model:
    return next(model for model in models if model.title == title)


def _remark(found: Findings, beaten: Mapping[str, str]) -> str:
    """Say what speaks against the recommended model in the final table."""
    return " ".join(filter(None, (_preferred(found, beaten), _unclear(found))))


def _preferred(found: Findings, beaten: Mapping[str, str]) -> str:
    """Say if the final table prefers another defense; choosing by it would flatter the choice."""
    title = found.chosen[0].title
    better = beaten.get(title)
    if not better:
        return ""
    leak = _named(found.final.models[OTHER_HALF], better).leak
    return (
        f"In the final table {better} is at least as {found.goal.quality} and leaks no more "
        f"({leak}). {title} leaked least in tuning, which decides: a choice by the final table "
        "would make its figures look better than they are."
    )


def _unclear(found: Findings) -> str:
    """Say if the final table cannot tell the recommended model from the undefended one."""
    for population, models in found.final.models.items():
        plain, own = (_named(models, title) for title in (UNDEFENDED, found.chosen[0].title))
        if own.leak.high >= plain.leak.low:
            return (
                f"No clear gain: of {population}, {own.title} leaks {own.leak} and the undefended "
                f"model {plain.leak}, each under its strongest attack. Do not rely on it."
            )
    return ""


def _not_compared(found: Findings) -> dict[str, str]:
    """Return the candidates that are not in the final table, with the reason."""
    reasons, goal = {}, found.goal
    titles = {each.title for each in found.chosen}
    for title in dict.fromkeys(trial.candidate.title for trial in found.trials):
        own = [trial.outcome for trial in found.trials if trial.candidate.title == title]
        if title in titles:
            continue
        attacked = [outcome.leak for outcome in own if outcome.leak is not None]
        best = max((outcome.utility or 0.0 for outcome in own), default=0.0)
        reasons[title] = (
            f"leaked {min(attacked):.1%} at least in tuning, or its model of everybody misses the "
            f"{goal.key}"
            if attacked
            else f"no trial counts: {goal.title} {goal.text(best)} at most ({own[-1].reason})"
        )
    return reasons


def _plain(model: Model, goal: Goal) -> dict[str, Any]:
    return {
        "title": model.title,
        "defenses": model.settings,
        goal.key: _limits(model.utility),
        goal.leak.key: _limits(model.leak),
        goal.widest.key: _limits(model.widest),
        "attack": model.attack,
        "by_attack": {
            case: {name: _limits(share) for name, share in row.shares.items()}
            | {"notes": list(row.notes)}
            for case, row in model.rows.items()
        },
    }


def _limits(share: Share) -> dict[str, float]:
    return {"value": share.value, "low": share.low, "high": share.high}


def _trials(trials: Sequence[Trial], goal: Goal) -> str:
    more = {"similarity"} & {key for trial in trials for key in trial.outcome.plain(goal.key)}
    columns = (goal.key, "leak", "low", "high", *more)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["candidate", "number", "settings", *columns, "reason"])
    for trial in trials:
        outcome = trial.outcome.plain(goal.key)
        values = [outcome.get(name) for name in columns]
        cells = ["" if value is None else f"{value:.6g}" for value in values]
        settings = described(trial.tables)
        writer.writerow(
            [trial.candidate.title, trial.number, settings, *cells, trial.outcome.reason]
        )
    return text.getvalue()
