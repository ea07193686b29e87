"""The order of a classifier's outputs: find exchanged classes, and put outputs in another order."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Target
from frostglass.models.base import class_name, noise_images, probe

LEVEL = 0.01  # probability of calling classes exchanged that a model confuses as often as not
LISTED = 20  # classes, up to which an order is written out
IMAGES = 4
CLEAR = 4  # images moved per image kept, from which on classes count as exchanged
EXPLAINED = 0.6  # accuracy in the other order, if it is that of guessing in the stated one
ALIKE = 0.5  # share of moved images with the true class second, above which people look alike
OWN, OTHER = 0.1, 0.5  # shares of a class's images, by which classes look exchanged


@dataclass(frozen=True)
class Cycle:
    """Classes whose images another class of them gets: those of `classes[0]` go to the next.

    `moved` counts the images that go to the next class, `kept` those that stay.
    """

    classes: tuple[int, ...]
    moved: int
    kept: int
    certain: bool


def useless(accuracy: float, classes: int) -> bool:
    """Return whether an accuracy is hardly above guessing."""
    return accuracy <= 1 / classes + 0.1 * (1 - 1 / classes)


def exchanged(confusion: np.ndarray, second: np.ndarray) -> list[Cycle]:
    """Return the classes that a permutation explains clearly better than the stated order.

    `confusion` counts images (true class, predicted class), `second` those among them for which
    the true class comes second. The permutation is the optimal assignment by recall. A sign test
    checks each of its cycles: could so many images move if a model moved and kept them equally
    often? The level is divided by the number of cycles of that length, because the assignment
    chose this one. Of two people who look alike a model may take each for the other; the true
    class then comes second, so such a cycle is not `certain`, and neither is one of few images.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import
    from scipy.stats import binom

    count = len(confusion)
    recall = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    _, best = linear_sum_assignment(-(recall + 1e-6 * np.eye(count)))
    images = max(int(confusion.sum()), 1)
    lost = useless(np.trace(confusion) / images, count)
    # A model that knows nobody is also explained best by some permutation, but not well.
    explained = confusion[np.arange(count), best].sum() >= EXPLAINED * images or not lost
    cycles = []
    for classes in _cycles(best):
        following = best[list(classes)]
        moved, kept = (int(confusion[list(classes), to].sum()) for to in (following, classes))
        length = len(classes)
        choices = math.lgamma(count + 1) - math.lgamma(count - length + 1) - math.log(length)
        chance = binom.logsf(moved - 1, moved + kept, 0.5) + choices
        clear = moved >= CLEAR * kept and chance < math.log(LEVEL)
        alike = second[list(classes), following].sum() > ALIKE * moved and not lost
        looks = all(recall[i, i] <= OWN and recall[i, best[i]] >= OTHER for i in classes)
        if clear or looks:
            cycles.append(Cycle(classes, moved, kept, bool(clear and explained and not alike)))
    return cycles


def _cycles(permutation: np.ndarray) -> list[tuple[int, ...]]:
    """Return the cycles of a permutation that have more than one member."""
    left, cycles = set(range(len(permutation))), []
    while left:
        cycle = [min(left)]
        while (following := int(permutation[cycle[-1]])) != cycle[0]:
            cycle.append(following)
        left -= set(cycle)
        if len(cycle) > 1:
            cycles.append(tuple(cycle))
    return cycles


def corrections(cycles: Sequence[Cycle], classes: Sequence[str]) -> dict[str, str]:
    """Return the names that outputs should have, by the names that they are said to have."""
    return {
        classes[following]: classes[own]
        for cycle in cycles
        for own, following in zip(cycle.classes, cycle.classes[1:] + cycle.classes[:1], strict=True)
    }


def advice(names: Mapping[str, str], stated: Sequence[str]) -> str:
    """Say how to state the right order: the whole list, or in a long one what to replace."""
    if len(stated) <= LISTED:
        order = [names.get(name, name) for name in stated]
        return f"set classes = {json.dumps(order, ensure_ascii=False)}"
    changes = [f"{old!r} by {new!r}" for old, new in names.items()]
    more = f" and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    return (
        f"set classes to the names in the order of the outputs; in the order {stated[0]!r}, "
        f"{stated[1]!r}, ... replace {', '.join(changes[:LISTED])}{more}"
    )


def in_order(target: Target, names: tuple[str, ...]) -> Target:
    """Return a target whose outputs are in the order of `names`, by moving rows of its head.

    Its `classes` state the order that the outputs have. The target itself is left unchanged.
    """
    check_names(target.classes, names)
    if target.classes == names:
        return target
    index = torch.tensor([target.classes.index(name) for name in names])
    module = deepcopy(target.module)
    with torch.no_grad():
        for weight in module.get_submodule(target.head).parameters(recurse=False):
            if weight.ndim and len(weight) == len(names):
                weight.copy_(weight[index.to(weight.device)])
    images = noise_images(module, target.image_shape, IMAGES)
    before, after = probe(target.module, images), probe(module, images)
    if not torch.allclose(after, before[:, index.to(before.device)], rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"classes: the outputs of {class_name(module)} cannot be put in another order by "
            f"moving rows of {target.head!r}: return them in the order {names[0]!r}, {names[1]!r}, "
            "... of the people's names, and remove classes"
        )
    return replace(target, module=module, classes=names)


def check_names(stated: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an order of classes that does not name each private person once."""
    missing = [name for name in names if name not in set(stated)]
    unknown = [name for name in stated if name not in set(names)]
    if not (missing or unknown) and len(stated) == len(names):
        return
    problems = [
        f"{words} {some[0]!r}"
        for words, some in (("without", missing), ("with the unknown", unknown))
        if some
    ]
    raise ConfigError(
        f"classes: expected the names of the {len(names)} people, each once, in the order of the "
        f"model's outputs, got {len(stated)} {' and '.join(problems) or 'with repetitions'}"
    )
