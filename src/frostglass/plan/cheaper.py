"""What to change when a run would take hours, and how long it would take then."""

from collections.abc import Mapping, Sequence
from typing import Any

from frostglass.auditing.experiment import Experiment

LONG = 2 * 3600.0  # seconds from which advice is given
LARGE = 0.2  # share of the time from which a kind of step is worth changing
FEWER_PEOPLE = 50
SHORTER = 4  # times fewer steps or epochs

Advice = tuple[str, float]


def cheaper(costs: Mapping[str, Any], chosen: Sequence[tuple[str, Experiment]]) -> list[Advice]:
    """Return changes that make a long run shorter, each with the seconds it would then take.

    Steps of training and of search cost in proportion to their number, so no dry run is needed.
    """
    total = costs["seconds"]
    if total < LONG:
        return []
    spent: dict[str, float] = {}
    for row in costs["steps"]:
        spent[row["step"]] = spent.get(row["step"], 0.0) + row["seconds"]
    found = [*_prior(spent, chosen), *_attack(spent, chosen), *_training(spent, chosen)]
    return [(text, total - saved) for text, saved in found if saved >= LARGE * total]


def _prior(spent: Mapping[str, float], chosen: Sequence[tuple[str, Experiment]]) -> list[Advice]:
    seconds = spent.get("prior", 0.0)
    found = [("your own generator instead of a prior trained here (--prior SOURCE)", seconds)]
    steps = {getattr(exp.prior, "steps", None) for _, exp in chosen}
    if len(steps) == 1 and (number := steps.pop()):
        fewer = max(1, number // SHORTER)
        found.append((f"a smaller prior (--set prior.steps={fewer})", seconds * (1 - 1 / SHORTER)))
    return found


def _attack(spent: Mapping[str, float], chosen: Sequence[tuple[str, Experiment]]) -> list[Advice]:
    people = max(exp.judging.identities or exp.data.counts()[0] for _, exp in chosen)
    if people <= FEWER_PEOPLE:
        return []
    saved = spent.get("attack", 0.0) * (1 - FEWER_PEOPLE / people)
    return [(f"fewer people attacked (--set judging.identities={FEWER_PEOPLE})", saved)]


def _training(spent: Mapping[str, float], chosen: Sequence[tuple[str, Experiment]]) -> list[Advice]:
    sizes = {exp.data.image_shape[-1] for _, exp in chosen}
    seconds = sum(spent.get(step, 0.0) for step in ("target", "prior", "attack"))
    if len(sizes) != 1 or (size := sizes.pop()) < 64:
        return []
    text = f"images of half the size, if the model takes them (--set data.size={size // 2})"
    return [(text, seconds * 0.75)]
