"""Networks trained on a few people of the embedded faces, for slow tests."""

from frostglass.core.types import Split, Target
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.defenses.base import Defense
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork


def few_people(identities: int, public_identities: int) -> Split:
    faces = Faces(
        identities=identities, images=40, public_identities=public_identities, public_images=4
    )
    return make_split(faces, test_fraction=0.2, validation_fraction=0.1, seed=0)


def trained(config: Training, split: Split, *defenses: Defense) -> Target:
    return train_target(config, split, defenses, seed=0, work=NoWork())
