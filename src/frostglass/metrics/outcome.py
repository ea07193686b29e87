"""What became of each reconstruction: recognised, or accepted by a network that it fools."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.accuracy import hits
from frostglass.metrics.base import Evidence, Metric, metrics


@metrics.register
@parameters
class Outcome(Metric):
    """Which reconstructions show the person, and which only fool a network?

    Each reconstruction falls into one of five columns, so that they sum to 1. T: the target ranks
    the attacked person first. E: the first evaluator does. V: a face verifier takes the image for
    the person, at a false-accept rate of 1 % (`verification`). `outcome_true_positive`: E and V.
    `outcome_fools_evaluator`: E without V, the false positives of attack accuracy.
    `outcome_fools_target`: T alone, an adversarial example of the target.
    `outcome_false_negative`: V without E, which attack accuracy overlooks. `outcome_missed`: none.
    `frostglass.metrics.outcome.categories` is the whole definition.

    The verifier is an embedder, if the evaluators have one, else a classifier; of several the one
    that accepts most held-out private images. No reconstruction has a say in that.

    Use: to tell reconstructions of the person from images that only fool the target.
    Paper: Ho et al., TL-DMI, CVPR 2024, arXiv 2405.05588, Appendix B.2: false positives, which the
    target accepts and the evaluator does not; Yu et al., CALoR, arXiv 2410.05814, Fig. 12: their
    categories.

    Differs: TL-DMI's false positives (T without E) are `outcome_fools_target` and, if the verifier
    takes the image for the person after all, part of `outcome_false_negative`; it has no verifier.
    CALoR's figure was not at hand, and its categories may be others: the five are ours, and shares
    must not be compared with it.
    """

    title: ClassVar[str] = "False positives"
    surfaces: ClassVar[frozenset[str]] = frozenset({"model"})

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        _ = evidence.first_evaluator
        if evidence.target.attributes:
            raise ConfigError(
                "outcome needs a target that classifies people, got one that classifies "
                "attributes. Use verification instead."
            )
        labels = evidence.labels
        target = hits(evidence.target_logits, labels, 1) > 0
        named = hits(evidence.evaluator_outputs[0][0], labels, 1) > 0
        verified = _verified(evidence)
        parts = categories(target, named, verified)
        return {f"outcome_{name}": evidence.table(part.float()) for name, part in parts.items()}


def categories(target: Tensor, named: Tensor, verified: Tensor) -> dict[str, Tensor]:
    """Sort reconstructions by three answers (N,): each is in exactly one of five categories."""
    return {
        "true_positive": named & verified,
        "fools_evaluator": named & ~verified,
        "fools_target": target & ~named & ~verified,
        "false_negative": ~named & verified,
        "missed": ~target & ~named & ~verified,
    }


def _verified(evidence: Evidence) -> Tensor:
    """Return whether the best verifier takes each image for the attacked person."""
    pairs = list(zip(evidence.evaluators, evidence.enrolled, strict=True))
    evaluator, verifier = max(
        pairs, key=lambda pair: (not pair[0].classes, pair[1].true_accepts[0].item())
    )
    people = evidence.reconstructions.labels
    matches = verifier.matches(evaluator, evidence.images, people.tolist()).cpu()
    candidates = len(evidence.labels) // len(people)
    place = torch.arange(len(people)).repeat_interleave(candidates)
    return matches.gather(1, place[:, None])[:, 0] > verifier.thresholds[0]
