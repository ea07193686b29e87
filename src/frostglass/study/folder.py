"""The folder of a study: its items, its images, and who is to see what, verified by hash."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from torch import Tensor

from frostglass.core.errors import DataError, StoreError
from frostglass.core.parameters import problems
from frostglass.store.files import (
    full_disk_reported,
    ignore_in_git,
    make_private,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from frostglass.store.manifest import broken_seal, seal

FORMAT: Literal[1] = 1
DESIGN, IMAGES, ANSWERS, LINKS = "study.json", "images.safetensors", "answers.sqlite", "links.csv"
SEALED = (DESIGN, IMAGES)

Protocol = Literal["pairwise", "identification"]
PROTOCOLS: tuple[Protocol, ...] = ("pairwise", "identification")
OPTIONS: dict[Protocol, int] = {"pairwise": 2, "identification": 4}
MODELS: dict[Protocol, int] = {"pairwise": 2, "identification": 1}  # of an item
RECOGNITION = ("verified_", "top1_")  # metrics that claim to say whether people are recognised
Index = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """A record of the file: exact types, and no other fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ShownModel(Strict):
    """A model whose reconstructions are shown, by the attack that was strongest on it."""

    label: str
    attack: str
    vacuous: str


class Reconstruction(Strict):
    """What an attack on a model made of a person, and every metric of the run about it."""

    model: Index
    person: Index
    image: Index
    metrics: dict[str, FiniteFloat]


class Item(Strict):
    """One question: an image and its options, in a random order of the item's own.

    Pairwise, the image is a real one of the person, and each option the reconstruction of the model
    in `models` at the same place. In an identification the image is the reconstruction of
    `models[0]`, each option a real image of the person in `people`, and one more option is "none".
    `truth` is the right option of an identification or of an attention check.
    """

    protocol: Protocol
    check: bool
    person: Index
    image: Index
    options: list[Index] = Field(min_length=2)
    models: list[Index]
    people: list[Index]
    truth: Index | None

    @property
    def none(self) -> int:
        """The number of the option "none of them", beyond all images."""
        return len(self.options)


class Trial(Strict):
    """An item as one participant sees it: `order` has the option at each position."""

    item: Index
    order: list[Index]


class Participant(Strict):
    """A participant, by a random id, and what they are shown one after another."""

    id: str
    protocol: Protocol
    trials: list[Trial] = Field(min_length=1)


class Design(Strict):
    """All of a study but its images and answers; it names no person."""

    format: Literal[1]
    name: str
    seed: int
    seconds: Annotated[int, Field(ge=1)]
    raters: Annotated[int, Field(ge=1)]
    contact: str
    runs: list[str]
    models: list[ShownModel]
    reconstructions: list[Reconstruction]
    items: list[Item] = Field(min_length=1)
    participants: list[Participant] = Field(min_length=1)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that every reconstruction has; those of recognition come first."""
        first, *rest = (each.metrics for each in self.reconstructions)
        shared = [name for name in first if all(name in other for other in rest)]
        return sorted(shared, key=lambda name: (not name.startswith(RECOGNITION), name))


@dataclass(frozen=True)
class StudyFolder:
    """A study as it was read; `id` is a hash of its design, which its answers carry too."""

    path: Path
    design: Design
    id: str

    @property
    def answers(self) -> Path:
        return self.path / ANSWERS

    def images(self) -> list[Tensor]:
        """Read all images, uint8 (C, H, W), in order."""
        tensors, _ = read_tensors(self.path / IMAGES)
        return [tensors[name] for name in sorted(tensors)]


def write_folder(path: Path, design: Design, images: Sequence[Tensor]) -> StudyFolder:
    """Write the folder of a study, for its owner alone and outside of git."""
    with full_disk_reported(path):
        make_private(path)
        ignore_in_git(path)
        # A fixed width, because tensors are read in the order of their names.
        write_tensors(path / IMAGES, {f"{n:06d}": image for n, image in enumerate(images)})
        write_json(path / DESIGN, design.model_dump())
        seal(path, SEALED)
    return StudyFolder(path, design, _identity(path))


def read_study(path: Path) -> StudyFolder:
    """Read the folder of a study; raises StoreError or DataError unless its files fit."""
    again = "make the study again, in a new folder"
    if not (path / DESIGN).is_file():
        raise StoreError(
            f"{path} has no {DESIGN}, so it is not a study: give the folder that "
            "`frostglass study make --out` wrote"
        )
    if problem := broken_seal(path, SEALED):
        raise StoreError(f"{problem}: {again}")
    try:
        design = Design.model_validate(read_json(path / DESIGN))
    except ValidationError as error:
        text = problems(error)[0][:160]
        raise DataError(f"{path / DESIGN} is damaged ({text}): {again}") from None
    _check(path, design, list(read_tensors(path / IMAGES)[0].values()))
    return StudyFolder(path, design, _identity(path))


def _check(path: Path, design: Design, images: Sequence[Tensor]) -> None:
    """Refuse places that lead nowhere: a participant would meet them as an error."""
    models = len(design.models)
    wrong = [
        f"image {number}"
        for number, image in enumerate(images)
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3)
    ]
    wrong += [
        f"item {number}"
        for number, item in enumerate(design.items)
        if max(item.image, *item.options) >= len(images)
        or max(item.models, default=0) >= models
        or (item.truth or 0) > item.none
        or (item.truth is None and (item.check or item.protocol == "identification"))
        or len(item.options) != OPTIONS[item.protocol]
        or (not item.check and len(item.models) != MODELS[item.protocol])
    ]
    wrong += [
        f"participant {each.id}"
        for each in design.participants
        if any(
            trial.item >= len(design.items)
            or design.items[trial.item].protocol != each.protocol
            or sorted(trial.order) != list(range(design.items[trial.item].none))
            for trial in each.trials
        )
    ]
    if wrong:
        raise DataError(
            f"{path / DESIGN}: {wrong[0]} does not fit the rest: make the study again, in a new "
            "folder"
        )


def _identity(path: Path) -> str:
    return hashlib.sha256((path / DESIGN).read_bytes()).hexdigest()
