"""Knowledge extraction: what a network learns about private people from reconstructions alone."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Split, match_shape
from frostglass.metrics.base import Evidence, Metric, metrics, outputs
from frostglass.runtime.device import device_of
from frostglass.training.loop import train_target
from frostglass.training.settings import Training


@metrics.register
@parameters
class Knowledge(Metric):
    """How well does a network recognise the private people that only saw their reconstructions?

    A surrogate classifier is trained on the reconstructions, labelled with the attacked people, and
    tested on these people's private training images. Column `knowledge`, one value per person: the
    share of the person's images that the surrogate names correctly. Chance is 1 / people. A set of
    adversarial examples teaches nothing about real faces, so that this measure is not fooled by
    images that fool evaluators. It needs several reconstructions of each person to say much.

    Use: to compare with papers that report knowledge extraction; trains a network on the
        reconstructions.
    Paper: Struppek et al., Be Careful What You Smooth For, ICLR 2024, arXiv 2310.06549 (knowledge
    extraction score); reported by Yu et al., CALoR, arXiv 2410.05814, Table 15.

    Differs: The surrogate, its training and the number of reconstructions are ours, and were not
    checked against the paper's: do not compare values with Table 15. The classes are the attacked
    people.

    Args:
        model: architecture of the surrogate.
        epochs: of its training, without any selection: the last epoch counts.
        batch, lr: of its training.
        flip: mirror half of the training images.
    """

    title: ClassVar[str] = "Knowledge extraction score"

    model: str = "cnn"
    epochs: Annotated[int, Field(ge=1)] = 30
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    flip: bool = True

    def columns(self, evidence: Evidence) -> dict[str, Tensor]:
        people = evidence.reconstructions.labels
        if len(people) < 2:
            raise DataError(
                f"knowledge needs at least 2 attacked people, to tell them apart, got "
                f"{len(people)}: attack more"
            )
        private = evidence.private.of_people(people)
        learned = self._labelled(evidence, private)
        split = Split(learned, learned, private, evidence.split.public)
        epochs = 1 if learned.pixels.is_meta else self.epochs  # a dry run saves no checkpoints
        config = Training(
            model=self.model, epochs=epochs, batch=self.batch, lr=self.lr, flip=self.flip,
            keep="last",
        )  # fmt: skip
        device = device_of(evidence.target.module)
        surrogate = train_target(config, split, seed=0, device=device, devices=1)
        right = (outputs(surrogate, private)[0].argmax(1) == private.labels).double()
        shares = [right[private.labels == place].mean() for place in range(len(people))]
        return {"knowledge": evidence.per_person(torch.stack(shares))}

    def _labelled(self, evidence: Evidence, private: Images) -> Images:
        """Return the reconstructions as images of the attacked people."""
        images = match_shape(evidence.images[:], private.shape).clamp(0, 1)
        rows, candidates = evidence.reconstructions.images.shape[:2]
        return Images(
            pixels=images.mul(255).round().byte(),
            labels=torch.arange(rows).repeat_interleave(candidates),
            names=private.names,
            sources=("reconstruction",) * len(images),
        )
