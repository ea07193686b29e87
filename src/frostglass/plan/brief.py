"""Brief copies of steps: blank images, and configs and inputs cut to a few iterations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from frostglass.attacks._search.runner import ModelAttack
from frostglass.attacks.base import Attack
from frostglass.auditing.products import FeatureExposure, ImageBatch, Released
from frostglass.core.assets import Assets
from frostglass.core.method import AuditSize, Budget, Method
from frostglass.core.types import Images, Reconstructions, Shape, Split
from frostglass.data._splits import MIN_IMAGES, held_out_share
from frostglass.data.base import Dataset
from frostglass.defenses.base import Defense, TrainingProgress
from frostglass.defenses.compose import at_full_strength
from frostglass.plan.ledger import META
from frostglass.training.images import TrainingImages
from frostglass.training.settings import PUBLIC, STRANGERS, Training, stage_split

BATCH = 64  # rows that a method without a field `batch` is assumed to process together
SHOWN = 256  # images of a dry run where the batch size asks for fewer
SCORED = 16  # people whose reconstructions are scored in a dry run
EACH = 10  # images of a public person who is trained on: the fewest that train 80 %


@dataclass(frozen=True)
class Call:
    """One call of a step: its config and inputs, and the work that they announce."""

    config: Any
    inputs: Mapping[str, Any]

    @cached_property
    def public(self) -> Images | None:
        assets = self.inputs.get("assets")
        return self.inputs.get("public") or (assets.public if assets else None)

    @cached_property
    def count(self) -> int:
        """Number of people, or of images that a device releases features of."""
        if (people := self.inputs.get("people")) is not None:
            return len(people)
        if reconstructions := self.inputs.get("reconstructions"):
            return len(reconstructions.labels)
        return len(batch.images) if (batch := self.inputs.get("images")) else 1

    @cached_property
    def size(self) -> AuditSize:
        """The size of the audit, as far as this step depends on it."""
        exposure, victims = self.inputs.get("exposure"), self.inputs.get("victims")
        if isinstance(exposure, FeatureExposure):
            victims = exposure.victims
        images = len(victims.images) if victims else 0
        target = exposure.target if exposure else self.inputs.get("target")
        view = self.inputs.get("view")
        classes = view.classes if view else len(target.classes) if target else 0
        public = 0 if self.public is None else len(self.public)
        return AuditSize(self.count, max(1, images // self.count), public, classes)

    @cached_property
    def trained(self) -> int:
        """Number of images in an epoch of a classifier's training."""
        split = stage_split(self.inputs["split"], self.inputs["data"], seed=0)
        labels = split.train.labels
        return len(TrainingImages.of(split, labels, self.inputs["defenses"], seed=0))

    def budget(self, times: int = 1, times_public: int = 1) -> Budget:
        """Return the announced work, for so many times the people and public images."""
        if isinstance(self.config, Training):
            return self.config.budget(times * self.trained)
        size = self.size
        size = replace(size, people=times * size.people, public=times_public * size.public)
        return self.config.budget(size) if isinstance(self.config, Method) else Budget()

    @cached_property
    def images(self) -> int:
        return self.budget().images

    @cached_property
    def fixed(self) -> int:
        """The part of `images` that does not grow with people and public images."""
        return max(0, 2 * self.images - self.budget(2, 2).images)

    @cached_property
    def uses_public(self) -> bool:
        return self.budget(1, 2).images > self.images

    def brief(self, times: int = 1) -> "Call":
        """Return a call with minimal iterations, people and images, at full batch size."""
        config, batch = self.config, getattr(self.config, "batch", BATCH)
        if isinstance(config, Training):
            return self._brief_training(config)
        if isinstance(config, Method):
            config = config.brief()
        images = max(SHOWN, 3 * batch, config.protected_images if isinstance(config, Attack) else 0)
        people = SCORED
        if isinstance(config, Attack):
            one = replace(self, config=config)
            rows = (one.budget(2).images - one.images) / self.count  # iterations × candidates
            people = max(math.ceil(3 * batch / max(1, rows)), _unpadded(config))
        limits = Limits(times * people, times * images, self.size.images_per_person)
        inputs = {name: limits.cut(value, name) for name, value in self.inputs.items()}
        return Call(config, inputs)

    def _brief_training(self, config: Training) -> "Call":
        """Shorten to two batches and the fewest epochs that reach full defense strength.

        Two steps are needed: optimisers allocate their state in the first.
        """
        defenses: Sequence[Defense] = [defense.brief() for defense in self.inputs["defenses"]]
        least = 1 if self.trained > config.batch else 2
        strong = (
            epochs
            for epochs in range(least, config.epochs)
            if at_full_strength(defenses, TrainingProgress(epochs - 1, epochs))
        )
        epochs = next(strong, config.epochs)
        share = min(1.0, config.batch * (2 if epochs == 1 else 1) / max(1, self.trained))
        split = self.inputs["split"]
        private = {"train": split.train, "validation": split.validation, "test": split.test}
        parts = {name: head(part, math.ceil(share * len(part))) for name, part in private.items()}
        data, part_of = self.inputs["data"], head
        if data in (PUBLIC, STRANGERS):  # public people are the classes
            part_of = few_of_each
        shown = BATCH if data == PUBLIC else SHOWN
        public = part_of(split.public, max(shown, math.ceil(share * len(split.public))))
        split = replace(split, **parts, public=public)
        inputs = {**self.inputs, "split": split, "defenses": tuple(defenses)}
        return Call(replace(config.brief(), epochs=epochs), inputs)

    def full_size(self, product: Any) -> Any:
        """Return the product of a brief call at the size that this call would give it."""
        if isinstance(product, Released):
            count = len(self.inputs["images"].images)
            return Released(torch.empty(count, *product.features.shape[1:], device=META))
        if not isinstance(product, Reconstructions):
            return product
        people, columns = self.inputs["people"], product.images.shape[1]
        if isinstance(self.config, Attack):
            columns = self.config.kept * self.size.images_per_person
        rows = (len(people), columns)
        return Reconstructions(
            # One image stands for all: the store maps them.
            torch.empty(1, 1, *product.images.shape[2:], device=META).expand(*rows, -1, -1, -1),
            torch.tensor(people),
            torch.empty(*rows, *product.latents.shape[2:], device=META),
            torch.empty(rows, device=META),
            queries=0,
            seconds=0.0,
        )


