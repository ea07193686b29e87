"""Attack accuracy, and every convention under which papers report it."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, Metric, Rows, metrics


@metrics.register
@parameters
class Accuracy(Metric):
    """Does a classifier name the attacked person, and does the target?

    Columns `top1_N`, `top5_N` by each evaluator N, and `target_top1` by the target itself. A low
    `target_top1` means that the attack did not optimise. A high one with a low `top1_1` means that
    the reconstructions are adversarial examples, which no evaluator accepts. `target_confidence`
    is the target's probability of the attacked class on the final 8-bit images. With five classes
    or fewer, top-5 is always 1 and says nothing.

    Use: in every audit of a model: the papers' attack accuracy, and whether the search converged.
    """

    title: ClassVar[str] = "Attack accuracy"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if evidence.target.attributes:
            raise ConfigError(
                "accuracy needs a target that classifies people, got one that classifies "
                "attributes. Use top1 instead."
            )
        logits, labels = evidence.target_logits, evidence.labels
        confidence = logits.softmax(1).gather(1, labels[:, None])[:, 0]
        return {
            "target_top1": evidence.table(hits(logits, labels, 1)),
            "target_confidence": evidence.table(confidence),
            **evaluator_hits(evidence),
        }


def evaluator_hits(evidence: Evidence) -> dict[str, Tensor]:
    """Measure whether the attacked person is evaluator N's `top1_N`, and among its `top5_N`.

    Embedders name nobody and have no such columns.
    """
    return {
        f"top{k}_{number}": evidence.table(hits(logits, evidence.labels, k))
        for number, (logits, _) in enumerate(evidence.evaluator_outputs, 1)
        for k in (1, 5)
    }


def hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return 1 where the label is among the k largest logits, else 0."""
    k = min(k, logits.shape[1])
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(1).float()


def conventions(rows: Rows, evaluator: int = 1, group: int = 60) -> dict[str, float]:
    """Average attack accuracy as each code base does, from the same rows.

    mean: over candidates and identities (KED-MI, BiDO, LOMMA, TL-DMI, PPA, PLG, CALoR).
    selected: the candidate with the highest target confidence (GMI).
    any: success of any candidate (GMI's "acc5").
    first: the first draw (BREP-MI's one image).
    std_draws, var_draws: spread (n - 1) over draws of the mean over a group of `group` identities,
    averaged over groups (BiDO; KED-MI).
    std_identities: spread over identities (VMI).
    top5: mean of top-5. top5_last: top-5 of the last draw only (LOMMA and TL-DMI print this).

    If an attack keeps only some of its candidates, all of these are of the kept ones.
    """
    names = (f"top1_{evaluator}", f"top5_{evaluator}", "target_confidence")
    top1, top5, confidence = (rows.columns[name].double() for name in names)
    if rows.draws is not None:  # undo the ranking: some conventions count draws
        order = rows.draws.argsort(1)
        top1, top5, confidence = (values.gather(1, order) for values in (top1, top5, confidence))
    pick = confidence.argmax(1)
    draws = [part.mean(0) for part in top1.split(group)]
    several = top1.shape[1] > 1
    result = {
        "mean": top1.mean(),
        "selected": top1[torch.arange(len(top1)), pick].mean(),
        "any": top1.amax(1).mean(),
        "first": top1[:, 0].mean(),
        "std_draws": torch.stack([d.std() for d in draws]).mean() if several else torch.zeros(()),
        "var_draws": torch.stack([d.var() for d in draws]).mean() if several else torch.zeros(()),
        "std_identities": top1.mean(1).std(unbiased=False),
        "top5": top5.mean(),
        "top5_last": top5[:, -1].mean(),
    }
    return {name: value.item() for name, value in result.items()}
