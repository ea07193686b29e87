"""Attack accuracy, and every convention under which papers report it."""

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, Rows, metrics


@metrics.register
@parameters
class Accuracy:
    """Does a judge recognise the attacked person? Columns `top1_N`, `top5_N` by each evaluator N, and by the target itself.

    `target_top1` low means that the attack did not optimise; high with a low `top1_1` means that the target was fooled by pictures no
    judge accepts. `target_confidence` is the target's probability of the attacked class on the final 8-bit pictures. With five classes or fewer, top-5 is always 1 and says nothing.
    """

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if evidence.target.attributes:
            raise ConfigError(
                "accuracy asks the target who somebody is, and this one tells attributes: use recognition instead"
            )
        labels = evidence.found.labels.repeat_interleave(evidence.found.images.shape[1])
        columns = {
            "target_top1": hits(evidence.target_logits, labels, 1),
            "target_confidence": evidence.target_logits.softmax(1).gather(1, labels[:, None])[:, 0],
        }
        return {name: evidence.table(values) for name, values in columns.items()} | verdicts(
            evidence
        )


def verdicts(evidence: Evidence) -> dict[str, Tensor]:
    """Columns `top1_N` and `top5_N`: is the attacked person the first, or among the first five, whom evaluator N thinks of?"""
    labels = evidence.found.labels.repeat_interleave(evidence.found.images.shape[1])
    columns = {}
    for number, (logits, _) in enumerate(evidence.evaluator_outputs, 1):
        columns[f"top1_{number}"] = evidence.table(hits(logits, labels, 1))
        columns[f"top5_{number}"] = evidence.table(hits(logits, labels, 5))
    return columns


def hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """1 where the label is among the k largest logits."""
    k = min(k, logits.shape[1])
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(1).float()


def conventions(rows: Rows, evaluator: int = 1, group: int = 60) -> dict[str, float]:
    """Attack accuracy as each code base averages it, from the same rows.

    mean: over candidates and identities (KED-MI, BiDO, LOMMA, TL-DMI, PPA, PLG, CALoR). selected: the candidate the target likes best
    (GMI). any: success of any candidate (GMI's "acc5"). std_draws and var_draws: spread (n - 1) over draws of the mean over a group of
    `group` identities, averaged over groups (BiDO; KED-MI). std_identities: spread over identities (VMI). top5: mean of top-5.
    top5_last: top-5 of the last draw only (LOMMA and TL-DMI print this). first: the first draw (BREP-MI's one image).
    Where an attack keeps only some of its candidates, all of these speak of the kept ones.
    """
    top1, top5 = (
        rows.columns[f"top1_{evaluator}"].double(),
        rows.columns[f"top5_{evaluator}"].double(),
    )
    sure = rows.columns["target_confidence"]
    if (
        rows.draws is not None
    ):  # rows are sorted by the target's liking; what follows counts draw by draw
        order = rows.draws.argsort(1)
        top1, top5, sure = (values.gather(1, order) for values in (top1, top5, sure))
    pick = sure.argmax(1)
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
