"""A later cut: the device computes more of the network before features leave it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from frostglass.core.parameters import parameters
from frostglass.defenses.base import Defense, Part, defenses
from frostglass.models.cut import HEAD


@defenses.register
@parameters
class LaterCut(Defense):
    """Features leave behind a later layer than `target.cut`; at the head only predictions leave.

    Network, training and answers stay as they are: the device computes the layers between the two
    cuts as well. The audit's positive control is the network at `target.cut`, so that a run shows
    what moving the cut gains. `rounding` can follow.

    Use: the device can compute more. In our trials, at the same MCC, the strongest attack
        recognised 99 % behind a first stage, 69 % behind the pool, 7 % from predictions' signs.
    Cost: the device computes up to the later layer: the report has its share of the network's
        multiply-adds.
    Paper: none; ours. AdvLearn (AAAI 2020) compares layers in its Table 3.
    Differs: it is in none of the papers. Features of later layers say less of an image and more of
        the answers: search latents too (`latent`), because decoders miss what is left.

    Args:
        layer: the layer whose output leaves the device; "head" is the last one of every network.
            Empty disables the defense.
    """

    layer: str = HEAD

    title = "Later cut"
    disabled: ClassVar[Mapping[str, Any]] = {"layer": ""}
    takes_attributes: ClassVar[bool] = True
    needs_cut: ClassVar[bool] = True
    moves_cut: ClassVar[bool] = True

    def replaces(self) -> frozenset[Part]:
        return frozenset({"cut"}) if self.layer else frozenset()

    def cut(self, layer: str | None) -> str | None:
        return self.layer or layer
