"""Defenses against model inversion: in training, and of features that leave a device."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.defenses.base import Defense, defenses
    from frostglass.defenses.release.crafter import Crafter
    from frostglass.defenses.release.crafter_z import CrafterZ
    from frostglass.defenses.release.later_cut import LaterCut
    from frostglass.defenses.release.rounding import Rounding
    from frostglass.defenses.training.adv_learn import AdvLearn
    from frostglass.defenses.training.bido import Bido
    from frostglass.defenses.training.calor import Calor
    from frostglass.defenses.training.decoys import Decoys
    from frostglass.defenses.training.disco import Disco
    from frostglass.defenses.training.dpsgd import Dpsgd
    from frostglass.defenses.training.label_smoothing import LabelSmoothing
    from frostglass.defenses.training.mid import Mid
    from frostglass.defenses.training.midre import Midre
    from frostglass.defenses.training.rolss import Rolss
    from frostglass.defenses.training.ssd import Ssd
    from frostglass.defenses.training.tiprdc import Tiprdc
    from frostglass.defenses.training.transfer import Transfer
    from frostglass.defenses.training.trap_mid import TrapMid

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