def _unpadded(attack: Attack) -> int:
    """Return the fewest people whose searches, run together, need no padding rows."""
    if not isinstance(attack, ModelAttack):
        return 1
    return math.ceil(attack.batch_multiple / attack.candidates)


@dataclass(frozen=True)
class Limits:
    """How many people, public images and images per person a brief call keeps."""

    people: int
    images: int
    per_person: int

    def cut(self, value: Any, name: str = "") -> Any:
        """Return an input with fewer people or images, on the meta device."""
        victims = self.people * self.per_person
        match value:
            case Images():
                return head(value, self.images)
            case ImageBatch():
                return _batch(value, victims if name == "victims" else self.images)
            case list():  # people
                return value[: self.people]
            case Assets():
                return replace(value, public=self.cut(value.public))
            case FeatureExposure():
                return replace(
                    value,
                    victims=_batch(value.victims, victims),
                    people=value.people[: self.people],
                    images=head(value.images, victims),
                    released=replace(value.released, features=value.released.features[:victims]),
                )
            case Reconstructions():
                names = ("images", "labels", "latents", "confidence")
                rows = {name: getattr(value, name)[: self.people] for name in names}
                return replace(value, **rows)
            case Split():
                private: dict[str, Any] = {
                    name: head(part, int((part.labels < self.people).sum()))
                    for name in ("train", "validation", "test", "evaluators")
                    if (part := getattr(value, name))
                }
                return replace(value, **private, public=self.cut(value.public))
        return value


