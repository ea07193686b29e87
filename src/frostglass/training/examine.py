"""Is it the model that was meant? Examine a network that was not trained here, before an audit.

A model with exchanged classes, probabilities for logits or inputs in another range looks hard to
invert when it is only misread, so what the private images show to be wrong is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.pixels import RowsInOne, shown_together
from frostglass.core.types import Images, Split, Target
from frostglass.models.base import class_name
from frostglass.models.class_order import Cycle, advice, corrections, exchanged, in_order, useless
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.training.behaviour import batch_problem, mode_problem, noise_warning
from frostglass.training.input_range import better_input
from frostglass.training.settings import targets_for

USEFUL = 0.25  # share of the way from guessing to no error that an honest weak model reaches
LEVEL = 1e-4  # probability of refusing such a model for its accuracy
UNSEEN = 5  # images of a class without a correct one, from which on it is mentioned
NAMED = 5  # classes that a warning names


@dataclass(frozen=True)
class Examination:
    """What the private images say about a given model.

    `recall` is the share of correct images of each class (of each attribute). `problems` must be
    mended before an audit; `warnings` are for its reader. `order` is the order of the outputs that
    the images suggest, if it is another one than was stated.
    """

    images: int
    accuracy: float
    recall: tuple[float, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    order: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return what a stored target remembers."""
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "recall": list(self.recall),
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class _Outputs:
    """What a module returns for the private images, image by image.

    `hits` (N, columns): whether the class, or each attribute, is predicted correctly. `predicted`
    and `second` (N,) are the classes with the two highest outputs.
    """

    hits: Tensor
    predicted: Tensor
    second: Tensor
    lowest: float
    highest: float
    total: float  # largest distance of a row's sum from 1
    logsumexp: float  # largest distance of a row's logsumexp from 0


def examine(target: Target, split: Split, classes: Sequence[str] = ()) -> Target:
    """Examine a model that was not trained here; refuse what the private images show to be wrong.

    The model's `classes` state the order of its outputs; numbers ("0", "1", ...) stand for the
    order of the split's people. An order that is given as `classes` is believed: where another one
    fits the images better, that is a warning and not a refusal. Returned is a target in the order
    of the split's people, with what was measured in `info["examination"]` and `info["accuracy"]`.
    """
    stated = tuple(classes) or target.classes
    if not target.attributes:
        unnamed = stated == tuple(map(str, range(len(split.classes))))
        if unnamed and set(stated) != set(split.classes):
            stated = split.classes
        target = in_order(replace(target, classes=stated), split.classes)
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    labels = [targets_for(target, part) for part in parts.values()]
    outputs = _outputs(target.module, list(parts.values()), labels)
    believed = bool(classes)
    found = _examination(target, list(parts.values()), labels, outputs, stated, believed)
    if found.problems:
        raise ConfigError(found.problems)
    rows = outputs.hits.double().mean(1).split([len(part) for part in parts.values()])
    shares = zip(parts, rows, strict=True)
    accuracy = {name: hits.mean().item() for name, hits in shares}
    facts = {"given": True, "accuracy": accuracy, "examination": found.facts()}
    return replace(target, info={**target.info, **facts})


def examination(
    target: Target,
    images: Images,
    labels: Tensor,
    stated: Sequence[str] = (),
    believed: bool = False,
) -> Examination:
    """Examine a target on images with labels (attributes: 0 and 1), and change nothing.

    `stated` is the order of the outputs as the user gave it, for advice; the target's by default.
    `believed`: a better order is a warning, not a problem.
    """
    outputs = _outputs(target.module, [images], [labels])
    return _examination(target, [images], [labels], outputs, stated, believed)


def _examination(
    target: Target,
    parts: Sequence[Images],
    labels: Sequence[Tensor],
    outputs: _Outputs,
    stated: Sequence[str],
    believed: bool,
) -> Examination:
    module, classes = target.module, target.classes
    answers = torch.cat(list(labels))
    accuracy = outputs.hits.double().mean().item()
    problems, warnings = [mode_problem(module), batch_problem(module, parts)], []
    range_problem, range_warning = _output_range(outputs, len(classes), target.attributes)
    problems.append(range_problem)
    warnings += [range_warning, noise_warning(module, parts)]
    order: tuple[str, ...] = ()
    recall = outputs.hits.double().mean(0)
    suggestion = better_input(module, parts, labels, accuracy)
    problems.append(suggestion.problem)
    if not target.attributes:
        confusion, second = _confusion(outputs, answers, len(classes))
        recall = torch.from_numpy(confusion.diagonal() / np.maximum(confusion.sum(1), 1))
        cycles = exchanged(confusion, second)
        certain = [cycle for cycle in cycles if cycle.certain]
        if certain:
            names = corrections(certain, classes)
            order = tuple(names.get(name, name) for name in stated or classes)
            text = _exchanged(certain, confusion, classes, stated or classes, believed)
            (warnings if believed else problems).append(text)
        if not any(problems) and useless(accuracy, len(classes)):
            hits, text = int(outputs.hits.sum()), _useless(accuracy, len(classes))
            text += suggestion.hint
            if certain:
                text += f"; {advice(corrections(certain, classes), stated or classes)}"
            (problems if _hopeless(hits, len(answers), len(classes)) else warnings).append(text)
        elif cycles and not certain:
            warnings.append(_alike(cycles, classes))
        warnings.append(_never_right(confusion, cycles, classes))
    return Examination(
        images=len(answers),
        accuracy=accuracy,
        recall=tuple(recall.tolist()),
        problems=tuple(filter(None, problems)),
        warnings=tuple(filter(None, warnings)),
        order=order,
    )


