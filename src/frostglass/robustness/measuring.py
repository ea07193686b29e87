"""How often threats succeed against one model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frostglass.core.display import table
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.types import Images, Target
from frostglass.core.views import ModelView
from frostglass.robustness.base import CHUNK, Threat, Victims
from frostglass.robustness.rates import Rate
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seed_for

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Table:
    """Named rates: the accuracy of a model, and the success of each threat against it."""

    rates: Mapping[str, Rate]

    def __getitem__(self, name: str) -> Rate:
        return self.rates[name]

    def __repr__(self) -> str:
        widest = max(map(len, self.rates))
        return "\n".join(f"{name:<{widest}}  {rate!r}" for name, rate in self.rates.items())

    def _repr_html_(self) -> str:
        return table(("threat", "rate"), ((name, repr(rate)) for name, rate in self.rates.items()))


def measure(target: Target, images: Images, methods: Sequence[Threat], *, seed: int = 0) -> Table:
    """Measure the accuracy of a model on images, and how often each method makes it err on them.

    An adversarial example is tried on images that the model classifies correctly; it succeeds if
    the model then says another class, or the targeted one. A trigger is tried on all images of
    other classes than the backdoor's, and succeeds if the model says that class: use a model that
    was trained on poisoned images (`poison`), and one that was not, as a control.
    """
    check(target, methods)
    named = labels_of(methods)
    rates = {ACCURACY: accuracy(target, images)}
    for name, method in named.items():
        rates[name] = success(target, images, method, seed=seed)
    return Table(rates)


def check(target: Target, methods: Sequence[Threat]) -> None:
    """Refuse a model of attributes, and methods that cannot be used on this model."""
    if target.attributes or len(target.classes) < 2:
        raise ConfigError(
            "expected a classifier of two or more people, got one of "
            f"{'attributes' if target.attributes else f'{len(target.classes)} classes'}: "
            "robustness is measured on classes"
        )
    problems = [
        f"{method.name}.{problem}"
        for method in methods
        for problem in method.problems(target.image_shape, len(target.classes))
    ]
    if problems:
        raise ConfigError(problems)


def labels_of(methods: Sequence[Threat]) -> dict[str, Threat]:
    """Name methods, with their parameters where names alone do not differ."""
    labels = [method.label for method in methods]
    names = [
        label if labels.count(label) == 1 else f"{label} ({_changes(method)})"
        for label, method in zip(labels, methods, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"threats: {twice[0]} is given twice: remove one")
    return dict(zip(names, methods, strict=True))


def _changes(method: Threat) -> str:
    """Return the parameters that differ from their defaults."""
    plain: dict[str, Any] = vars(type(method)())
    changed = {name: value for name, value in vars(method).items() if plain.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "defaults"


def accuracy(target: Target, images: Images) -> Rate:
    """Return the share of images that a model classifies correctly."""
    view = target.view("labels")
    with frozen(target.module):
        right = torch.cat([said == own for said, own, _ in _predictions(view, images)])
    return _rate(right, torch.ones_like(right), images, 0)


def success(target: Target, images: Images, method: Threat, *, seed: int) -> Rate:
    """Return the share of images on which a method succeeds."""
    view, seed = target.view({"labels", *method.access}), seed_for(seed, "threats")
    goals = method.goals(images.labels, view.classes, seed=seed)
    hits, tried = [], []
    with frozen(target.module):
        for said, labels, index in _predictions(view, images):
            aims = None if goals is None else goals[index].to(labels.device)
            tried.append(method.suits(said, labels, aims))
            victims = Victims(images.floats(index).to(labels.device), labels, aims, index)
            hits.append(_hits(view, victims.at(tried[-1].nonzero().flatten().cpu()), method, seed))
    if not len(torch.cat(hits)):
        raise RunError(
            f"{method.name}: no image can be tried: the model classifies none correctly, or all "
            "are of the class that is aimed at"
        )
    chosen = torch.cat(tried).cpu()
    return _rate(
        torch.zeros_like(chosen).masked_scatter(chosen, torch.cat(hits).cpu()),
        chosen,
        images,
        view.queries,
    )


def _hits(view: ModelView, victims: Victims, method: Threat, seed: int) -> Tensor:
    """Return on which images a method succeeds."""
    if not len(victims.labels):
        return victims.labels.bool()
    changed = method.perturb(view, victims, seed=seed)
    said = view.labels(_valid(changed, victims.images, method))
    return said != victims.labels if victims.goals is None else said == victims.goals


def _predictions(view: ModelView, images: Images) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the predicted and the right classes of images, and their places, batch by batch."""
    device = device_of(view.module)
    for index in torch.arange(len(images)).split(CHUNK):
        yield view.labels(images.floats(index).to(device)), images.labels[index].to(device), index


def _valid(changed: Tensor, images: Tensor, method: Threat) -> Tensor:
    """Return changed images; refuse those that no image file could hold."""
    if changed.shape != images.shape or not ((changed >= 0) & (changed <= 1)).all():
        raise RunError(
            f"{method.name}: expected images of shape {tuple(images.shape)} in [0, 1], got shape "
            f"{tuple(changed.shape)} from {changed.min().item():.3g} to {changed.max().item():.3g}"
        )
    return changed.detach()


def _rate(hits: Tensor, tried: Tensor, images: Images, queries: int) -> Rate:
    return Rate.of(hits.cpu(), tried.cpu(), images.labels, len(images.names), queries)
