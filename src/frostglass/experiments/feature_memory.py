"""How much memory a config about split models would need: its steps are rehearsed on tensors without content, as those of all others are."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from frostglass.attacks.features import base as attacks
from frostglass.attacks.features.base import FeatureAttack
from frostglass.attacks.features.learned import FITS
from frostglass.attacks.features.view import CHUNK, FeatureView
from frostglass.defenses.base import Defense
from frostglass.experiments.client import Guesser
from frostglass.experiments.feature_pipeline import Lesson, Line, Pictures, Released, amortize, ask_device, blind_draws, release
from frostglass.experiments.memory import META, SHOWN, Notes, Rehearsal, first, shortened
from frostglass.models.cut import halves
from frostglass.priors.amortizer import Amortizer
from frostglass.priors.base import Prior
from frostglass.priors.embedding import embed, public_centre
from frostglass.priors.knowledge import Knowledge
from frostglass.runtime import frozen
from frostglass.types import Images, Reconstructions, Split, Target


class FeatureRehearsal(Rehearsal):
    """Rehearses the steps of an audit of features too."""

    def _amortizer(self, config: Amortizer, target: Target, prior: Prior) -> Guesser:
        return amortize(shortened(config), target, prior, seed=0, work=Notes(self._ledger))

    def _release(
        self, protection: Defense | None, target: Target, pictures: Pictures, prior: Prior | None, guesser: Guesser | None, _: int
    ) -> Released:
        """Two batches at most, and features for all pictures."""
        few = replace(pictures, images=pictures.images[: 2 * getattr(protection, "batch", SHOWN)])
        short = None if protection is None else shortened(protection)
        made = release(short, target, few, prior, guesser, 0, seed=0, work=Notes(self._ledger)).features
        features = torch.empty(len(pictures.images), *made.shape[1:], device=META)
        self._ledger.charge(features.nbytes)  # the parts, and the whole they are joined to
        return Released(features)

    def _lesson(self, attack: FeatureAttack, target: Target, public: Images, embedder: Target | None, perceptual: Target | None) -> Lesson:
        both = halves(target)
        view = FeatureView(both, torch.zeros(2, *both.feature_shape, device=META), attack.granted)
        self._rebuilt(attack, view, Knowledge(public, embedder=embedder, perceptual=perceptual))
        return Lesson({})

    def _intercept(
        self, attack: FeatureAttack, line: Line, public: Images, prior: Prior | None, guesser: Guesser | None, embedder: Target | None,
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
        images = self._rebuilt(attack, view, Knowledge(public, prior, guesser.network if guesser else None, embedder, perceptual))
        self.doing = doing
        return _reconstructions(people, len(line.victims.images) // len(people) * attack.tries, (*images.shape[2:],))

    def _rebuilt(self, attack: FeatureAttack, view: FeatureView, knowledge: Knowledge) -> torch.Tensor:
        """What a short attack rebuilds, with few public pictures; the features of the others are there all the same if they are kept."""
        public, short = knowledge.the_public(), shortened(attack)
        few = first(public, max(2 * CHUNK, 3 * short.batch, short.protects))
        bytes_each = 4 * math.prod(view.feature_shape) * (2 if getattr(attack.lesson, "flips", False) else 1)
        kept = bytes_each * (len(public) - len(few)) if attack.lesson and bytes_each * len(public) <= FITS else 0
        others = torch.empty(kept, dtype=torch.uint8, device=META)
        networks = [target.module for target in (knowledge.embedder, knowledge.perceptual) if target]
        networks += knowledge.prior.modules if knowledge.prior else []
        networks += [] if knowledge.amortizer is None else [knowledge.amortizer]
        with frozen(view.module, *networks):
            ledger = attacks.Ledger(Notes(self._ledger), view)
            images = short.rebuild(view, view.released, replace(knowledge, public=few), seed=0, ledger=ledger).images
        del others
        return images

    def _blind(self, candidates: int, prior: Prior | None, public: Images, people: list[int]) -> Reconstructions:
        return blind_draws(candidates, prior, public, people, seed=0, work=Notes(self._ledger))

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
        torch.empty(*rows, *shape, device=META), torch.tensor(people), torch.zeros(*rows, 0), torch.zeros(rows), queries=0, seconds=0.0
    )
