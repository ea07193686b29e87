"""Utility of a target that classifies attributes: MCC, AUC and accuracy, with intervals."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError
from frostglass.metrics._stats import interval
from frostglass.runtime.seeding import generator_for

CHUNK = 2**22  # weights held at once while people are resampled


def mcc(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the Matthews correlation (A,) of "logit above 0" with answers (N, A) of 0 and 1.

    It is 0 where it is undefined, because one of the two is constant.
    """
    _check(logits, answers)
    return _mcc(logits > 0, answers > 0, torch.ones(1, len(logits), dtype=torch.double))[0]


def auc(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the area under the ROC curve (A,); NaN where all answers are the same.

    This is how often an image with the attribute has a higher logit than one without; ties count
    half.
    """
    _check(logits, answers)
    return _auc(logits, answers > 0, torch.ones(1, len(logits), dtype=torch.double))[0]


def utility(
    logits: Tensor,
    answers: Tensor,
    labels: Tensor | None = None,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, float]:
    """Return mean MCC and AUC over attributes, and overall accuracy, of logits and answers (N, A).

    The means are over the `counted` of all `attributes`: those with positive and negative images.
    An attribute for which the target's answer is constant counts, with an MCC of 0. `accuracy` is
    the share of correct answers over everything.

    With `labels` (N,), the person of each image, each value gets a percentile bootstrap interval
    over people, as `mean_mcc_low` and so on: people are resampled with all their images. An
    attribute with one answer among the resampled people is left out of that resample's mean AUC
    and has an MCC of 0. If all answers are right, or all wrong, the accuracy gets the exact
    binomial bound over people. An MCC or AUC of exactly 1 has an interval of width 0, which is
    overconfident.

    Paper: mean MCC over attributes is the utility of Xiao et al., AAAI 2020, arXiv 1911.10143;
    mean AUC that of Wang et al., Crafter, NDSS 2024, arXiv 2401.07205.
    """
    _check(logits, answers)
    if labels is not None and labels.shape != logits.shape[:1]:
        raise DataError(
            f"expected one person for each of {len(logits)} images, got labels of shape "
            f"{tuple(labels.shape)}"
        )
    yes, known = answers > 0, varied(answers)
    once = torch.ones(1, len(logits), dtype=torch.double)
    values = {name: mean[0].item() for name, mean in _means(logits, yes, known, once).items()}
    values |= {"attributes": len(known), "counted": int(known.sum()), "images": len(logits)}
    if labels is None:
        return values
    _, person = labels.unique(return_inverse=True)
    people = int(person.max()) + 1
    parts = [
        _means(logits, yes, known, some[:, person])
        for some in _resampled(people, resamples, seed).split(max(1, CHUNK // len(logits)))
    ]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double)
    for name in parts[0]:
        low, high = torch.cat([part[name] for part in parts]).nanquantile(tails).tolist()
        if name == "accuracy" and values[name] in (0.0, 1.0):
            low, high = interval(torch.full((people,), values[name]), level=level)
        values |= {f"{name}_low": low, f"{name}_high": high}
    return values | {"people": people}


def varied(answers: Tensor) -> Tensor:
    """Return which attributes have both answers, bool (A,) for answers (N, A); at least one must.

    Utility cannot be measured on attributes that all images share.
    """
    yes = answers > 0
    known = yes.any(0) & ~yes.all(0)
    if not known.any():
        raise DataError(
            f"each of {yes.shape[1]} attributes has the same answer for all {len(yes)} images: "
            "utility cannot be measured on them. Use more people or images (judging.identities, "
            "judging.images), or other attributes (target.attributes)."
        )
    return known


def _check(logits: Tensor, answers: Tensor) -> None:
    if logits.ndim != 2 or logits.shape != answers.shape or not logits.numel():
        raise DataError(
            f"expected logits and answers (N, A) of one shape, got {tuple(logits.shape)} and "
            f"{tuple(answers.shape)}"
        )
    if broken := int((~logits.isfinite()).sum()):
        raise RunError(f"{broken} logits are not finite: the target's utility is undefined")
    if not ((answers == 0) | (answers == 1)).all():
        raise DataError("expected answers of 0 and 1, got others")


def _means(logits: Tensor, yes: Tensor, known: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return MCC, AUC and accuracy (B,) where image i counts weights[b, i] times."""
    right = ((logits > 0) == yes).double().mean(1)
    return {
        "mean_mcc": _mcc(logits[:, known] > 0, yes[:, known], weights).mean(1),
        "mean_auc": _auc(logits[:, known], yes[:, known], weights).nanmean(1),
        "accuracy": weights @ right / weights.sum(1),
    }


def _mcc(answered: Tensor, yes: Tensor, weights: Tensor) -> Tensor:
    """Return the Matthews correlation (B, A) from the four counts, which are exact integers."""
    parts = (answered & yes, ~answered & ~yes, answered & ~yes, ~answered & yes)
    both, neither, false, missed = (weights @ part.double() for part in parts)
    scale = ((both + false) * (both + missed) * (neither + false) * (neither + missed)).sqrt()
    return torch.where(scale > 0, (both * neither - false * missed) / scale, 0.0)


def _auc(logits: Tensor, yes: Tensor, weights: Tensor) -> Tensor:
    """Return the AUC (B, A) by counting pairs of images along the sorted logits."""
    columns = []
    for scores, has in zip(logits.T, yes.T, strict=True):
        levels, level = scores.unique(return_inverse=True)
        empty = torch.zeros(len(weights), len(levels), dtype=torch.double)
        positive, negative = (empty.index_add(1, level, weights * part) for part in (has, ~has))
        below = negative.cumsum(1) - negative / 2  # half of those at the same level
        columns.append((positive * below).sum(1) / (positive.sum(1) * negative.sum(1)))
    return torch.stack(columns, 1)


def _resampled(people: int, resamples: int, seed: int) -> Tensor:
    """Count how often each person is drawn with replacement, (resamples, people)."""
    rng = generator_for(seed, "bootstrap", people)
    chosen = torch.randint(people, (resamples, people), generator=rng)
    ones = torch.ones(1, dtype=torch.double).expand(resamples, people)
    return torch.zeros(resamples, people, dtype=torch.double).scatter_add_(1, chosen, ones)
