"""Whom an audit attacks, and with which images."""

import torch

from frostglass.auditing.experiment import Experiment
from frostglass.core.errors import ConfigError
from frostglass.core.types import Images, Split
from frostglass.metrics._utility import varied
from frostglass.training.settings import attributes_in, classes_of


def attacked_people(exp: Experiment, classes: int) -> range:
    return range(min(exp.judging.identities or classes, classes))


def victims_of(exp: Experiment, split: Split) -> Images:
    """Return the first held-out images of each attacked person.

    Refuses images that all have the same attributes: utility could not be measured.
    """
    wanted = exp.judging.images
    people = attacked_people(exp, len(split.classes))
    rows = [(split.test.labels == label).nonzero().flatten()[:wanted] for label in people]
    for label, index in zip(people, rows, strict=True):
        if len(index) < wanted:
            raise ConfigError(
                f"judging.images: expected {wanted} held-out images of each person, got "
                f"{len(index)} of {split.classes[label]!r}: lower it, or raise split.test"
            )
    victims = split.test.at(torch.cat(rows))
    varied(attributes_in(victims, classes_of(exp.target, split)))
    return victims
