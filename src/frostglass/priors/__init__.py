"""Priors: generators of images that an attacker learned from public data."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.core.prior import Prior
    from frostglass.priors._files import load_prior, read_prior, save_prior
    from frostglass.priors.base import PriorMethod, check_unseen, priors
    from frostglass.priors.conditional import Conditional
    from frostglass.priors.context import Context, hints_of
    from frostglass.priors.experts import Experts
    from frostglass.priors.generator import Generator, prior_from
    from frostglass.priors.kplus1 import Kplus1
    from frostglass.priors.pretrained import Pretrained
    from frostglass.priors.students import Students
    from frostglass.priors.stylegan2 import Stylegan2
    from frostglass.priors.surrogates import Surrogates
    from frostglass.priors.tacgan import Tacgan
    from frostglass.priors.wgan import Wgan

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
