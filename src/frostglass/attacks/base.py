"""The contract of an attack on either surface, and the function that runs one."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from frostglass.attacks._search.collected import CollectedImages
from frostglass.attacks._search.select import in_order
from frostglass.attacks._search.start import fresh
from frostglass.core.assets import Asset, Assets, KnownAttribute
from frostglass.core.errors import ConfigError, RunError
from frostglass.core.method import Method
from frostglass.core.prior import Prior
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Reconstructions, match_shape
from frostglass.core.views import FeatureView, ModelView, batch_invariant
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import Work

Surface = Literal["model", "features"]
View = ModelView | FeatureView
DRAWN_AT_ONCE = 64  # images of the prior-only baseline
KNOWN_DRAWS = 8  # draws for each one that is kept, where an attribute of the person is known


class Attack(Method):
    """Base of all attacks: parameters are fields, `run` reconstructs images of people.

    `surface` says what is attacked: a model, or features that leave a device. An attack sees a
    view and its assets, never private images. Results must not depend on anything but parameters,
    view, assets, people and seed; finished parts go to `work`, so that a stopped run resumes.
    """

    surface: ClassVar[Surface]
    embeds: ClassVar[bool] = False  # latents are face embeddings and are scored as such

    @property
    @abstractmethod
    def access(self) -> tuple[str, ...]:
        """Access to the view that the attack must be granted."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Number of reconstructions returned per attacked image (model surface: per person)."""

    @property
    def needs(self) -> frozenset[Asset]:
        """Assets the attack cannot run without."""
        return frozenset()

    @property
    def known_attribute(self) -> str:
        """The attribute that the attacker knows of each person; "" for none."""
        return ""

    @property
    def samples(self) -> int:
        """Passes averaged per query, for targets that add noise."""
        return 1

    @property
    def pretraining(self) -> "Attack | None":
        """The part that learns from unprotected features alone, shared by all protections."""
        return None

    @property
    def pretrained_checkpoints(self) -> tuple[str, ...]:
        """Names of the checkpoints that `pretraining` leaves in its work folder."""
        return ()

    @property
    def releases(self) -> int:
        """How often the device must release the attacked features."""
        return 1

    @property
    def protected_images(self) -> int:
        """How many public images the device is asked to protect."""
        return 0

    def problems(self, view: View, assets: Assets) -> list[str]:
        """List everything that keeps the attack from running; computes nothing."""
        return assets.missing(self.needs, self.name)

    def within(self, queries: int, people: int) -> "Attack":
        """Return a copy that shows at most so many images per person of `people` to the target."""
        raise ConfigError(
            f"query_budget: {self.name} cannot be limited: remove it, or use another attack"
        )

    @abstractmethod
    def run(
        self, view: View, assets: Assets, people: Tensor, *, seed: int, work: Work
    ) -> Reconstructions:
        """Attack `people` (I,), the labels of the attacked classes or owners of the features."""


attacks = Registry(
    "attack", "frostglass.attacks.model", "frostglass.attacks.features", contract=Attack
)


def invert(
    attack: Attack,
    view: View,
    assets: Assets,
    *,
    people: Sequence[int] | Tensor | None = None,
    seed: int = 0,
    work: Work | None = None,
) -> Reconstructions:
    """Run an attack; networks are left exactly as they were, also after an exception.

    `people` are the attacked classes (all by default). On the feature surface they say whose the
    released features are, person by person, equally many images each.
    """
    if people is None:
        people = range(view.classes if isinstance(view, ModelView) else len(view.released))
    labels = people if isinstance(people, Tensor) else torch.tensor(list(people))
    if problems := [*_problems(attack, view, labels), *attack.problems(view, assets)]:
        raise ConfigError(problems)
    with frozen(view.module, *assets.modules):
        result = attack.run(view, assets, labels, seed=seed, work=work or Work.scratch())
    if isinstance(result.images, Tensor) and not result.images.isfinite().all():
        raise RunError(f"{attack.name} returned images that are not finite: lower its lr")
    if result.partial is not None and result.partial.all():
        raise RunError(
            f"{attack.name}: no search finished for any of {len(labels)} people, because the loss "
            "was not finite. Lower attack.lr, choose another attack.loss, or check the target's "
            "own outputs."
        )
    return result


