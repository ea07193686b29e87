"""What makes a number believable: the controls beside every attack, on both surfaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from frostglass.attacks.base import Surface
from frostglass.auditing.experiment import Experiment
from frostglass.core.types import Reconstructions, Target
from frostglass.metrics.base import Rows, Score

if TYPE_CHECKING:
    from frostglass.auditing.results import Trial

UNKNOWN_PEOPLE = (
    "the prior's training people are unknown: if the attacked people are among them, these "
    "numbers overstate the leak"
)
# Beyond these limits an audit carries a warning, and a report asks for attention.
WEAK_EVALUATOR = 0.9  # held-out accuracy below which an evaluator's results are weak
DISAGREEMENT = 0.25  # share of reconstructions that only one evaluator accepts
OFF_MANIFOLD = 1.5  # distance to real images, relative to the prior's own draws
LOW_TARGET_SUCCESS = 0.5  # share of reconstructions the target accepts
MOST_PARTIAL = 0.5  # share of people without a finished search
LUCKY_PRIOR = 0.2  # top-1 accuracy of the prior-only baseline
WEAK_EMBEDDER = 0.2  # similarity of one person's images minus that of two people's


@dataclass(frozen=True)
class Controls:
    """The verdict on one audit, derived from rows.

    `headline`: top-1 of each evaluator, or similarity on features. `lift`: attack minus prior-only
    baseline, person by person; `control_lift`: the same on the undefended model. `agreement`:
    share of reconstructions on which the first two evaluators agree; `only_one`: share that just
    one of them accepts. `manifold`: median distance of reconstructions to real public images,
    divided by that of prior draws. `references`: similarity of two images of one person and of two
    people. `vacuous`: why this audit proves nothing, or "". `warnings`: what a reader must know.
    """

    headline: tuple[Score, ...]
    lift: tuple[Score, ...]
    control_lift: tuple[Score, ...]
    agreement: float | None
    only_one: float | None
    manifold: float | None
    references: Mapping[str, float] | None
    vacuous: str
    warnings: tuple[str, ...]


def verdict(
    exp: Experiment,
    trial: "Trial",
    control: "Trial | None",
    *,
    evaluators: Sequence[Target],
    references: Mapping[str, float] | None,
) -> Controls:
    """Assess a trial by its prior-only baseline and by the trial of the undefended model."""
    rows, baseline = trial.rows, trial.baseline_rows
    control_lift = lift(control.rows, control.baseline_rows, exp.surface) if control else ()
    unknown = trial.prior is not None and "seen_identities" in trial.prior.info
    agreement, only_one = _agreement(rows)
    manifold = _manifold(rows, baseline)
    return Controls(
        headline=tuple(rows.score(name) for name in headline_columns(rows, exp.surface)),
        lift=lift(rows, baseline, exp.surface),
        control_lift=control_lift,
        agreement=agreement,
        only_one=only_one,
        manifold=manifold,
        references=references,
        vacuous=_vacuous(exp, trial, control, control_lift, references),
        warnings=(
            *([UNKNOWN_PEOPLE] if unknown else []),
            *_same_architecture(trial.target, evaluators),
            *_unfinished(trial.reconstructions),
            *_weak(evaluators),
            *_attack_warnings(rows, baseline, manifold, only_one),
        ),
    )


def top1_columns(rows: Rows) -> list[str]:
    return sorted(name for name in rows.columns if name.startswith("top1_"))


def headline_columns(rows: Rows, surface: Surface) -> list[str]:
    """Name the columns that decide: top-1 of each evaluator, or similarity on features."""
    return top1_columns(rows) if surface == "model" else ["similarity"]


def lift(rows: Rows, baseline: Rows, surface: Surface) -> tuple[Score, ...]:
    """Return attack minus prior-only baseline, person by person, for each headline and top-1."""
    names = dict.fromkeys([*headline_columns(rows, surface), *top1_columns(rows)])
    return tuple(
        Score.of(
            name, rows.columns[name].double().mean(1) - baseline.columns[name].double().mean(1)
        )
        for name in names
    )


def _vacuous(
    exp: Experiment,
    trial: "Trial",
    control: "Trial | None",
    control_lift: Sequence[Score],
    references: Mapping[str, float] | None,
) -> str:
    """Return why the audit proves nothing, or ""."""
    result = trial.reconstructions
    reason = _weak_target(trial.target) if references is None else _weak_embedder(references)
    if reason:
        return reason
    if (partial := result.count("partial")) > MOST_PARTIAL * len(result.labels):
        return (
            f"the search stopped early for {partial} of {len(result.labels)} people, so a low "
            "score says nothing about privacy"
        )
    if control is None:
        return "no positive control was run, so a failed attack looks like a good defense"
    if not control_lift:
        return "no evaluator scored the positive control: add one"
    margin = exp.judging.margin
    deciding = control_lift if references is None else control_lift[:1]
    worst = min(deciding, key=lambda score: score.low)
    if worst.low <= margin:
        return (
            "the same attack does not break the undefended model "
            f"({worst.name} above the prior-only baseline {worst.value:.2f}, at least "
            f"{worst.low:.2f} with 95 % confidence, required above {margin:.2f}): it cannot show "
            "that a defense works"
        )
    if references is not None:
        reached = control.rows.score("similarity")
        if reached.low <= references["different_people"] + margin:
            return (
                "reconstructions from unprotected features are hardly more similar to the victims "
                f"({reached.value:.2f}) than other people are "
                f"({references['different_people']:.2f}, required {margin:.2f} above that): the "
                "attack cannot show that a protection works"
            )
    return ""


def _weak_target(target: Target) -> str:
    accuracy, chance = held_out_accuracy(target), 1 / len(target.classes)
    if accuracy > chance + 0.1 * (1 - chance):
        return ""
    return (
        f"the target classifies only {accuracy:.0%} of held-out images correctly, where guessing "
        f"gives {chance:.0%}: there is nothing in it to leak. Check that its classes are in the "
        "order of the people's names."
    )


def _weak_embedder(references: Mapping[str, float]) -> str:
    same, different = references["same_person"], references["different_people"]
    if same - different >= WEAK_EMBEDDER:
        return ""
    return (
        f"the embedder hardly tells people apart (cosine {same:.2f} for one person, "
        f"{different:.2f} for two): train it longer, or on more public people with several "
        "images each"
    )


def _agreement(rows: Rows) -> tuple[float | None, float | None]:
    if "top1_2" not in rows.columns:
        return None, None
    first, second = rows.columns["top1_1"], rows.columns["top1_2"]
    return (first == second).double().mean().item(), (first != second).double().mean().item()


def _manifold(rows: Rows, baseline: Rows) -> float | None:
    if "manifold" not in rows.columns:
        return None
    reference = baseline.columns["manifold"].median().clamp(min=1e-12)
    return (rows.columns["manifold"].median() / reference).item()


def _same_architecture(target: Target, evaluators: Sequence[Target]) -> list[str]:
    """Warn of evaluators built like the target: they share its blind spots."""
    model = target.info.get("model")
    return [
        f"evaluator {number} has the target's architecture ({model}): what fools one may fool both"
        for number, evaluator in enumerate(evaluators, 1)
        if not target.attributes and model is not None and evaluator.info.get("model") == model
    ]


def _unfinished(result: Reconstructions) -> list[str]:
    partial, broken = result.count("partial"), result.count("broken")
    if not (partial or broken):
        return []
    return [
        f"partial: the search stopped early for {partial} of {len(result.labels)} people and "
        f"{broken} of {result.confidence.numel()} images (the loss was not finite, or no start "
        "was found); their scores say little"
    ]


def _weak(evaluators: Sequence[Target]) -> list[str]:
    weak = [
        f"evaluator {number} classifies only {accuracy:.0%} of held-out images correctly: its "
        "results are weak"
        for number, evaluator in enumerate(evaluators, 1)
        if (accuracy := held_out_accuracy(evaluator)) < WEAK_EVALUATOR
    ]
    if len(evaluators) < 2:
        weak.append("only one evaluator: images that fool just that one go unnoticed")
    return weak


def held_out_accuracy(classifier: Target) -> float:
    return classifier.info["accuracy"]["test"]


def _attack_warnings(
    rows: Rows, baseline: Rows, manifold: float | None, only_one: float | None
) -> list[str]:
    warnings = []
    if only_one is not None and only_one > DISAGREEMENT:
        warnings.append(
            f"the evaluators disagree on {only_one:.0%} of the reconstructions: some accepted ones "
            "may be false positives"
        )
    if manifold is not None and manifold > OFF_MANIFOLD:
        warnings.append(
            f"reconstructions are {manifold:.1f} times as far from real images as the prior's own "
            "samples: they may no longer show faces"
        )
    success = _mean(rows, "target_top1") if "target_top1" in rows.columns else 1.0
    if success < LOW_TARGET_SUCCESS:
        warnings.append(
            f"the target itself accepts only {success:.0%} of the reconstructions: the attack did "
            "not converge (masked gradients, or no start for these people), which is not privacy"
        )
    chance = max((_mean(baseline, name) for name in top1_columns(baseline)), default=0.0)
    if chance > LUCKY_PRIOR:
        warnings.append(
            f"the prior-only baseline already scores {chance:.0%}: with so few people, chance "
            "explains much"
        )
    return warnings


def _mean(rows: Rows, name: str) -> float:
    """Return the value of `Rows.score` to the last bit: a report uses the same limits."""
    return rows.columns[name].double().mean(1).mean().item()


def worst_identities(
    rows: Rows, names: tuple[str, ...], surface: Surface, count: int = 5
) -> list[tuple[str, float]]:
    """List the people best recognised, by the mean of all evaluators, or by similarity."""
    columns = [rows.columns[name] for name in headline_columns(rows, surface)]
    mean = torch.stack([column.double().mean(1) for column in columns]).mean(0)
    tie = rows.columns.get("target_confidence", columns[0]).double().mean(1)
    order = sorted(range(len(mean)), key=lambda i: (-mean[i].item(), -tie[i].item()))
    return [(names[int(rows.labels[i])], mean[i].item()) for i in order[:count]]