def head(images: Images, count: int) -> Images:
    """Return the first images of a set, on the meta device."""
    attributes = None if images.attributes is None else images.attributes[:count]
    return replace(
        images,
        pixels=images.pixels[:count].to(META),
        labels=images.labels[:count],
        sources=images.sources[:count],
        attributes=attributes,
    )


def few_of_each(images: Images, count: int) -> Images:
    """Return so many images of as many people as have ten, on the meta device.

    The next ten of everyone follow if that is not enough. People whom no training takes, who have
    too few images, are left out.
    """
    whose, order = images.labels.sort(stable=True)
    sizes = whose.bincount()
    rank = torch.arange(len(whose)) - (sizes.cumsum(0) - sizes)[whose]
    enough = sizes[whose] >= MIN_IMAGES
    rows = order[enough][(rank[enough] // EACH).argsort(stable=True)]
    return head(images.at(rows[:count]), count)


def _batch(batch: ImageBatch, count: int) -> ImageBatch:
    return ImageBatch.of(batch.images[:count].to(META), batch.key)


def blank_split(dataset: Dataset, fractions: Any) -> Split:
    """Return a split of meta tensors, in the numbers and shapes that the dataset announces.

    Everyone has equally many images, and every other image of a person has all attributes.
    """
    classes, private, public = dataset.counts()
    names, shape = dataset.attribute_names(), dataset.image_shape
    each = private / classes
    test, validation = (
        max(1, round(each * share))
        for share in (held_out_share(dataset, fractions.test), fractions.validation)
    )
    others = max(1, round(each * fractions.evaluators)) if fractions.evaluators else 0
    train = max(2, private - classes * (test + validation + others))
    strangers = dataset.public_people()
    withheld = strangers[len(strangers) - fractions.secret :] if fractions.secret else []
    strangers = strangers[: len(strangers) - len(withheld)]
    public -= sum(withheld)
    secret = [*dataset.secret_people(), *withheld]
    whose = torch.arange(len(strangers)).repeat_interleave(torch.tensor(strangers).long())
    if len(whose) != public:
        whose = torch.full((public,), -1)
    people = tuple(f"private {number}" for number in range(classes))
    return Split(
        train=_blank(_labels(train, classes), people, shape, "train", names),
        validation=_blank(
            _labels(classes * validation, classes), people, shape, "validation", names
        ),
        test=_blank(_labels(classes * test, classes), people, shape, "test", names),
        public=_blank(
            whose,
            tuple(f"public {number}" for number in range(len(strangers))),
            shape,
            "public",
            names if dataset.describes_public() else (),
        ),
        evaluators=_blank(_labels(classes * others, classes), people, shape, "evaluators", names)
        if others
        else None,
        secret=_blank(
            torch.arange(len(secret)).repeat_interleave(torch.tensor(secret)),
            tuple(f"secret {number}" for number in range(len(secret))),
            shape,
            "secret",
            (),
        )
        if secret
        else None,
    )


def _labels(count: int, people: int) -> Tensor:
    return torch.arange(count) * people // max(1, count)


def _blank(
    labels: Tensor, names: tuple[str, ...], shape: Shape, key: str, attributes: tuple[str, ...]
) -> Images:
    count = len(labels)
    # Alternate within a person and between people: one image of each must not be all alike.
    place = torch.arange(count) - torch.searchsorted(labels, labels)
    marks = ((place + labels)[:, None] % 2 == 0).repeat(1, len(attributes))
    # One image stands for all: pixels of a split are mapped, and take memory where they are read.
    one = torch.empty(1, *shape, dtype=torch.uint8, device=META)
    return Images(
        one.expand(count, -1, -1, -1),
        labels,
        names,
        ("",) * count,
        attributes=marks if attributes else None,
        attribute_names=attributes,
    )
