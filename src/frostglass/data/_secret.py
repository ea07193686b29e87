"""People whom only the owner of a model has: neither private nor public."""

import torch

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.pixels import joined
from frostglass.core.types import Images
from frostglass.runtime.seeding import generator_for


def withhold(
    public: Images, own: Images | None, people: int, *, seed: int
) -> tuple[Images, Images | None]:
    """Return the public images without `people` people, and all secret images, if there are any.

    Secret are the people withheld here, and those of `own`, the dataset's secret table.
    """
    if not people:
        return public, own
    check_withheld(people, len(public.names))
    order = torch.randperm(len(public.names), generator=generator_for(seed, "secret people"))
    withheld = public.of_people(order[:people].sort().values)
    left = public.of_people(order[people:].sort().values)
    if own is None:
        return left, withheld
    labels = torch.cat([own.labels, withheld.labels + len(own.names)])
    return left, Images(
        pixels=joined([own.pixels, withheld.pixels]),
        labels=labels,
        names=own.names + withheld.names,
        sources=own.sources + withheld.sources,
    )


def check_withheld(people: int, named: int) -> None:
    """Raise unless named public people are left after some are withheld."""
    if named == 0:
        raise DataError(
            f"split.secret: {people} public people should become secret, and the public images "
            "have no names. Provide public images in one folder per person, or set data.secret."
        )
    if people > named - 2:
        raise ConfigError(
            f"split.secret: expected at most {max(0, named - 2)}, so that 2 of the {named} public "
            f"people are left, got {people}: lower it, or add public people"
        )
