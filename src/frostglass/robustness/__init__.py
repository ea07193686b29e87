"""Robustness beyond inversion: adversarial examples and backdoors, per defense."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.robustness.base import Backdoor, Evasion, Threat, Victims, threats
    from frostglass.robustness.measuring import Table, measure
    from frostglass.robustness.methods.badnets import Badnets
    from frostglass.robustness.methods.bim import Bim
    from frostglass.robustness.methods.blended import Blended
    from frostglass.robustness.methods.fgsm import Fgsm
    from frostglass.robustness.methods.one_pixel import OnePixel
    from frostglass.robustness.methods.pgd import Pgd
    from frostglass.robustness.output import write_measured
    from frostglass.robustness.poisoning import poison
    from frostglass.robustness.rates import Rate
    from frostglass.robustness.run import Measured, ModelTable, measure_all, measure_experiment

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
