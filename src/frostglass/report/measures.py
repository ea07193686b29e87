"""Scores that a config asked for beyond those every report shows, and what defenses gain."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from frostglass.metrics._tradeoff import drop_ratio
from frostglass.metrics.base import metrics
from frostglass.report.entry import Entry
from frostglass.report.facts import Measured
from frostglass.report.labels import known
from frostglass.report.study import Study

# Shown elsewhere, or no more than a square or a root of what is.
SHOWN = (
    *("verified_", "strict_", "match_", "top1_", "top5_", "target_"),
    *("similarity", "face_similarity"),
)
SHOWN_ALONE = ("distance", "distance_squared", "centroid_squared", "manifold", "mse")
OF_FEATURES = ("ssim", "psnr", "fsim")


def further_names(names: Iterable[str], surface: str) -> list[str]:
    """Return the scores that no other table of the surface shows."""
    hidden = (*SHOWN_ALONE, *(OF_FEATURES if surface == "features" else ()))
    return [name for name in names if not name.startswith(SHOWN) and name not in hidden]


def further_scores(entry: Entry) -> dict[str, tuple[Measured, Measured]]:
    """Return each further score of an audit, and that of the prior-only baseline."""
    facts = entry.facts
    both = {name: (score, facts.prior_only[name]) for name, score in facts.scores.items()}
    both |= {
        name: (score, facts.prior_only_summaries[name]) for name, score in facts.summaries.items()
    }
    return {name: both[name] for name in further_names(both, entry.surface)}


def explained(settings: Sequence[Any]) -> list[tuple[str, str]]:
    """Return title and first sentence of each metric that the settings name."""
    chosen = [known(metrics, each) for each in settings if isinstance(each, dict)]
    return [
        (f"{method.title or method.name} ({method.name})", (method.__doc__ or "").split("\n")[0])
        for method in chosen
        if method is not None
    ]


def gains(study: Study) -> list[tuple[Entry, float, tuple[float, float, float] | None]]:
    """Return defended audits with their cost in accuracy and ΔAttAcc / ΔAcc (None if undefined).

    Attack accuracy is top-1 of the first evaluator, against the same attack on an undefended model
    and the same people.
    """
    plain = [entry for entry in study.entries if entry.kind == "undefended"]
    rows = []
    for entry in study.entries:
        name = entry.top1[0]
        match = next((other for other in plain if _comparable(other, entry)), None)
        if match is None or entry.kind != "defended":
            continue
        before, after = (
            torch.tensor([each.facts.scores[name].by_identity]) for each in (match, entry)
        )
        accuracy, own = (each.facts.target.accuracy.test for each in (match, entry))
        rows.append((entry, accuracy - own, drop_ratio(before, after, accuracy, own)))
    return rows


def _comparable(one: Entry, other: Entry) -> bool:
    name = other.top1[0]
    people = [each.run.rows[each.number].names for each in (one, other)]
    counted = all(each.facts.scores[name].by_identity for each in (one, other))
    seeds = one.facts.seed == other.facts.seed
    return one.method == other.method and people[0] == people[1] and counted and seeds
