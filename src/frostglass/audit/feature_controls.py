"""What makes an audit of features believable: blind draws, a positive control, and the scale on which a similarity is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frostglass.audit.controls import MOST_PARTIAL, UNKNOWN_PEOPLE, WEAK_EVALUATOR, broken_off
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.metrics._emd import pii_terms
from frostglass.metrics._lda import lda_chance, lda_score
from frostglass.metrics.base import Rows, Score
from frostglass.networks.embedding import embed, public_centre

BLIND_EMBEDDER = (
    0.2  # least difference between the similarity of one person's photos and of two people's
)
MAX_EMD_SAMPLES = 1000  # pictures between which earth is moved at most


@dataclass(frozen=True)
class FeatureControls:
    """Judgements on one audit of features.

    `lift`: attack minus blind draws of the attacker's prior, person by person, in similarity and by each judge; `control_lift`: the same on the plain features of
    the undefended model. `references`: the similarity of two photos of one person (`same_person`) and of two people (`different_people`). `vacuous`: why the
    audit proves nothing, or "".
    """

    lift: tuple[Score, ...]
    control_lift: tuple[Score, ...]
    references: Mapping[str, float]
    vacuous: str
    warnings: tuple[str, ...]


def judge_features(
    rows: Rows,
    prior_rows: Rows,
    control: tuple[Rows, Rows] | None,
    references: Mapping[str, float],
    *,
    margin: float,
    evaluators: Sequence[Target],
    partial: int = 0,
    broken: int = 0,
    strangers: bool = True,
) -> FeatureControls:
    """Weigh an attack's rows against those of blind draws and of the positive control.

    `broken` pictures come from searches that broke off; of `partial` people there are no others. `strangers` is False if nobody knows
    whether the prior saw the attacked people.
    """
    control_lift = feature_lift(*control) if control else ()
    vacuous = ""
    apart = references["same_person"] - references["different_people"]
    if apart < BLIND_EMBEDDER:
        vacuous = (
            f"the embedder hardly tells people apart (cosine {references['same_person']:.2f} for one person, {references['different_people']:.2f} for two): "
            "train it longer, or on more public people with several pictures each"
        )
    elif partial > MOST_PARTIAL * len(rows.labels):
        vacuous = f"the search broke off for {partial} of {len(rows.labels)} people, so a low score says nothing of the features"
    elif control is None:
        vacuous = (
            "no positive control was run, so a failed attack cannot be told from a good protection"
        )
    elif (
        similarity := next(score for score in control_lift if score.name == "similarity")
    ).low <= margin:
        vacuous = (
            f"the same attack does not rebuild people from unprotected features (similarity above blind draws {similarity.value:.2f}, at least "
            f"{similarity.low:.2f} with 95 % confidence, wanted above {margin:.2f}): it cannot show that a protection works"
        )
    elif (reached := control[0].score("similarity")).low <= references["different_people"] + margin:
        vacuous = (
            f"what the same attack rebuilds from unprotected features is hardly more like the victims ({reached.value:.2f}) than other people are "
            f"({references['different_people']:.2f}, wanted {margin:.2f} above that): it cannot show that a protection works"
        )
    weak = [
        f"evaluator {number} is right on only {right:.0%} of held-out pictures: its verdicts are weak"
        for number, evaluator in enumerate(evaluators, 1)
        if (right := evaluator.info["accuracy"]["test"]) < WEAK_EVALUATOR
    ]
    warnings = (*([] if strangers else [UNKNOWN_PEOPLE]), *broken_off(partial, broken, rows), *weak)
    return FeatureControls(
        feature_lift(rows, prior_rows), control_lift, dict(references), vacuous, warnings
    )


def feature_lift(rows: Rows, prior_rows: Rows) -> tuple[Score, ...]:
    """Attack minus blind draws, person by person, in similarity and by each judge."""
    names = ["similarity", *sorted(name for name in rows.columns if name.startswith("top1_"))]
    return tuple(
        Score.of(
            name, rows.columns[name].double().mean(1) - prior_rows.columns[name].double().mean(1)
        )
        for name in names
    )


def separation(embedder: Target, split: Split, found: Reconstructions) -> dict[str, Any]:
    """How far the people stay apart in what was rebuilt, between people over within, and what chance alone gives."""
    groups = found.labels.repeat_interleave(found.images.shape[1])
    if found.images.shape[1] < 2:
        return {"lda": None, "lda_chance": None}
    embeddings = embed(
        embedder, found.images.flatten(0, 1), public_centre(embedder, split.public)
    ).cpu()
    means = torch.stack([embeddings[groups == group].mean(0) for group in groups.unique()])
    if torch.equal(
        embeddings, means[groups.unique(return_inverse=True)[1]]
    ):  # nothing varies within people, as where everybody gets one picture
        return {"lda": None, "lda_chance": lda_chance(groups)}
    return {"lda": lda_score(embeddings, groups), "lda_chance": lda_chance(groups)}


def transport(
    found: Reconstructions,
    victims: Images,
    draws: tuple[Reconstructions, Reconstructions],
    people: int,
    pictures: int,
) -> dict[str, Any]:
    """Earth mover's distances to blind draws, the privacy index: of rebuilt pictures, of other draws, and of the true pictures."""
    candidates = found.images.shape[1]
    truth = victims.floats().unflatten(0, (people, -1)).repeat_interleave(candidates // pictures, 1)
    chosen = torch.linspace(
        0, people * candidates - 1, min(MAX_EMD_SAMPLES, people * candidates)
    ).long()
    sets = (
        images.flatten(0, 1)[chosen].flatten(1)
        for images in (found.images, truth, *(one.images for one in draws))
    )
    terms = pii_terms(*sets)
    return {
        "emd": terms["rebuilt"],
        "emd_floor": terms["floor"],
        "emd_originals": terms["originals"],
    }
