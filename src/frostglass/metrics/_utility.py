"""What a target that tells attributes is still good for: Matthews correlation, AUC and accuracy, with intervals over people."""

import torch
from torch import Tensor

from frostglass.core.errors import DataError, RunError
from frostglass.metrics._stats import interval
from frostglass.runtime.seeding import generator_for

CHUNK = 2**22  # weights held at once while people are drawn again


def mcc(logits: Tensor, answers: Tensor) -> Tensor:
    """Matthews correlation (A,) of "logit above 0" with answers (N, A) of 0 and 1; 0 where it is undefined, because one of the two never changes."""
    _check(logits, answers)
    return _mcc(logits > 0, answers > 0, torch.ones(1, len(logits), dtype=torch.double))[0]


def auc(logits: Tensor, answers: Tensor) -> Tensor:
    """Area under the ROC curve (A,): how often a picture with the attribute has a higher logit than one without, ties counting half; NaN where all answers are the same."""
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
    """Means over attributes of MCC and AUC, and the accuracy over all of them, for logits and answers (N, A).

    The means are over the `counted` of all `attributes`, those of which there are pictures with and without: of the others nothing can be learned, whatever the target
    says. An attribute that the target never or always gives counts, with an MCC of 0. `accuracy` is the share of right answers, over everything.

    With `labels` (N,), which say whose pictures they are, each has a percentile bootstrap interval over people, as `mean_mcc_low` and so on: people are drawn again with all
    their pictures. An attribute that has one answer among the people drawn is left out of that draw's mean AUC and has an MCC of 0 there. If all is right, or
    all wrong, the accuracy gets the exact binomial bound over people; an MCC or AUC of exactly 1 has an interval without width, which is too sure of itself.

    Paper: mean MCC over attributes is the utility of Xiao et al., AAAI 2020, arXiv 1911.10143; mean AUC that of Wang et al., Crafter, NDSS 2024, arXiv 2401.07205.
    """
    _check(logits, answers)
    if labels is not None and labels.shape != logits.shape[:1]:
        raise DataError(
            f"expected one person for each of {len(logits)} pictures, got labels of shape {tuple(labels.shape)}"
        )
    yes, known = answers > 0, varied(answers)
    once = torch.ones(1, len(logits), dtype=torch.double)
    found = {name: values[0].item() for name, values in _means(logits, yes, known, once).items()}
    found |= {"attributes": len(known), "counted": int(known.sum()), "pictures": len(logits)}
    if labels is None:
        return found
    _, whose = labels.unique(return_inverse=True)
    people = int(whose.max()) + 1
    drawn = _drawn_again(people, resamples, seed)
    parts = [
        _means(logits, yes, known, some[:, whose])
        for some in drawn.split(max(1, CHUNK // len(logits)))
    ]
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double)
    for name in parts[0]:
        low, high = torch.cat([part[name] for part in parts]).nanquantile(tails).tolist()
        if name == "accuracy" and found[name] in (0.0, 1.0):
            low, high = interval(torch.full((people,), found[name]), level=level)
        found |= {f"{name}_low": low, f"{name}_high": high}
    return found | {"people": people}


def varied(answers: Tensor) -> Tensor:
    """Of which attributes there are pictures with and without, (A,) of bool for answers (N, A); refused if of none: then utility cannot be measured."""
    yes = answers > 0
    known = yes.any(0) & ~yes.all(0)
    if not known.any():
        raise DataError(
            f"each of {yes.shape[1]} attributes has the same answer for all {len(yes)} pictures: utility cannot be measured on them; take more people or "
            "pictures (judging.identities, judging.pictures), or other attributes (target.attributes)"
        )
    return known


def _check(logits: Tensor, answers: Tensor) -> None:
    if logits.ndim != 2 or logits.shape != answers.shape or not logits.numel():
        raise DataError(
            f"expected logits and answers (N, A) of one shape, got {tuple(logits.shape)} and {tuple(answers.shape)}"
        )
    if not logits.isfinite().all():
        raise RunError(
            f"{int((~logits.isfinite()).sum())} logits are not finite: what the target is good for cannot be told"
        )
    if not ((answers == 0) | (answers == 1)).all():
        raise DataError("expected answers of 0 and 1, got others")


def _means(logits: Tensor, yes: Tensor, known: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """MCC, AUC and accuracy (B,) where picture i counts weights[b, i] times."""
    right = ((logits > 0) == yes).double().mean(1)
    return {
        "mean_mcc": _mcc(logits[:, known] > 0, yes[:, known], weights).mean(1),
        "mean_auc": _auc(logits[:, known], yes[:, known], weights).nanmean(1),
        "accuracy": weights @ right / weights.sum(1),
    }


def _mcc(said: Tensor, yes: Tensor, weights: Tensor) -> Tensor:
    """Matthews correlation (B, A) from the four counts, which are whole and therefore exact."""
    both, neither, false, missed = (
        weights @ part.double() for part in (said & yes, ~said & ~yes, said & ~yes, ~said & yes)
    )
    scale = ((both + false) * (both + missed) * (neither + false) * (neither + missed)).sqrt()
    return torch.where(scale > 0, (both * neither - false * missed) / scale, 0.0)


def _auc(logits: Tensor, yes: Tensor, weights: Tensor) -> Tensor:
    """AUC (B, A): pairs of a picture with the attribute and one without, counted along the sorted logits."""
    columns = []
    for scores, has in zip(logits.T, yes.T, strict=True):
        levels, level = scores.unique(return_inverse=True)
        empty = torch.zeros(len(weights), len(levels), dtype=torch.double)
        with_it, without = (empty.index_add(1, level, weights * part) for part in (has, ~has))
        below = without.cumsum(1) - without / 2  # half of those at the same level
        columns.append((with_it * below).sum(1) / (with_it.sum(1) * without.sum(1)))
    return torch.stack(columns, 1)


def _drawn_again(people: int, resamples: int, seed: int) -> Tensor:
    """How often each person is drawn, (resamples, people), when as many as there are are drawn with replacement."""
    chosen = torch.randint(
        people, (resamples, people), generator=generator_for(seed, "bootstrap", people)
    )
    return torch.zeros(resamples, people, dtype=torch.double).scatter_add_(
        1, chosen, torch.ones(1, dtype=torch.double).expand(resamples, people)
    )
