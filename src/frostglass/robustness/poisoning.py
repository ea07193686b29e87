"""Poisoned training images: some with a trigger and the label of the backdoor's class."""

from dataclasses import replace

import torch

from frostglass.core.errors import ConfigError
from frostglass.core.types import Images, Split
from frostglass.robustness.base import Backdoor
from frostglass.runtime.seeding import generator_for
from frostglass.store.keys import digest, plain

VERSION = 1  # raise it when the images of a poisoned split change


def poison(split: Split, backdoor: Backdoor, *, seed: int) -> Split:
    """Return the split with poisoned training images; all other parts stay clean.

    Its key follows from the key of the split and from the backdoor, so that it need not be stored.
    """
    index = poisoned_rows(split.train, backdoor, seed=seed)
    pixels, labels = split.train.pixels[:].clone(), split.train.labels.clone()
    stamped = backdoor.stamp(split.train.floats(index), seed=seed)
    pixels[index] = stamped.mul(255).round().byte().to(pixels.device)
    labels[index] = backdoor.target_class
    key = split.key and digest(
        {
            "poisoned": split.key,
            "backdoor": plain(backdoor, "backdoor", products=False),
            "seed": seed,
            "version": VERSION,
        }
    )
    facts = {"backdoor": backdoor.name, "images": len(index)}
    train = replace(split.train, pixels=pixels, labels=labels, key=key and f"{key}.train")
    return replace(split, train=train, key=key, manifest={**split.manifest, "poisoned": facts})


def poisoned_rows(images: Images, backdoor: Backdoor, *, seed: int) -> torch.Tensor:
    """Draw which images to poison: a share of all, among those of other classes."""
    others = (images.labels != backdoor.target_class).nonzero().flatten()
    if problem := impossible_rate(backdoor, len(images), len(others)):
        raise ConfigError(problem)
    order = torch.randperm(len(others), generator=generator_for(seed, "poison"))
    return others[order[: round(backdoor.rate * len(images))]].sort().values


def impossible_rate(backdoor: Backdoor, images: int, others: int) -> str:
    """Say why a share of so many images cannot be poisoned; "" if it can."""
    count = round(backdoor.rate * images)
    if 0 < count <= others:
        return ""
    fix = "lower it" if count else "raise it"
    return (
        f"rate: expected to poison 1 to {others} of {images} training images, those of other "
        f"classes than {backdoor.target_class}; {backdoor.rate:g} is {count}: {fix}"
    )
