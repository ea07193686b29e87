"""How much memory a config about split models would need: its steps are rehearsed on tensors without content, as those of all others are."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from frostglass.attacks.features import base as attacks
from frostglass.attacks.features._learned import FITS
from frostglass.attacks.features.base import FeatureAttack
from frostglass.audit.feature_pipeline import (
    Lesson,
    Line,
    Pictures,
    Released,
    amortize,
    ask_device,
    blind_draws,
    release,
)
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.core.views import CHUNK, FeatureView
from frostglass.defenses.base import Defense
from frostglass.deploy.client import TrainedAmortizer
from frostglass.models.cut import halves
from frostglass.networks.amortizer import Amortizer
from frostglass.networks.embedding import embed, public_centre
from frostglass.plan.memory import META, SHOWN, DryRunWork, Rehearsal, brief_copy, first
from frostglass.runtime.freezing import frozen


class FeatureRehearsal(Rehearsal):
    """Rehearses the steps of an audit of features too."""

    def _amortizer(self, config: Amortizer, target: Target, prior: Prior) -> TrainedAmortizer:
        return amortize(brief_copy(config), target, prior, seed=0, work=DryRunWork(self._ledger))

    def _release(
        self,
        protection: Defense | None,
        target: Target,
        pictures: Pictures,
        prior: Prior | None,
        amortizer_: TrainedAmortizer | None,
        _: int,
    ) -> Released:
        """Two batches at most, and features for all pictures."""
        few = replace(pictures, images=pictures.images[: 2 * getattr(protection, "batch", SHOWN)])
        short = None if protection is None else brief_copy(protection)
        made = release(
            short, target, few, prior, amortizer_, 0, seed=0, work=DryRunWork(self._ledger)
        ).features
        features = torch.empty(len(pictures.images), *made.shape[1:], device=META)
        self._ledger.charge(features.nbytes)  # the parts, and the whole they are joined to
        return Released(features)

    def _lesson(
        self,
        attack: FeatureAttack,
        target: Target,
        public: Images,
        embedder: Target | None,
        perceptual: Target | None,
    ) -> Lesson:
        both = halves(target)
        view = FeatureView(both, torch.zeros(2, *both.feature_shape, device=META), attack.granted)
        self._rebuilt(attack, view, Assets(public, embedder=embedder, perceptual=perceptual))
        return Lesson({})

    def _intercept(
        self, attack: FeatureAttack, line: Line, public: Images, prior: Prior | None, amortizer_: TrainedAmortizer | None, embedder: Target | None,
        perceptual: Target | None, people: list[int], lesson: Lesson | None = None,
    ) -> Reconstructions:  # fmt: skip
        doing = self.doing
        ask_device(attack, line, public)  # first: what a device does is a step of its own
        self.doing = doing
        self._ledger.restart()
        view = FeatureView(
            halves(line.device.target), line.device.release(line.victims).features, attack.granted,
            protect=lambda images, number: line.device.release(Pictures.of(images, "public"), number).features,
            again=lambda number: line.device.release(line.victims, number).features,
        )  # fmt: skip
        images = self._rebuilt(
            attack,
            view,
            Assets(public, prior, amortizer_.network if amortizer_ else None, embedder, perceptual),
        )
        self.doing = doing
        return _reconstructions(
            people, len(line.victims.images) // len(people) * attack.tries, (*images.shape[2:],)
        )

    def _rebuilt(self, attack: FeatureAttack, view: FeatureView, assets: Assets) -> torch.Tensor:
        """What a short attack rebuilds, with few public pictures; the features of the others are there all the same if they are kept."""
        public, short = assets.require_public(), brief_copy(attack)
        few = first(public, max(2 * CHUNK, 3 * short.batch, short.protects))
        bytes_each = (
            4 * math.prod(view.feature_shape) * (2 if getattr(attack.lesson, "flips", False) else 1)
        )
        kept = (
            bytes_each * (len(public) - len(few))
            if attack.lesson and bytes_each * len(public) <= FITS
            else 0
        )
        others = torch.empty(kept, dtype=torch.uint8, device=META)
        networks = [target.module for target in (assets.embedder, assets.perceptual) if target]
        networks += assets.prior.modules if assets.prior else []
        networks += [] if assets.amortizer is None else [assets.amortizer]
        with frozen(view.module, *networks):
            ledger = attacks.Ledger(DryRunWork(self._ledger), view)
            images = short.rebuild(
                view, view.released, replace(assets, public=few), seed=0, ledger=ledger
            ).images
        del others
        return images

    def _blind(
        self, candidates: int, prior: Prior | None, public: Images, people: list[int]
    ) -> Reconstructions:
        return blind_draws(candidates, prior, public, people, seed=0, work=DryRunWork(self._ledger))

    def _feature_scores(
        self, embeds: bool, found: Reconstructions, victims: Pictures, split: Split, evaluators: Sequence[Target], embedder: Target, target: Target
    ) -> Any:  # fmt: skip
        """The passes of the judges, which take the most; the measures are of few numbers."""
        pictures = found.images.flatten(0, 1)
        embed(embedder, pictures, public_centre(embedder, first(split.public, SHOWN)))
        for judge in evaluators:
            with frozen(judge.module), torch.no_grad():
                judge.outputs(pictures[:SHOWN])
        return Released(torch.empty(0, device=META))


def _reconstructions(people: list[int], candidates: int, shape: tuple[int, ...]) -> Reconstructions:
    rows = (len(people), candidates)
    return Reconstructions(
        torch.empty(*rows, *shape, device=META),
        torch.tensor(people),
        torch.zeros(*rows, 0),
        torch.zeros(rows),
        queries=0,
        seconds=0.0,
    )
