"""Which inputs does a network expect? Try the usual normalisations on private images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostglass.core.types import Images
from frostglass.models.base import as_seen, inner
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.training.trainer import correct

GOOD = 0.9  # accuracy from which on nothing else is tried
TRIED = 256  # images
USEFUL = 0.4  # accuracy below which no input suits a network
BETTER = 0.1  # accuracy gained, from which on another input counts as the right one
LEVEL = 1e-4  # probability that such a gain is chance

BGR = " BGR"
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std
# The smallest values first: of equally good ones the first is suggested.
COLOUR: dict[str, Normalisation] = {
    "[0, 1]": ((0.0,) * 3, (1.0,) * 3),
    "[-1, 1]": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "[0, 255]": ((0.0,) * 3, (0.0039216,) * 3),
}
GREY: dict[str, Normalisation] = {
    "[0, 1]": ((0.0,), (1.0,)),
    "[-1, 1]": ((0.5,), (0.5,)),
    "MNIST": ((0.1307,), (0.3081,)),
    "[0, 255]": ((0.0,), (0.0039216,)),
}


@dataclass(frozen=True)
class Suggestion:
    """The input that suits a network clearly better: a problem if certain, else a hint."""

    problem: str = ""
    hint: str = ""


def better_input(
    module: nn.Module, parts: Sequence[Images], labels: Sequence[Tensor], accuracy: float
) -> Suggestion:
    """Try the usual inputs on some images, if a network is not accurate as it is.

    Images on which one of two inputs is right decide, by a sign test.
    """
    if accuracy >= GOOD:
        return Suggestion()
    images, answers = _some(parts, labels)
    images = images.to(device_of(module))
    now = _hits(module, images, answers)
    usual = GREY if images.shape[1] == 1 else COLOUR if images.shape[1] == 3 else {}
    kinds = [name + order for order in ("", BGR)[: images.shape[1]] for name in usual]
    found = {
        kind: _hits(inner(module), seen, answers)
        for kind in kinds
        for seen in [_normalised(images, kind, usual)]
        if not torch.allclose(seen[:8], as_seen(module, images[:8]), atol=1e-2)
    }
    if not found:
        return Suggestion()
    from scipy.stats import binom  # slow to import

    kind = max(found, key=lambda each: found[each].sum().item())
    gain = (found[kind] - now).double()
    if gain.mean() < BETTER or found[kind].double().mean() < USEFUL:
        return Suggestion()
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    chance = binom.sf(wins - 1, wins + losses, 0.5) * len(found)
    text = (
        f"{_setting(kind, usual)}: {found[kind].double().mean():.0%} of {len(answers)} private "
        f"images are then classified correctly, {now.double().mean():.0%} as it is"
    )
    if chance < LEVEL:
        return Suggestion(problem=f"the model expects other inputs. {text}")
    return Suggestion(hint=f". {text}")


def _some(parts: Sequence[Images], labels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return images evenly from all parts, and their labels."""
    step = max(1, sum(map(len, parts)) // TRIED)
    rows = [torch.arange(0, len(part), step) for part in parts]
    images = [part.floats(index) for part, index in zip(parts, rows, strict=True)]
    answers = [some[index] for some, index in zip(labels, rows, strict=True)]
    return torch.cat(images), torch.cat(answers)


def _normalised(images: Tensor, kind: str, usual: Mapping[str, Normalisation]) -> Tensor:
    """Return images as many networks expect them."""
    mean, std = (
        torch.tensor(values, device=images.device).view(-1, 1, 1)
        for values in usual[kind.removesuffix(BGR)]
    )
    return ((images.flip(1) if kind.endswith(BGR) else images) - mean) / std


def _hits(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with frozen(module), torch.no_grad():
        chunks = [module(chunk).cpu() for chunk in images.split(128)]
    return correct(torch.cat(chunks), labels)


def _setting(kind: str, usual: Mapping[str, Normalisation]) -> str:
    name = kind.removesuffix(BGR)
    mean, std = (f"[{', '.join(f'{value:g}' for value in values)}]" for values in usual[name])
    text = f"Set mean = {mean}, std = {std} ({name})"
    return f"{text} and reverse the channels in its forward (BGR)" if kind != name else text
