"""The questions of both protocols, and the attention checks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from frostglass.study.folder import OPTIONS, Item, Protocol, Reconstruction
from frostglass.study.material import Material

CANDIDATES = OPTIONS["identification"]  # people among whom one is sought


@dataclass
class Gallery:
    """The images of a study, each once."""

    images: list[Tensor] = field(default_factory=list)
    places: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def place(self, kind: str, model: int, person: int, image: Tensor) -> int:
        """Return the number of an image, which is added if it is new."""
        key = (kind, model, person)
        if key not in self.places:
            self.places[key] = len(self.images)
            self.images.append(image)
        return self.places[key]


@dataclass(frozen=True)
class ItemMaker:
    """Makes items of some material; equal generators give equal items."""

    material: Material
    gallery: Gallery
    rng: torch.Generator

    def reconstructions(self, people: Sequence[int]) -> list[Reconstruction]:
        """List what is shown of these people, with the metrics of the run."""
        return [
            Reconstruction(
                model=model,
                person=person,
                image=self._made(model, person),
                metrics=source.metrics[person],
            )
            for model, source in enumerate(self.material.sources)
            for person in people
        ]

    def pairwise(self, people: Sequence[int]) -> list[Item]:
        """Compare the reconstructions of a person from every two models."""
        return [
            self._pair(person, (first, second))
            for first, second in combinations(range(len(self.material.sources)), 2)
            for person in people
        ]

    def identification(self, people: Sequence[int]) -> list[Item]:
        """Seek each person among four, and in a fifth of the items among four others.

        So each of the five answers is right equally often.
        """
        return [
            self._search(model, person, among=place % (CANDIDATES + 1) < CANDIDATES)
            for model in range(len(self.material.sources))
            for place, person in enumerate(self._shuffled(people))
        ]

    def checks(self, protocol: Protocol, people: Sequence[int], count: int) -> list[Item]:
        """Ask what nobody who looks gets wrong: one option is the image itself."""
        make = self._pair_check if protocol == "pairwise" else self._search_check
        return [make(person) for person in self._cycle(people, count)]

    def _cycle(self, people: Sequence[int], count: int) -> Iterator[int]:
        order = self._shuffled(people)
        return (order[number % len(order)] for number in range(count))

    def _pair(self, person: int, models: tuple[int, int]) -> Item:
        models_in_order = self._shuffled(models)
        return Item(
            protocol="pairwise",
            check=False,
            person=person,
            image=self._real(person),
            options=[self._made(model, person) for model in models_in_order],
            models=models_in_order,
            people=[person, person],
            truth=None,
        )

    def _pair_check(self, person: int) -> Item:
        other = self._others(person, 1)[0]
        shown = self._shuffled([person, other])
        return Item(
            protocol="pairwise",
            check=True,
            person=person,
            image=self._real(person),
            options=[self._real(each) for each in shown],
            models=[],
            people=shown,
            truth=shown.index(person),
        )

    def _search(self, model: int, person: int, *, among: bool) -> Item:
        own = [person] if among else []
        people = self._shuffled(own + self._others(person, CANDIDATES - len(own)))
        return Item(
            protocol="identification",
            check=False,
            person=person,
            image=self._made(model, person),
            options=[self._candidate(each) for each in people],
            models=[model],
            people=people,
            truth=people.index(person) if among else CANDIDATES,
        )

    def _search_check(self, person: int) -> Item:
        people = self._shuffled([person, *self._others(person, CANDIDATES - 1)])
        return Item(
            protocol="identification",
            check=True,
            person=person,
            image=self._candidate(person),
            options=[self._candidate(each) for each in people],
            models=[],
            people=people,
            truth=people.index(person),
        )

    def _real(self, person: int) -> int:
        return self.gallery.place("real", 0, person, self.material.real[person])

    def _candidate(self, person: int) -> int:
        return self.gallery.place("candidate", 0, person, self.material.candidates[person])

    def _made(self, model: int, person: int) -> int:
        image = self.material.sources[model].images[person]
        return self.gallery.place("made", model, person, image)

    def _others(self, person: int, count: int) -> list[int]:
        """Draw other people of the run."""
        everyone = [each for each in range(len(self.material.real)) if each != person]
        return self._shuffled(everyone)[:count]

    def _shuffled(self, values: Sequence[int]) -> list[int]:
        return [values[place] for place in torch.randperm(len(values), generator=self.rng).tolist()]
