"""What the attacks share that learn from public pictures what a feature means: parameters, lessons and the loop of epochs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.attacks.features.base import (
    Effort,
    FeatureAttack,
    Ledger,
    cannot_adapt,
    spread_evenly,
)
from frostglass.core.assets import Assets
from frostglass.core.errors import RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.core.views import CHUNK, Ability, FeatureView
from frostglass.models.cut import SQUARE, channel_axis
from frostglass.runtime.seeding import generator_for
from frostglass.runtime.tensors import under_prefix, with_prefix

FITS = 2**30  # bytes of features that are kept; more are asked for again in each epoch
MEASURED = 1000  # pictures whose features tell how large features are
FAINTEST = 1e-7  # of the strongest channel's deviation: what is fainter is rounding, and is not blown up any further

Table = Callable[
    [Tensor, Tensor], Tensor
]  # rows for places among pictures, of the mirrored picture where the second is True


class Student(Protocol):
    """A network that learns, with whatever else must learn beside it."""

    def step(self, features: Tensor, answers: Tensor) -> float: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Lessons:
    """Features of `count` pictures and what should be made of them; with `flips` of mirrored ones too."""

    count: int
    features: Table
    answers: Table
    flips: bool

    def at(self, places: Tensor, mirrored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mirrored = torch.zeros_like(places, dtype=torch.bool) if mirrored is None else mirrored
        return self.features(places, mirrored), self.answers(places, mirrored)


@parameters
class Learned(FeatureAttack):
    """Base of the attacks that learn a network from features of public pictures, from scratch for every encoder.

    Args:
        epochs: passes over the public pictures. batch: pictures a step. lr: Adam's step size.
        width: channels of the network's narrowest stage.
        standardize: show the network features in units of their own, so that no encoder hides behind small numbers: mean 0 and deviation 1
            in each channel, as measured on public pictures.
        flips: half of the pictures of an epoch are mirrored; their features are asked for too.
        validation: share of the public pictures that is held out; the epoch with the least squared error on them is kept, the last one if
            it is 0.
        adapt: public pictures that the device is asked to protect (A1): what has learned from plain features goes on learning from what is
            released for these. 0 asks for none.
        adapt_epochs: passes over those.
    """

    epochs: Annotated[int, Field(ge=1)] = 40
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    width: Annotated[int, Field(ge=4)] = 32
    standardize: bool = True
    flips: bool = True
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    adapt: Annotated[int, Field(ge=0)] = 0
    adapt_epochs: Annotated[int, Field(ge=1)] = 70

    @property
    def access(self) -> tuple[Ability, ...]:
        return ("encode", "protection") if self.adapt else ("encode",)

    def problems(self, view: FeatureView, assets: Assets) -> list[str]:
        found = super().problems(view, assets)
        there = 0 if assets.public is None else len(assets.public)
        if there - self._held(there) < 2:
            found.append(
                f"{self.name} learns from public pictures, and there are {there}: at least 2 that are not held out are needed"
            )
        if self.adapt and self.adapt - self._held(self.adapt) < 2:
            found.append(
                f"{self.name}.adapt ({self.adapt}) must leave at least 2 pictures that are not held out: raise it, or set it to 0"
            )
        return [*found, *cannot_adapt(self.name, self.adapt, assets)]

    @property
    def lesson(self) -> "FeatureAttack | None":
        return replace(self, adapt=0, adapt_epochs=1, averaged=1)

    @property
    def protects(self) -> int:
        return self.adapt

    def effort(self, victims: int) -> Effort:
        return Effort(
            encoded=victims,
            steps=self.adapt_epochs * self.steps_in(self.adapt) if self.adapt else 0,
        )

    def steps_in(self, count: int) -> int:
        """Steps of an epoch over so many pictures, some of which are held out."""
        return max(1, (count - self._held(count)) // self.batch)

    def untaught(
        self, view: FeatureView, assets: Assets, answer: Sequence[int]
    ) -> tuple[Student, nn.Module]:
        """Who learns to give answers of a shape, and the network that it learns with; weights are drawn from torch's global generator."""
        raise TypeError(f"{type(self).__name__} must define untaught()")

    @property
    def learned(self) -> tuple[str, ...]:
        return (f"{self.name}-units", self.name)

    def _held(self, count: int) -> int:
        return math.ceil(self.validation * count)

    def taught(
        self,
        student: Student,
        network: nn.Module,
        view: FeatureView,
        public: Images,
        answers: Table,
        *,
        seed: int,
        ledger: Ledger,
    ) -> Callable[[Tensor], Tensor]:
        """Let a network learn from plain features, then from protected ones if it may ask for some; returns what to call with features.

        `answers` are given for places among the public pictures.
        """
        asked = self._asked(view, public, ledger)
        some = spread_evenly(len(public), min(MEASURED, len(public)))
        mean, deviation = torch.tensor([0.0, 1.0]).to(view.device)
        if self.standardize:
            mean, deviation = ledger.once(
                f"{self.name}-units",
                lambda: units_of(
                    asked(some, torch.zeros_like(some, dtype=torch.bool)), view.image_shape
                ),
            )
        plain = Lessons(
            len(public),
            lambda places, mirrored: (asked(places, mirrored) - mean) / deviation,
            answers,
            self.flips,
        )
        with ledger.part(self.name):
            self._learn(self.name, student, network, plain, self.epochs, seed=seed, ledger=ledger)
        if self.adapt:
            chosen = spread_evenly(len(public), self.adapt)
            released = ledger.once("protected", lambda: view.protected(public.floats(chosen)))
            ready = ((released - mean) / deviation).to(view.device)
            protected = Lessons(
                self.adapt,
                lambda places, _: ready[places.to(ready.device)],
                lambda places, sides: answers(chosen[places], sides),
                flips=False,
            )
            with ledger.part(f"{self.name}-adapted"):
                self._learn(
                    f"{self.name}-adapted",
                    student,
                    network,
                    protected,
                    self.adapt_epochs,
                    seed=seed,
                    ledger=ledger,
                )
        network.eval().requires_grad_(False)
        return lambda features: network((features - mean) / deviation)

    def _asked(self, view: FeatureView, public: Images, ledger: Ledger) -> Table:
        """Features of public pictures: asked for once if they are few enough to keep, each time anew if not."""

        def ask(places: Tensor, mirrored: Tensor) -> Tensor:
            return view.encode(flipped(public.floats(places), mirrored))

        def everything(mirrored: bool) -> Tensor:
            parts = torch.arange(len(public)).split(CHUNK)
            return torch.cat(
                [ask(part, torch.full_like(part, mirrored, dtype=torch.bool)) for part in parts]
            )

        if 4 * math.prod(view.feature_shape) * len(public) * (2 if self.flips else 1) > FITS:
            return ask
        kept: list[Tensor] = []

        def known(places: Tensor, mirrored: Tensor) -> Tensor:
            if not kept:  # not before they are needed: a network that was taught before needs none
                kept.append(ledger.once(f"{self.name}-features", lambda: everything(False)))
                if self.flips:
                    kept.append(ledger.once(f"{self.name}-mirrored", lambda: everything(True)))
            return chosen_from(kept, places, mirrored)

        return known

    def _learn(
        self,
        name: str,
        student: Student,
        network: nn.Module,
        lessons: Lessons,
        epochs: int,
        *,
        seed: int,
        ledger: Ledger,
    ) -> None:
        """Go through the lessons; one that was stopped goes on after the last whole epoch. The network ends as it was in the epoch that is kept."""
        order = torch.randperm(lessons.count, generator=generator_for(seed, name, "held out"))
        held, taught = order[: self._held(lessons.count)], order[self._held(lessons.count) :]
        if saved := ledger.load(name):
            tensors, values = saved
            student.restore(tensors)
            done, least, best = values["epoch"], values["error"], under_prefix("best", tensors)
        else:  # what it knows already may be better than what it learns here
            done, least, best = 0, _error(network, lessons, held), copied(network)
        for epoch in range(done, epochs):
            self._epoch(student, lessons, taught, generator_for(seed, name, epoch))
            error = _error(network, lessons, held)
            if not math.isfinite(error) or not all(
                tensor.isfinite().all() for tensor in network.state_dict().values()
            ):
                raise RunError(f"{name}: NaN or infinity after epoch {epoch}: lower {self.name}.lr")
            if error < least or not len(held):
                least, best = error, copied(network)
            ledger.save(
                name,
                student.tensors() | with_prefix("best", best),
                {"epoch": epoch + 1, "error": least},
            )
            ledger.progress(
                epoch + 1,
                epochs,
                f"{name}: error {error:.4g} on pictures held out" if len(held) else name,
            )
        put_back(network, best)

    def _epoch(
        self, student: Student, lessons: Lessons, places: Tensor, rng: torch.Generator
    ) -> None:
        order = places[torch.randperm(len(places), generator=rng)]
        mirrored = torch.rand(len(order), generator=rng) < (0.5 if lessons.flips else 0.0)
        batches = max(
            1, len(order) // self.batch
        )  # as in `steps_in`; of one size or nearly, never smaller than `batch`: batch norm needs company
        for part, sides in zip(
            order.tensor_split(batches), mirrored.tensor_split(batches), strict=True
        ):
            student.step(*lessons.at(part, sides))


