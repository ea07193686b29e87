"""Networks that are read from files: which they are, and whether two of them are the same one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from frostglass.core.errors import ConfigError
from frostglass.core.types import GIVEN_IMAGES, Images, Target
from frostglass.evaluators.embedder import Embedder
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.training.settings import Training

COMPARED = 32  # private images whose outputs are compared
BELOW_CONTROL = 0.1  # accuracy by which a given model may be below the undefended control
SAME = 1e-4  # relative difference of outputs, below which two networks are one


def is_given(config: Training | Embedder) -> bool:
    """Return whether a network is read from a file, not trained here."""
    if isinstance(config, Embedder):
        return not config.trained or config.training.weights is not None
    return config.weights is not None


@contextmanager
def naming(section: str) -> Iterator[None]:
    """Put the config's section before the problems that a block finds."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{section}: {problem}" for problem in error.problems]) from error


def refuse_target(evaluator: Target, target: Target, images: Images) -> None:
    """Refuse an evaluator that is the target, by its weights or by what it returns.

    It would accept whatever fools the target. An embedder need not have the target's head.
    """
    if "meta" in (device_of(evaluator.module).type, device_of(target.module).type):
        return  # a dry run has no content to compare
    how = ""
    if _weights(target) <= _weights(evaluator):
        how = "has the target's weights"
    elif _same_outputs(evaluator, target, images):
        how = "returns the target's outputs for the private images"
    if how:
        raise ConfigError(
            f"{how}, and would accept whatever fools the target: give a network that was trained "
            "separately"
        )


def given_warnings(target: Target, control: Target | None) -> list[str]:
    """Return what the examination of a given model found, and how it compares to the control."""
    if not target.info.get("given"):
        return []
    warnings = [f"given model: {each}" for each in target.info["examination"]["warnings"]]
    warnings.append(
        f"given model: its accuracy is measured on {GIVEN_IMAGES}; if it was trained on them, it "
        "is less accurate on others"
    )
    if control is None:
        return warnings
    own, plain = (each.info["accuracy"]["test"] for each in (target, control))
    if own < plain - BELOW_CONTROL:
        warnings.append(
            f"given model: it classifies {own:.0%} of the images correctly, and the undefended "
            f"control {plain:.0%}: check that its inputs (mean, std), the size and crop of the "
            "images and its classes are those of its training"
        )
    return warnings


def _weights(target: Target) -> set[str]:
    """Return hashes of a network's weights, without those of its head if it has others."""
    own = {
        name: hashlib.sha256(f"{tuple(weight.shape)}".encode())
        for name, weight in target.module.named_parameters()
    }
    for name, weight in target.module.named_parameters():
        own[name].update(weight.detach().cpu().float().contiguous().numpy().tobytes())
    body = {
        name: total for name, total in own.items() if not f"{name}.".startswith(f"{target.head}.")
    }
    return {total.hexdigest() for total in (body or own).values()}


def _same_outputs(one: Target, other: Target, images: Images) -> bool:
    """Return whether logits, or penultimate features, are equal on some private images."""
    shown = images.floats(torch.linspace(0, len(images) - 1, min(COMPARED, len(images))).long())
    both = []
    for target in (one, other):
        with frozen(target.module), torch.no_grad():
            both.append(target.outputs(shown.to(device_of(target.module))))
    return any(
        a.shape == b.shape and bool((a.cpu() - b.cpu()).abs().max() <= SAME * b.abs().max().cpu())
        for a, b in zip(*both, strict=True)
    )