def _batches(parts: Sequence[Images], labels: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for part, answers in zip(parts, labels, strict=True):
        for index in shown_together(torch.arange(len(part)), part.shape):
            yield part.floats(index), answers[index]


def _outputs(module: nn.Module, parts: Sequence[Images], labels: Sequence[Tensor]) -> _Outputs:
    device = device_of(module)
    count = sum(map(len, parts))
    hits, best, ranges = RowsInOne(count), RowsInOne(count), torch.full((4,), -torch.inf).double()
    with frozen(module), torch.no_grad():
        for images, answers in _batches(parts, labels):
            logits = module(images.to(device)).cpu().double()
            if not logits.isfinite().all():
                raise ConfigError(
                    f"{class_name(module)} returns NaN or infinity for private images: check its "
                    "weights and its input range (mean, std)"
                )
            several = answers.ndim == 2
            top = logits.topk(min(2, logits.shape[1])).indices
            best.add(top[:, [0, -1]])
            right = (logits > 0) == (answers > 0) if several else top[:, :1] == answers[:, None]
            hits.add(right)
            total, lse = (logits.sum(1) - 1).abs().max(), logits.logsumexp(1).abs().max()
            here = torch.stack([-logits.min(), logits.max(), total, lse])
            ranges = torch.maximum(ranges, here)
    low, high, most_total, most_lse = ranges.tolist()
    predicted, second = best.tensor.unbind(1)
    return _Outputs(hits.tensor, predicted, second, -low, high, most_total, most_lse)


def _confusion(outputs: _Outputs, labels: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Count images by true and predicted class, and those whose true class comes second."""
    cells = labels * count + outputs.predicted
    near = cells[outputs.second == labels]
    return tuple(  # type: ignore[return-value]
        torch.bincount(some, minlength=count * count).reshape(count, count).numpy()
        for some in (cells, near)
    )


def _output_range(outputs: _Outputs, classes: int, attributes: bool) -> tuple[str, str]:
    """Return a problem and a warning, or "", about outputs that are not logits."""
    within = outputs.lowest >= 0 and outputs.highest <= 1
    if attributes and within:
        return "the outputs are probabilities, not logits: remove the sigmoid at the end", ""
    if attributes or classes < 2:
        return "", ""
    if outputs.lowest >= -1e-4 and outputs.total < 1e-3:
        return (
            "the outputs are probabilities (they sum to 1), not logits, and a second softmax would "
            "flatten every gradient: remove the softmax at the end",
            "",
        )
    if outputs.logsumexp < 1e-3:
        return "", (
            "the outputs are log-probabilities: harmless for losses after a softmax, but margins "
            "and logit losses see shifted values; remove the log-softmax at the end"
        )
    if within:
        return "", "all outputs are in [0, 1]: if a sigmoid ends the model, remove it"
    return "", ""


def _exchanged(
    cycles: Sequence[Cycle],
    confusion: np.ndarray,
    classes: Sequence[str],
    stated: Sequence[str],
    believed: bool,
) -> str:
    wrong = [number for cycle in cycles for number in cycle.classes]
    examples = [
        f"{confusion[a, b]} of {confusion[a].sum()} images of {classes[a]!r} are classified as "
        f"{classes[b]!r}, {confusion[a, a]} as {classes[a]!r}"
        for cycle in cycles[:1]
        for a, b in [(cycle.classes[0], cycle.classes[1])]
    ]
    better = advice(corrections(cycles, classes), stated)
    if believed:
        return (
            f"{len(wrong)} of {len(classes)} classes seem to be in another order than stated "
            f"({examples[0]}). The stated order is used; if it is wrong, {better}"
        )
    return (
        f"{len(wrong)} of {len(classes)} classes are in another order than stated ({examples[0]}). "
        f"If the stated order is right, give it as classes; otherwise {better}"
    )


def _alike(cycles: Sequence[Cycle], classes: Sequence[str]) -> str:
    groups = [" → ".join(classes[i] for i in cycle.classes) for cycle in cycles[:NAMED]]
    return (
        f"the images of some people are classified as one another ({'; '.join(groups)}): they look "
        "alike to the model, or its classes are in another order (classes)"
    )


def _useless(accuracy: float, classes: int) -> str:
    return (
        f"it classifies {accuracy:.0%} of the private images correctly, where guessing gives "
        f"{1 / classes:.0%}. Check its weights, the order of its classes (classes), its input "
        "range (mean, std), and the size and crop of the images"
    )


def _hopeless(hits: int, images: int, classes: int) -> bool:
    """Return whether an honest weak model would hardly ever have so few hits."""
    from scipy.stats import binom  # slow to import

    chance = 1 / classes
    return bool(binom.cdf(hits, images, max(0.4, chance + USEFUL * (1 - chance))) < LEVEL)


def _never_right(confusion: np.ndarray, cycles: Sequence[Cycle], classes: Sequence[str]) -> str:
    known = {number for cycle in cycles for number in cycle.classes}
    lost = [
        name
        for number, name in enumerate(classes)
        if number not in known and not confusion[number, number]
        and confusion[number].sum() >= UNSEEN
    ]  # fmt: skip
    if not lost or len(lost) > len(classes) / 2:
        return ""
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    return (
        f"no image of {', '.join(lost[:NAMED])}{more} is classified correctly: are these the "
        "people the model was trained on?"
    )
