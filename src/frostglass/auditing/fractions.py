"""How the images of private people are shared between training, selection and scoring."""

from typing import Annotated

from pydantic import AfterValidator, Field

from frostglass.core.parameters import parameters
from frostglass.data._splits import PUBLISHED


def _test_share(value: float | str) -> float | str:
    if value == PUBLISHED or (isinstance(value, float) and 0 < value < 1):
        return value
    raise ValueError(f'expected more than 0 and less than 1, or "{PUBLISHED}", got {value!r}')


@parameters
class Fractions:
    """Shares of each private person's images that are held out, and secret people.

    Args:
        test: held out for scoring; "published" for the test images that a dataset comes with.
        validation: held out for selecting epochs.
        evaluators: for evaluators alone to train on, besides the target's images.
        secret: how many public people to withhold from the attacker, for the defense `decoys`.
    """

    test: Annotated[float | str, AfterValidator(_test_share)] = 0.2
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    evaluators: Annotated[float, Field(ge=0, lt=1)] = 0.0
    secret: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        test = 0.0 if isinstance(self.test, str) else self.test
        if test + self.validation + self.evaluators >= 1:
            raise ValueError(
                f"test ({self.test}), validation ({self.validation}) and evaluators "
                f"({self.evaluators}) must sum to less than 1: nothing is left to train on"
            )
