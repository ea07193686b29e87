"""Whom an evaluator would take a reconstruction for, at a stated false-accept rate."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.metrics.base import Evidence, Metric, metrics


@metrics.register
@parameters
class Verification(Metric):
    """Would a verifier take the reconstruction for the attacked person?

    match(x, y) = mean of the five largest cosines between e(x) and the embeddings of y's reference
    images; x is verified if match(x, y) > t, with t such that a share of at most 1 % (or 0.1 %) of
    comparisons with public people passes.

    Columns for each evaluator N: `match_N`, `verified_N` (false-accept rate 1 %) and `strict_N`
    (0.1 %, or the finest rate that the images support). The embedding e of an image is the
    direction of the evaluator's penultimate feature, relative to the mean of public images. Unlike
    top-1, where some person must win whatever comes in, a face that is nobody's passes nowhere.

    Use: in every audit: it is what "recognised" means, and the controls need it.
    Paper: the protocol of face verification; LFW's "image-restricted" test is the best known.
    Differs: none of the five papers verifies; their evaluators are classifiers of the private
    people, and report top-1.
    """

    title: ClassVar[str] = "Verification"

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        if not evidence.evaluators:
            raise ConfigError("verification needs at least one evaluator, got none. Add one.")
        people = evidence.reconstructions.labels.tolist()
        rows = torch.arange(len(people)).repeat_interleave(len(evidence.labels) // len(people))
        columns: dict[str, Tensor] = {}
        pairs = zip(evidence.evaluators, evidence.enrolled, strict=True)
        for number, (evaluator, verifier) in enumerate(pairs, 1):
            matches = verifier.matches(evaluator, evidence.images, people).cpu()
            match = evidence.table(matches.gather(1, rows[:, None])[:, 0])
            usual, strict = verifier.thresholds
            columns |= {
                f"verified_{number}": (match > usual).float(),
                f"strict_{number}": (match > strict).float(),
                f"match_{number}": match,
            }
        return columns
