"""Problems of an attack that show before a run: its access, and the networks it trains first."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from frostglass.attacks.base import Attack, invert
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.products import blank_view
from frostglass.core.assets import Assets, KnownAttribute
from frostglass.core.errors import ConfigError, FrostglassError
from frostglass.core.types import CAPABILITIES, Target
from frostglass.models.answers import answers_only
from frostglass.models.base import MODEL_ERRORS
from frostglass.plan.brief import SHOWN, head
from frostglass.plan.dry_run import DryRunWork
from frostglass.plan.ledger import META, Ledger
from frostglass.priors.base import PriorMethod
from frostglass.training.settings import Training


def access_problems(attack: Attack, method: PriorMethod | None, target: Training) -> list[str]:
    """Check that the target can be asked so, and that a tied prior asks no more than the attack."""
    if answers_only(target.weights) and "gradients" in attack.access:
        return [
            f"{attack.name} needs gradients, and {target.weights} can only be asked for scores or "
            "labels. Use mirror_genetic (scores) or brepmi (labels); or give the model as a "
            "checkpoint of target.model, or as a function."
        ]
    granted = max(CAPABILITIES.index(access) for access in attack.access)
    while method is not None:
        if method.access and CAPABILITIES.index(method.access) > granted:
            return [
                f"{attack.name} has access to {attack.access[0]} only, and the {method.name} prior "
                f"is fitted with {method.access}. Use a prior that is fitted with no more access."
            ]
        method = method.base_method
    return []


def known_attribute(exp: Experiment, build: Callable[[Training], Target]) -> KnownAttribute:
    """Return side knowledge of the right form; refuse an attribute that the data does not have."""
    name = exp.attack.known_attribute
    if not exp.data.describes_public():
        raise ConfigError(
            "public images have no attributes, and the attacker's classifier of "
            f"{name!r} learns from them. Add a line for each public image to data.attributes, or "
            "use another attack."
        )
    network = build(exp.attribute_training(name))
    return KnownAttribute(name, (True,) * exp.data.counts()[0], network)


def pretraining_problems(attack: Attack, target: Target, assets: Assets) -> list[str]:
    """Dry-run the training of an attack on a few images: its networks must fit the features."""
    assert attack.pretraining is not None
    target = replace(target, module=deepcopy(target.module).to(META))
    public = head(assets.require_public(), SHOWN)
    known = replace(assets, public=public, prior=None, amortizer=None)
    brief = attack.pretraining.brief()
    ledger = Ledger()
    try:
        with ledger:
            view = blank_view(target, brief)
            invert(brief, view, known, people=range(2), work=DryRunWork(ledger))
    except FrostglassError as error:
        return list(error.problems)
    except MODEL_ERRORS:  # cannot be dry-run; `check` says so
        pass
    return []
