"""What makes a number believable: the controls beside every attack, on both surfaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from frostglass.auditing.experiment import Experiment
from frostglass.auditing.given import given_warnings
from frostglass.auditing.trusted import (
    Evaluator,
    deciding_evaluator,
    exclusions,
    held_out_accuracy,
)
from frostglass.core.types import Reconstructions, Target
from frostglass.evaluators.verifier import RATES, Verifier
from frostglass.metrics._significance import LEVEL, paired_test, people_needed
from frostglass.metrics.base import Rows, Score

if TYPE_CHECKING:
    from frostglass.auditing.results import Trial

UNKNOWN_PEOPLE = (
    "the prior's training people are unknown: if the attacked people are among them, these "
    "numbers overstate the leak"
)
UNKNOWN_PUBLIC = (
    "public images have no identities: if attacked people are among them, thresholds are too high "
    "and these numbers understate the leak"
)
OWN_CONTROL = (
    "the attack breaks the audited model itself, which shows that it works: no undefended model "
    "was trained to compare with"
)
# Beyond these limits an audit carries a warning, and a report asks for attention.
DISAGREEMENT = 0.25  # share of reconstructions on which the classifiers disagree
FOOLED = 0.2  # top-1 minus verified, above which classifiers are fooled if it also halves
OFF_MANIFOLD = 1.5  # distance to real images, relative to the prior's own draws
LOW_TARGET_SUCCESS = 0.5  # share of reconstructions the target accepts
MOST_PARTIAL = 0.5  # share of people without a finished search
LUCKY_PRIOR = 0.2  # share of prior-only draws recognised, by top-1 or verification
WEAK_EMBEDDER = 0.2  # similarity of one person's images minus that of two people's


@dataclass(frozen=True)
class Controls:
    """The verdict on one audit, derived from rows.

    `deciding`: the column of the headline: `verified_N` of the evaluator that best accepts genuine
    images, among those that never saw the private images if there is one; `similarity` on features.
    `headline`: its score. `excluded`: evaluators that do not count, and why. `lift`: attack minus
    prior-only baseline, person by person; `control_lift`: the same on the undefended model, the
    `margin` that it must reach, and the `p_value` that it is chance; `people_needed` to show a
    difference as large as was seen. `agreement`: share of reconstructions on which all classifiers
    agree. `fooled`: whether classifiers name the person where verification fails. `manifold`:
    median distance of reconstructions to real public images, divided by that of prior draws.
    `references`: similarity of two images of one person and of two people. `vacuous`: why this
    audit proves nothing, or "". `warnings`: what a reader must know.
    """

    deciding: str
    headline: tuple[Score, ...]
    excluded: tuple[str, ...]
    lift: tuple[Score, ...]
    control_lift: tuple[Score, ...]
    margin: float
    p_value: float | None
    people_needed: int | None
    agreement: float | None
    fooled: bool
    manifold: float | None
    references: Mapping[str, float] | None
    vacuous: str
    warnings: tuple[str, ...]


def verdict(
    exp: Experiment,
    trial: "Trial",
    control: "Trial | None",
    *,
    evaluators: Sequence[Evaluator],
    references: Mapping[str, float] | None,
    public_known: bool = True,
) -> Controls:
    """Assess a trial by its prior-only baseline and by the trial of the undefended model.

    `public_known`: whether the public images have identities.
    """
    rows, baseline = trial.rows, trial.baseline_rows
    excluded = exclusions(evaluators, exp.judging)
    number = deciding_evaluator(evaluators, excluded)
    deciding = f"verified_{number}" if exp.surface == "model" else "similarity"
    control_lift = lift(control.rows, control.baseline_rows) if control else ()
    reached = next((score for score in control_lift if score.name == deciding), None)
    p_value = _p_value(control.rows, control.baseline_rows, deciding) if control else None
    agreement, manifold = _agreement(rows), _manifold(rows, baseline)
    fooled = exp.surface == "model" and _fooled(rows, deciding, excluded)
    vacuous = _invalid(trial, control, evaluators, excluded, references)
    if not vacuous and reached is not None and p_value is not None:
        vacuous = _unbroken(reached, p_value, exp.judging.margin)
    if not vacuous and control and references is not None:
        vacuous = _dissimilar(control.rows, references, exp.judging.margin)
    return Controls(
        deciding=deciding,
        headline=(rows.score(deciding),),
        excluded=tuple(excluded.values()),
        lift=lift(rows, baseline),
        control_lift=control_lift,
        margin=exp.judging.margin,
        p_value=p_value,
        people_needed=_people_needed(reached) if reached else None,
        agreement=agreement,
        fooled=fooled,
        manifold=manifold,
        references=references,
        vacuous=vacuous,
        warnings=(
            *_unknown_people(trial),
            *([] if public_known else [UNKNOWN_PUBLIC]),
            *([OWN_CONTROL] if control is trial else []),
            *given_warnings(trial.target, control.target if control else None),
            *_same_architecture(trial.target, evaluators),
            *_unfinished(trial.reconstructions),
            *excluded.values(),
            *_few_evaluators(evaluators, excluded),
            *_coarse_rates(evaluators[number - 1][1], number),
            *([_fooled_sentence(rows, deciding, number)] if fooled else []),
            *_attack_warnings(rows, baseline, manifold, agreement),
        ),
    )


def is_broken(exp: Experiment, trial: "Trial", evaluators: Sequence[Evaluator]) -> bool:
    """Return whether an attack breaks a model by the rule for positive controls."""
    excluded = exclusions(evaluators, exp.judging)
    if len(excluded) == len(evaluators):
        return False
    number = deciding_evaluator(evaluators, excluded)
    deciding = f"verified_{number}" if exp.surface == "model" else "similarity"
    reached = next(
        score for score in lift(trial.rows, trial.baseline_rows) if score.name == deciding
    )
    p_value = _p_value(trial.rows, trial.baseline_rows, deciding)
    return not _unbroken(reached, p_value, exp.judging.margin)


def top1_columns(rows: Rows) -> list[str]:
    return sorted(name for name in rows.columns if name.startswith("top1_"))


def lift(rows: Rows, baseline: Rows) -> tuple[Score, ...]:
    """Return attack minus prior-only baseline, person by person, for what tells who it is."""
    names = [name for name in rows.columns if name.startswith(("verified_", "similarity", "top1_"))]
    return tuple(
        Score.of(
            name, rows.columns[name].double().mean(1) - baseline.columns[name].double().mean(1)
        )
        for name in names
    )


def _p_value(rows: Rows, baseline: Rows, name: str) -> float:
    return paired_test(rows.columns[name].double().mean(1), baseline.columns[name].double().mean(1))


def _invalid(
    trial: "Trial",
    control: "Trial | None",
    evaluators: Sequence[Evaluator],
    excluded: Mapping[int, str],
    references: Mapping[str, float] | None,
) -> str:
    """Return why this audit cannot prove anything, whatever the attack reached, or ""."""
    result = trial.reconstructions
    reason = _weak_target(trial.target) if references is None else _weak_embedder(references)
    if reason:
        return reason
    if len(excluded) == len(evaluators):
        return f"no evaluator can be trusted: {'; '.join(excluded.values())}"
    if (partial := result.count("partial")) > MOST_PARTIAL * len(result.labels):
        return (
            f"the search stopped early for {partial} of {len(result.labels)} people, so a low "
            "score says nothing about privacy"
        )
    if control is None:
        return "no positive control was run, so a failed attack looks like a good defense"
    return ""


def _unbroken(reached: Score, p_value: float, margin: float) -> str:
    """Return why the positive control does not count as broken, or ""."""
    if p_value < LEVEL and reached.value >= margin:
        return ""
    needed = _people_needed(reached)
    more = f"; about {needed:,} people would show such a difference" if needed else ""
    chance = f"p = {p_value:.2g}, required below {LEVEL}{more}"
    few = f"less than the margin of {margin:.2f}"
    word, _, number = reached.name.partition("_")
    what = f"the share that evaluator {number} recognises" if number else word
    return (
        f"the same attack does not break the undefended model: {what} is "
        f"{reached.value:.2f} above the prior-only baseline for {len(reached.values)} people "
        f"({few if p_value < LEVEL else chance}): it cannot show that a defense works"
    )


def _people_needed(reached: Score) -> int | None:
    """Return how many people would show so large a difference; unknown for similarities."""
    if not reached.name.startswith("verified_"):
        return None
    better, worse = (sum(sign * value > 0 for value in reached.values) for sign in (1, -1))
    return people_needed(better / len(reached.values), worse / len(reached.values))


def _dissimilar(rows: Rows, references: Mapping[str, float], margin: float) -> str:
    reached = rows.score("similarity")
    if reached.low > references["different_people"] + margin:
        return ""
    return (
        "reconstructions from unprotected features are hardly more similar to the victims "
        f"({reached.value:.2f}) than other people are ({references['different_people']:.2f}, "
        f"required {margin:.2f} above that): the attack cannot show that a protection works"
    )


def _weak_target(target: Target) -> str:
    accuracy, chance = held_out_accuracy(target), 1 / len(target.classes)
    if accuracy > chance + 0.1 * (1 - chance):
        return ""
    return (
        f"the target classifies only {accuracy:.0%} of {target.tested_on} correctly, where "
        f"guessing gives {chance:.0%}: there is nothing in it to leak. Check that its classes are "
        "in the order of the people's names."
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


def _agreement(rows: Rows) -> float | None:
    """Return the share of reconstructions on which all classifiers agree."""
    names = top1_columns(rows)
    if len(names) < 2:
        return None
    named = torch.stack([rows.columns[name] for name in names])
    return (named == named[0]).all(0).double().mean().item()


def _fooled(rows: Rows, deciding: str, excluded: Mapping[int, str]) -> bool:
    """Return whether the trusted classifiers name the person far more often than it verifies."""
    names = [n for n in top1_columns(rows) if int(n.rpartition("_")[2]) not in excluded]
    if not names or int(deciding.rpartition("_")[2]) in excluded:
        return False
    name = min(names, key=lambda each: _mean(rows, each))
    named, verified = _mean(rows, name), _mean(rows, deciding)
    people = (rows.columns[each].double().mean(1) for each in (name, deciding))
    return named - verified > FOOLED and verified < named / 2 and paired_test(*people) < LEVEL


def _fooled_sentence(rows: Rows, deciding: str, number: int) -> str:
    named = max(_mean(rows, name) for name in top1_columns(rows))
    return (
        f"the classifiers are fooled: they name the attacked person for up to {named:.0%} of the "
        f"reconstructions, and evaluator {number} verifies {_mean(rows, deciding):.0%}"
    )


def _manifold(rows: Rows, baseline: Rows) -> float | None:
    if "manifold" not in rows.columns:
        return None
    reference = baseline.columns["manifold"].median().clamp(min=1e-12)
    return (rows.columns["manifold"].median() / reference).item()


def _unknown_people(trial: "Trial") -> list[str]:
    prior = trial.prior
    return [UNKNOWN_PEOPLE] if prior is not None and "seen_identities" in prior.info else []


def _same_architecture(target: Target, evaluators: Sequence[Evaluator]) -> list[str]:
    """Warn of evaluators built like the target: they share its blind spots."""
    model = target.info.get("model")
    return [
        f"evaluator {number} has the target's architecture ({model}): what fools one may fool both"
        for number, (evaluator, _) in enumerate(evaluators, 1)
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


def _few_evaluators(evaluators: Sequence[Evaluator], excluded: Mapping[int, str]) -> list[str]:
    warnings = []
    if len(evaluators) < 2:
        warnings.append("only one evaluator: images that fool just that one go unnoticed")
    trusted = [network for n, (network, _) in enumerate(evaluators, 1) if n not in excluded]
    if trusted and all(network.classes for network in trusted):
        warnings.append(
            "all trusted evaluators learned from the private images, as the target did, and what "
            'fools it may fool them: add an evaluator with kind = "embedder"'
        )
    return warnings


def _coarse_rates(verifier: Verifier, number: int) -> list[str]:
    """Say which false-accept rates the public images do not support."""
    return [
        f"evaluator {number}: {verifier.impostors} public images and {verifier.comparisons:,} "
        f"comparisons do not support a false-accept rate of {asked:.1%}; {used:.2%} is used"
        for asked, used in zip(RATES, verifier.rates.tolist(), strict=True)
        if used > asked * 1.001
    ]


def _attack_warnings(
    rows: Rows, baseline: Rows, manifold: float | None, agreement: float | None
) -> list[str]:
    warnings = []
    if agreement is not None and 1 - agreement > DISAGREEMENT:
        warnings.append(
            f"the classifiers disagree on {1 - agreement:.0%} of the reconstructions: some "
            "accepted ones may be false positives"
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
    told = [name for name in baseline.columns if name.startswith(("verified_", "top1_"))]
    chance = max((_mean(baseline, name) for name in told), default=0.0)
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
    rows: Rows, names: tuple[str, ...], deciding: str, count: int = 5
) -> list[tuple[str, float]]:
    """List the people best recognised, by the deciding column."""
    mean = rows.columns[deciding].double().mean(1)
    match = rows.columns.get(deciding.replace("verified_", "match_"), rows.columns[deciding])
    tie = match.double().mean(1)
    order = sorted(range(len(mean)), key=lambda i: (-mean[i].item(), -tie[i].item()))
    return [(names[int(rows.labels[i])], mean[i].item()) for i in order[:count]]