def flipped(images: Tensor, mirrored: Tensor) -> Tensor:
    """Pictures, those where `mirrored` (N,) is True seen in a mirror."""
    return torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(3), images)


def chosen_from(tables: list[Tensor], places: Tensor, mirrored: Tensor) -> Tensor:
    """Rows of the first table, or of the second where `mirrored`."""
    places, mirrored = (index.to(tables[0].device) for index in (places, mirrored))
    rows = tables[0][places]
    if len(tables) > 1 and mirrored.any():
        rows[mirrored] = tables[1][places[mirrored]]
    return rows


def units_of(features: Tensor, image_shape: Shape = SQUARE) -> Tensor:
    """Mean and deviation (2, ...) of each channel of features (N, ...) of pictures of a shape."""
    channels = 1 + channel_axis(tuple(features.shape[1:]), image_shape)
    axes = [axis for axis in range(features.ndim) if axis != channels]
    deviation, mean = torch.std_mean(features, dim=axes, keepdim=True, correction=0)
    return torch.stack(
        [mean[0], deviation[0].clamp(min=max(FAINTEST * deviation.max().item(), 1e-12))]
    )


def _error(network: nn.Module, lessons: Lessons, held: Tensor) -> float:
    """The mean squared error on pictures that nothing was learned from; 0 if there are none."""
    if not len(held):
        return 0.0
    network.eval()
    with torch.no_grad():
        pairs = (lessons.at(part) for part in held.split(CHUNK))
        return (
            torch.cat(
                [
                    (network(features) - answers).square().flatten(1).mean(1)
                    for features, answers in pairs
                ]
            )
            .mean()
            .item()
        )


def copied(network: nn.Module) -> dict[str, Tensor]:
    """Copies of a network's weights and buffers themselves: what its `state_dict` gives may stand for them."""
    return {
        name: tensor.detach().clone()
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }


def put_back(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a network the weights and buffers that were `copied`."""
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            tensor.copy_(tensors[name])