def _problems(attack: Attack, view: View, labels: Tensor) -> list[str]:
    surface = "model" if isinstance(view, ModelView) else "features"
    if attack.surface != surface:
        return [f"{attack.name} attacks {attack.surface}, got a view of {surface}: use another"]
    problems = []
    if not len(labels):
        problems.append("no person to attack: give at least one label")
    elif isinstance(view, ModelView) and not 0 <= int(labels.min()) <= int(labels.max()) < (
        view.classes
    ):
        span = f"{int(labels.min())}..{int(labels.max())}"
        problems.append(f"labels must lie in 0..{view.classes - 1}, got {span}")
    elif isinstance(view, FeatureView) and len(view.released) % len(labels):
        problems.append(
            f"expected equally many images per person, got {len(view.released)} released features "
            f"for {len(labels)} people"
        )
    missing = [access for access in attack.access if not view.grants(access)]
    if missing:
        granted = ", ".join(sorted(view.access)) or "nothing"
        problems.append(f"{attack.name} needs access to {', '.join(missing)}, got {granted}")
    return problems


def prior_only(
    prior: Prior | None,
    people: Sequence[int] | Tensor,
    candidates: int,
    *,
    public: Images | None = None,
    known: KnownAttribute | None = None,
    seed: int,
    work: Work | None = None,
) -> Reconstructions:
    """Return the prior-only baseline: random draws assigned to people without any view.

    A class-conditional generator gets random classes, because the right class is knowledge of the
    target. A generator that completes hints gets the right person's hint: what the hint alone
    reveals is not what the target leaks. For the same reason, where an attribute of each person is
    known, draws that show it come first among more of them. Without a prior, the draws are random
    public images.
    """
    labels = torch.as_tensor(people)
    each = candidates * (KNOWN_DRAWS if known else 1)
    if prior is None:
        draw = _public_draws(public, labels, each, seed=seed)
    else:
        draw = _prior_draws(prior, labels, each, public, seed=seed)
    collected, latents = CollectedImages(work or Work.scratch(), len(labels)), []
    for rows in torch.arange(len(labels)).split(max(1, DRAWN_AT_ONCE // each)):
        images, own = draw(rows)
        if known is not None:
            order = _fitting_first(images, labels[rows], known)[:, :candidates]
            images, own = in_order(order, images), in_order(order, own)
        collected.add(collected.smaller({"images": images}))
        latents.append(own)
    return Reconstructions(
        collected.all(),
        labels,
        torch.cat(latents),
        torch.zeros(len(labels), candidates),
        queries=0,
        seconds=0.0,
    )


# From rows of people to their images (n, K, C, H, W) and latents (n, K, ...).
Draw = Callable[[Tensor], tuple[Tensor, Tensor]]


def _prior_draws(
    prior: Prior, labels: Tensor, candidates: int, public: Images | None, *, seed: int
) -> Draw:
    latents = fresh(prior, labels, candidates, seed=seed, purpose="prior only")
    given = labels.repeat_interleave(candidates)
    if prior.condition == "label":
        rng = generator_for(seed, "prior only", "labels")
        given = torch.randint(prior.classes, given.shape, generator=rng)
    given = given.unflatten(0, latents.shape[:2]).to(device_of(prior.generator))

    def draw(rows: Tensor) -> tuple[Tensor, Tensor]:
        flat = (column[rows].flatten(0, 1).split(DRAWN_AT_ONCE) for column in (latents, given))
        with frozen(*prior.modules), torch.no_grad():
            images = torch.cat([prior.images(z, y).cpu() for z, y in zip(*flat, strict=True)])
        if public is not None:
            images = match_shape(images, public.shape)
        return images.unflatten(0, (len(rows), candidates)), latents[rows].cpu()

    return draw


def _fitting_first(images: Tensor, labels: Tensor, known: KnownAttribute) -> Tensor:
    """Return the order (n, K) of draws in which those that show what is known come first."""
    device = device_of(known.classifier.module)
    with frozen(known.classifier.module):
        logits = batch_invariant(known.logits, images.flatten(0, 1).to(device)).cpu()
    present = torch.tensor(known.present)[labels][:, None]
    wrong = (logits.unflatten(0, images.shape[:2]) > 0) != present
    return wrong.byte().argsort(dim=1, stable=True)


def _public_draws(public: Images | None, labels: Tensor, candidates: int, *, seed: int) -> Draw:
    images = Assets(public=public).require_public()
    chosen = torch.randint(
        len(images), (len(labels), candidates), generator=generator_for(seed, "blind")
    )

    def draw(rows: Tensor) -> tuple[Tensor, Tensor]:
        return images.floats(chosen[rows]), torch.zeros(len(rows), candidates, 0)

    return draw
