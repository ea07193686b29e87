"""What makes a number believable: the controls that stand beside every attack."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from frostglass.core.types import Target
from frostglass.metrics.base import Rows, Score

UNKNOWN_PEOPLE = "whom the prior was trained on is not known: if the attacked people are among them, this overstates what the model leaks"
# Beyond these limits an audit carries a warning, and a report asks for attention.
WEAK_EVALUATOR = 0.9  # held-out accuracy below which an evaluator's verdicts are weak
DISAGREEMENT = 0.25  # share of reconstructions that only one evaluator accepts
OFF_MANIFOLD = 1.5  # distance to real pictures, relative to the prior's own draws
LOW_TARGET_SUCCESS = (
    0.5  # share of reconstructions the target accepts, below which the attack did not optimise
)
MOST_PARTIAL = 0.5  # share of people without a whole search above which an audit proves nothing
LUCKY_PRIOR = 0.2  # accuracy of prior-only draws above which luck explains much


@dataclass(frozen=True)
class Controls:
    """Judgements on one audit, all derived from rows.

    `lift`: attack minus prior-only accuracy, one score per evaluator. `agreement`: share of reconstructions on which the first two evaluators say the
    same; `only_one`: share that just one of them accepts (possible false positives). `manifold`: median distance of reconstructions to
    real public pictures divided by that of prior draws; above 1 they are less like real pictures than the prior's own.
    `control_lift`: the lift of the same attack on the undefended target. `vacuous`: the reason this audit proves nothing, or "".
    `warnings`: what a reader must know before trusting the numbers.
    """

    lift: tuple[Score, ...]
    control_lift: tuple[Score, ...]
    agreement: float | None
    only_one: float | None
    manifold: float | None
    vacuous: str
    warnings: tuple[str, ...]


def lift(rows: Rows, prior_rows: Rows) -> tuple[Score, ...]:
    """Attack minus prior-only top-1, identity by identity, for each evaluator."""
    names = sorted(name for name in rows.columns if name.startswith("top1_"))
    return tuple(
        Score.of(
            name, rows.columns[name].double().mean(1) - prior_rows.columns[name].double().mean(1)
        )
        for name in names
    )


def judge(
    rows: Rows,
    prior_rows: Rows,
    control: tuple[Rows, Rows] | None,
    *,
    margin: float,
    target: Target,
    evaluators: Sequence[Target],
    partial: int = 0,
    broken: int = 0,
    strangers: bool = True,
) -> Controls:
    """Weigh an attack's rows against prior-only rows and the positive control's (attack, prior-only) rows.

    `broken` pictures come from searches that broke off; of `partial` people there are no others. `strangers` is False if nobody knows whether the prior saw the
    attacked people.
    """
    control_lift = lift(*control) if control else ()
    right, chance = _held_out(target), 1 / len(target.classes)
    vacuous = ""
    if right <= chance + 0.1 * (1 - chance):
        vacuous = (
            f"the target is right on only {right:.0%} of held-out pictures, where guessing gives {chance:.0%}: there is nothing in it to leak; "
            "are its classes in the order of the identities' names?"
        )
    elif partial > MOST_PARTIAL * len(rows.labels):
        vacuous = f"the search broke off for {partial} of {len(rows.labels)} people, so a low score says nothing of the model"
    elif control is None:
        vacuous = (
            "no positive control was run, so a failed attack cannot be told from a good defense"
        )
    elif not control_lift:
        vacuous = "no evaluator judged the positive control, so a failed attack cannot be told from a good defense"
    elif any(score.low <= margin for score in control_lift):
        worst = min(control_lift, key=lambda score: score.low)
        vacuous = (
            f"the same attack does not break the undefended model (accuracy above prior-only {worst.value:.0%}, "
            f"at least {worst.low:.0%} with 95 % confidence, wanted above {margin:.0%}): it cannot show that a defense works"
        )
    agreement = only_one = None
    if "top1_2" in rows.columns:
        first, second = rows.columns["top1_1"], rows.columns["top1_2"]
        agreement, only_one = (
            (first == second).double().mean().item(),
            (first != second).double().mean().item(),
        )
    manifold = None
    if "manifold" in rows.columns:
        manifold = (
            rows.columns["manifold"].median()
            / prior_rows.columns["manifold"].median().clamp(min=1e-12)
        ).item()
    return Controls(
        lift=lift(rows, prior_rows),
        control_lift=control_lift,
        agreement=agreement,
        only_one=only_one,
        manifold=manifold,
        vacuous=vacuous,
        warnings=(
            *([] if strangers else [UNKNOWN_PEOPLE]),
            *_alike(target, evaluators),
            *broken_off(partial, broken, rows),
            *_warnings(
                rows,
                prior_rows,
                manifold,
                only_one,
                [_held_out(evaluator) for evaluator in evaluators],
            ),
        ),
    )


def _alike(target: Target, evaluators: Sequence[Target]) -> list[str]:
    """An evaluator that is built like the target shares its blind spots."""
    own = target.info.get("model")
    return [
        f"evaluator {number} has the target's architecture ({own}): what fools the one may fool the other"
        for number, evaluator in enumerate(evaluators, 1)
        if own is not None and evaluator.info.get("model") == own
    ]


def broken_off(partial: int, broken: int, rows: Rows) -> list[str]:
    """Searches that did not come to their end: a low score there is no privacy."""
    if not (partial or broken):
        return []
    pictures = next(iter(rows.columns.values())).numel()
    why = "a loss that was not finite, or no start was found"
    return [
        f"partial: the search broke off for {partial} of {len(rows.labels)} people and {broken} of {pictures} pictures ({why}), which say little"
    ]


def _held_out(classifier: Target) -> float:
    return classifier.info["accuracy"]["test"]


def _warnings(
    rows: Rows,
    prior_rows: Rows,
    manifold: float | None,
    only_one: float | None,
    evaluator_accuracy: list[float],
) -> list[str]:
    found = [
        f"evaluator {number} is right on only {accuracy:.0%} of held-out pictures: its verdicts are weak"
        for number, accuracy in enumerate(evaluator_accuracy, 1)
        if accuracy < WEAK_EVALUATOR
    ]
    if len(evaluator_accuracy) < 2:
        found.append("only one evaluator: nothing guards against pictures that fool just that one")
    if only_one is not None and only_one > DISAGREEMENT:
        found.append(
            f"the evaluators disagree on {only_one:.0%} of the reconstructions: some accepted ones may be false positives"
        )
    if manifold is not None and manifold > OFF_MANIFOLD:
        found.append(
            f"reconstructions are {manifold:.1f} times as far from real pictures as the prior's own samples: they may have left the world of faces"
        )
    success = _mean(rows, "target_top1") if "target_top1" in rows.columns else 1.0
    if success < LOW_TARGET_SUCCESS:
        found.append(
            f"the target itself says y for only {success:.0%} of the reconstructions: the attack did not take hold (masked gradients, or no start for these people), which is not privacy"
        )
    chance = max(
        (_mean(prior_rows, name) for name in prior_rows.columns if name.startswith("top1_")),
        default=0.0,
    )
    if chance > LUCKY_PRIOR:
        found.append(
            f"prior-only draws already score {chance:.0%}: with so few people, luck explains much"
        )
    return found


def _mean(rows: Rows, name: str) -> float:
    """The value `Rows.score` gives, to the last bit: a report holds it against the same limits."""
    return rows.columns[name].double().mean(1).mean().item()


def worst_identities(rows: Rows, names: tuple[str, ...], count: int = 5) -> list[tuple[str, float]]:
    """The people best recognised in their reconstructions, by the mean verdict of all evaluators."""
    columns = [
        values.double().mean(1) for name, values in rows.columns.items() if name.startswith("top1_")
    ]
    mean = torch.stack(columns).mean(0)
    sure = rows.columns["target_confidence"].double().mean(1)
    order = sorted(range(len(mean)), key=lambda i: (-mean[i].item(), -sure[i].item()))
    return [(names[int(rows.labels[i])], mean[i].item()) for i in order[:count]]
