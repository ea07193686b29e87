"""Attacks on models and on features, and the functions that run them."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.attacks._search.descent import Descent
    from frostglass.attacks._search.runner import ModelAttack, Recipe
    from frostglass.attacks.base import Attack, attacks, invert, prior_only
    from frostglass.attacks.features.base import FeatureAttack
    from frostglass.attacks.features.decoder import Decoder
    from frostglass.attacks.features.hybrid import Hybrid
    from frostglass.attacks.features.latent import Latent
    from frostglass.attacks.features.mapper import Mapper
    from frostglass.attacks.model.brepmi import Brepmi
    from frostglass.attacks.model.gmi import Gmi
    from frostglass.attacks.model.ifgmi import Ifgmi
    from frostglass.attacks.model.kedmi import Kedmi
    from frostglass.attacks.model.known import Known
    from frostglass.attacks.model.lokt import Lokt
    from frostglass.attacks.model.lomma import Lomma
    from frostglass.attacks.model.members import Members
    from frostglass.attacks.model.mirror import Mirror
    from frostglass.attacks.model.mirror_genetic import MirrorGenetic
    from frostglass.attacks.model.modes import Modes
    from frostglass.attacks.model.plgmi import Plgmi
    from frostglass.attacks.model.ppa import Ppa
    from frostglass.attacks.model.ppdgmi import Ppdgmi
    from frostglass.attacks.model.repel import Repel
    from frostglass.attacks.model.smile import Smile
    from frostglass.attacks.model.unlearn import Unlearn
    from frostglass.attacks.model.vmi import Vmi

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
