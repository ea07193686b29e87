"""How much memory a config would need: its steps are rehearsed on tensors that have shapes and no content, and what would be alive is counted.

A rehearsal runs the very code of each step at its real batch size, for two steps of each training and search, on torch's meta device. Nothing is
computed and next to nothing is allocated, so that gigabytes are foreseen in seconds.
"""

import math
import resource
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from frostglass.attacks.base import Attack, invert, prior_only
from frostglass.audit.pipeline import produce
from frostglass.core.errors import FrostglassError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.core.views import ModelView
from frostglass.data._images import fingerprints
from frostglass.defenses import compose
from frostglass.defenses.base import Defense, Size, TrainingProgress
from frostglass.metrics.base import Evidence, Metric, Rows, measure
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.priors._gan import SHEET
from frostglass.priors.base import PriorMethod
from frostglass.runtime.device import override_device
from frostglass.runtime.freezing import frozen
from frostglass.runtime.memory import HEAP
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work
from frostglass.store.store import Step, Store
from frostglass.training.build import untrained
from frostglass.training.loop import accuracy, optimizer_of, train_epoch
from frostglass.training.settings import Training, stage_split

Counts = Callable[
    [Any], tuple[int, int, int]
]  # people, their pictures and public pictures of a dataset

aten = torch.ops.aten
META = torch.device("meta")
MIB = 2**20
ANSWERED = (
    2**20
)  # bytes up to which values that code asks for are made up; anything larger is pictures or features, which nobody branches on
SHOWN = 256  # pictures shown at once where nothing is learned from them; more of the same need no more memory

GAPS = 1.25  # a heap over the blocks that were in it at its fullest; freed places are not always of a size that is asked for next
FABRIC = (
    250 * MIB
)  # what importing lightning_fabric and what it needs takes, which a training does; measured

# Kernels of convolutions bring what they read and write into a layout of their own first, and back.
LAID_OUT_ANEW = {aten.convolution.default, aten.convolution_backward.default}


class Ledger(TorchDispatchMode):
    """Counts the bytes of all tensors that are made and still alive inside the block, each storage once.

    `now` is what they take; `peak` the most memory a process had for them, in which the heap of small blocks never shrinks. Where code asks for the
    content of a tensor on the meta device, it gets an answer that lets it go on as if all were well: truths are true, whole numbers 0, others 1; a
    choice of rows takes all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._large = self._small = self._fullest = 0
        self._alive: dict[int, int] = {}

    @property
    def now(self) -> int:
        return self._large + self._small

    def charge(self, *blocks: int) -> None:
        """Note blocks of so many bytes that are there for a progress besides what is counted."""
        self._fullest = max(
            self._fullest, self._small + sum(block for block in blocks if block < HEAP)
        )
        self.peak = max(
            self.peak,
            int(GAPS * self._fullest)
            + self._large
            + sum(block for block in blocks if block >= HEAP),
        )

    def repeat(self, before: int, times: int) -> None:
        """Count what has stayed since `before` was `now` as if it had been made so many times."""
        self._large += max(0, times - 1) * (self.now - before)

    def restart(self) -> None:
        """Forget the peak, but not what is alive nor what the heap has kept."""
        self.peak = 0
        self.charge()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in given):
            if (answer := _answer(func, args, kwargs)) is not None:
                return self._counted(answer, ())
            if func._schema.is_mutable and not args[0].is_meta:
                return args[0]  # a real tensor takes no values from one without any
            if not all(tensor.is_meta for tensor in given):
                args, kwargs = tree_map_only(Tensor, _without_content, (args, kwargs))
            args = _all_rows(func, args)
        made = self._counted(func(*args, **kwargs), given)
        if func in LAID_OUT_ANEW:
            self.charge(
                *(
                    tensor.nbytes
                    for tensor in (*given, *tree_leaves(made))
                    if isinstance(tensor, Tensor)
                )
            )
        return made

    def _counted(self, made: Any, given: Sequence[Tensor]) -> Any:
        old = {
            tensor.untyped_storage()._cdata for tensor in given
        }  # of which what is made may be a view
        for tensor in tree_leaves(made):
            if (
                isinstance(tensor, Tensor)
                and (name := (storage := tensor.untyped_storage())._cdata) not in old
                and name not in self._alive
            ):
                self._alive[name] = storage.nbytes()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._gone, name)
        self.charge()
        return made

    def _gone(self, name: int) -> None:
        self._add(-self._alive.pop(name))

    def _add(self, block: int) -> None:
        if abs(block) < HEAP:
            self._small += block
        else:
            self._large += block


def _answer(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What code is told that asks for the content of a tensor without any; None if it does not ask."""
    if func is aten._local_scalar_dense.default:
        return _made_up(args[0].dtype)
    if func is aten.equal.default:
        return True
    if func is aten.nonzero.default:
        return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.long, device=META)
    if func is aten._unique2.default:
        return torch.empty(args[0].numel(), dtype=args[0].dtype, device=META), *(
            torch.empty(0, device=META, dtype=torch.long),
        ) * 2
    if func is aten._to_copy.default and torch.device(kwargs.get("device") or META).type == "cpu":
        dtype = kwargs.get("dtype") or args[0].dtype
        if (
            args[0].nbytes <= ANSWERED
        ):  # a mask that is taken off the device tells which rows failed: none
            return torch.full(
                args[0].shape, 0 if dtype == torch.bool else _made_up(dtype), dtype=dtype
            )
        return torch.empty(args[0].shape, dtype=dtype, device=META)
    return None


def _made_up(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0


def _without_content(tensor: Tensor) -> Tensor:
    return (
        tensor
        if tensor.is_meta or not tensor.ndim
        else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    )


def _all_rows(func: Any, args: Any) -> Any:
    """The arguments of an indexing with masks replaced by the places of all that they could choose."""
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return args
    chosen: list[Tensor | None] = []
    for index in args[1]:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        chosen += (
            [torch.zeros(index.numel(), dtype=torch.long, device=META)] * index.ndim
            if masks
            else [index]
        )
    return (args[0], chosen, *args[2:])


class DryRunWork(Work):
    """The workplace of a rehearsed step: what it keeps is serialised in memory before it is written."""

    def __init__(self, ledger: Ledger):
        super().__init__(Path())
        self._ledger = ledger

    def save(
        self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any] = {}
    ) -> None:
        self._ledger.charge(sum(tensor.nbytes for tensor in tensors.values()))  # in one piece

    def load(self, name: str) -> None:
        return None

    def sheet(self, name: str, pictures: Tensor) -> None:
        pass


class _Bare:
    """What a training asks of its accelerator."""

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(META)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


# What a rehearsal needs no more of, where a method has it: two steps, for optimisers to have their memory, and every term of a loss that is there at
# times only; of what is scored without gradients, two parts of `SHOWN`.
ENOUGH = {
    "steps": 2, "critic_steps": 1, "epochs": 1, "r1_every": 1, "path_every": 1, "checkpoint_every": 1, "trials": 1, "generations": 1,
    "tries": SHOWN, "pool": 2 * SHOWN, "population": 2 * SHOWN, "decoder_steps": 1, "head_start": 0,
    "first_steps": 1, "inner_steps": 1, "terms": 1, "index_steps": 1, "adapt_epochs": 1, "adapt_rounds": 1,
}  # fmt: skip


def brief_copy(method: Any) -> Any:
    """The method with as little to do as takes as much memory."""
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    short = {name: min(most, values[name]) for name, most in ENOUGH.items() if name in values}
    if "block_steps" in values:
        short["block_steps"] = tuple(min(1, steps) for steps in method.block_steps)
    if "budget" in values:  # one move
        short["budget"] = (method.points + 2) * method.samples
    if begins := getattr(method, "begins", None):  # an attack that makes the start of this one
        brief = brief_copy(begins)
        short["starter"] = {field.name: getattr(brief, field.name) for field in fields(brief)}
    if isinstance(method, Attack):
        short["candidates"] = min(method.candidates, 2 * method.rows)
        short["keep"] = min(method.keep, short["candidates"])
    return replace(method, **short)


class Rehearsal(Store):
    """A store that rehearses steps instead of running them: `peaks` has the most bytes that were alive in each, by name.

    Steps are told apart by everything but their seed, which changes no size.
    """

    def __init__(self, root: Path, ledger: Ledger, counts: Counts):
        super().__init__(root)
        self.peaks: dict[str, int] = {}
        self.doing = ""
        self._ledger = ledger
        self._counts = counts
        self._products: dict[str, Any] = {}

    def step(self, step: Step[Any], config: Any, *inputs: Any, seed: int) -> Any:
        key = self.key(step, config, *inputs, seed=0)
        if key not in self._products:
            self.doing = " ".join(
                filter(
                    None, (step.name, getattr(config, "model", "") or getattr(config, "name", ""))
                )
            )
            self._ledger.restart()
            product = getattr(self, f"_{step.name}")(config, *inputs)
            self._products[key] = replace(product, key=key)
            self.peaks[self.doing] = max(self.peaks.get(self.doing, 0), self._ledger.peak)
        return self._products[key]

    def _split(self, dataset: Any, fractions: Any, _: str) -> Split:
        """The split that is foreseen; its making has each private picture four times, each public one twice."""
        private, public = self._counts(dataset)[1:]
        shape, split = dataset.image_shape, blank_split(dataset, fractions, self._counts)
        for images in (split.train, split.public):
            fingerprints(images.pixels)
        self._ledger.charge(*[private * math.prod(shape)] * 3, public * math.prod(shape))
        return split

    def _target(
        self,
        config: Training,
        split: Split,
        defenses: Sequence[Defense],
        data: str,
        _: str,
        start: Target | None,
        perceptual: Target | None = None,
    ) -> Target:
        split = stage_split(split, data, seed=0)
        images = _described(split.train, config.attributes)
        target = untrained(
            config, config.attributes or split.classes, images.shape, defenses, seed=0
        )
        target.module.to(META)
        if not config.weights:
            self._fit(config, target, images, split.public, defenses, perceptual)
        with torch.no_grad():
            accuracy(target, first(images, SHOWN))
        return replace(target, info={"seconds": 0.0})

    def _fit(
        self,
        config: Training,
        target: Target,
        images: Images,
        public: Images,
        defenses: Sequence[Defense],
        perceptual: Target | None,
    ) -> None:
        size = Size(len(images), config.batch, config.epochs)
        batch = first(images, math.ceil(len(images) / math.ceil(len(images) / config.batch)))
        compose.begin(defenses, target, batch, seed=0)
        trainable = [weight for weight in target.module.parameters() if weight.requires_grad]
        rule = compose.optimizer(defenses, target.module, optimizer_of(config, trainable), size)
        names, last = (
            compose.taps(defenses, target),
            TrainingProgress(config.epochs - 1, config.epochs),
        )
        opponents = compose.opponents(
            [brief_copy(defense) for defense in defenses], target, public, perceptual, seed=0
        )
        for _ in range(2):
            train_epoch(
                config,
                _Bare(),
                target.module,
                rule,
                target,
                batch,
                defenses,
                names,
                last,
                opponents,
                seed=0,
            )
            best = {
                name: tensor.detach().clone() for name, tensor in target.module.state_dict().items()
            }
        self._ledger.charge(sum(tensor.nbytes for tensor in best.values()))

    def _prior(
        self, method: PriorMethod, public: Images, view: ModelView | None, _: str, *base: Prior
    ) -> Prior:
        shown = first(public, max(SHOWN, 2 * getattr(method, "batch", 0)))
        # What a target says of every public picture is kept while a prior is fitted to it.
        opinions = torch.empty(len(public) - len(shown), view.classes if view else 0, device=META)
        if getattr(method, "ready", False):  # a file has content, and is tried with it
            with override_device(torch.device("cpu")):
                prior = method.read(public.shape)  # type: ignore[attr-defined]
        else:
            prior = brief_copy(method).train(
                shown,
                view,
                seed=0,
                work=DryRunWork(self._ledger),
                **({"base": base[0]} if base else {}),
            )
        del opinions
        for module in prior.modules:
            module.to(META)
        if prior.condition != "hint":
            latents = prior.draw(*(generator_for(0, "sheet", number) for number in range(SHEET)))
            with frozen(*prior.modules), torch.no_grad():
                prior.images(latents, torch.zeros(SHEET, dtype=torch.long, device=META))
        return prior

    def _attack(
        self, attack: Attack, view: ModelView, prior: Prior, people: int | None
    ) -> Reconstructions:
        everybody, short = min(people or view.classes, view.classes), brief_copy(attack)
        shard = min(everybody, 2 * max(1, attack.rows // short.candidates))  # at least one whole
        found = invert(short, view, prior, labels=range(shard), work=DryRunWork(self._ledger))
        images = torch.empty(everybody, attack.keep, *found.images.shape[2:], device=META)
        self._ledger.charge(images.nbytes)  # the parts, and the whole they are joined to
        return replace(
            found,
            images=images,
            labels=torch.arange(everybody),
            draws=None,
            steps=None,
            broken=None,
            partial=None,
        )

    def _prior_only(
        self, candidates: int, view: ModelView, prior: Prior, people: int | None
    ) -> Reconstructions:
        return prior_only(
            prior, range(min(people or view.classes, view.classes)), candidates, seed=0
        )

    def _scores(
        self,
        metrics: Sequence[Metric],
        target: Target,
        found: Reconstructions,
        split: Split,
        evaluators: Sequence[Target],
    ) -> Rows:
        few = replace(split, train=split.train.at(torch.arange(len(split.classes))))  # one of each
        return measure(metrics, Evidence(found, target, evaluators, few))


def blank_split(dataset: Any, fractions: Any, counts: Counts) -> Split:
    """Pictures as a split will have them, in number and shape, without content; as many of each person, and every other one has all attributes."""
    classes, private, public = counts(dataset)
    attributes = dataset.attribute_names() if hasattr(dataset, "attribute_names") else ()
    shape, strangers = dataset.image_shape, dataset.public_people()
    test, validation = (
        classes * max(1, round(private / classes * share))
        for share in (fractions.test, fractions.validation)
    )
    whose = torch.arange(len(strangers)).repeat_interleave(
        torch.tensor(strangers, dtype=torch.long)
    )
    return Split(
        train=_described(
            _pictures(private - test - validation, shape, classes, "train"), attributes
        ),
        validation=_pictures(validation, shape, classes, "validation"),
        test=_described(_pictures(test, shape, classes, "test"), attributes),
        public=_pictures(
            public, shape, len(strangers), "public", whose if len(whose) == public else None
        ),
    )


def _pictures(
    count: int, shape: Sequence[int], people: int, name: str, whose: Tensor | None = None
) -> Images:
    labels = (
        torch.arange(count) % people
        if whose is None and people
        else torch.full((count,), -1)
        if whose is None
        else whose
    )
    names = tuple(
        f"{'public' if name == 'public' else 'private'} {number}" for number in range(people)
    )
    return Images(
        torch.empty(count, *shape, dtype=torch.uint8, device=META),
        labels,
        names,
        ("",) * count,
        key=name,
    )


def _described(images: Images, attributes: tuple[str, ...]) -> Images:
    """Pictures every other one of which has all the attributes a training names; "all" counts as one, for a few outputs more weigh nothing."""
    known = (torch.arange(len(images))[:, None] % 2 == 0).repeat(1, len(attributes))
    return replace(images, attributes=known, attribute_names=attributes) if attributes else images


def first(images: Images, count: int) -> Images:
    """The first pictures of a set, sharing its memory."""
    attributes = None if images.attributes is None else images.attributes[:count]
    return replace(
        images,
        pixels=images.pixels[:count],
        labels=images.labels[:count],
        sources=images.sources[:count],
        attributes=attributes,
    )


def resident() -> int:
    """Bytes of memory this process has now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return most_resident()


def most_resident() -> int:
    """The most bytes of memory this process ever had."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    # A process inherits the system's own figure, ru_maxrss, from the one that started it, but not this.
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


@dataclass(frozen=True)
class Need:
    """The most memory a run is foreseen to take, in bytes, in which step, and why it may be more: what could not be rehearsed."""

    bytes: int
    step: str
    unknown: str = ""


def foreseen(
    chosen: Sequence[tuple[str, Any]],
    store: Store,
    counts: Counts,
    steps: Callable[[Any, Store], Any] = produce,
    rehearsed: type[Rehearsal] = Rehearsal,
) -> Need:
    """What the experiments of a config would need together; `counts` tells how many people and pictures a dataset has, `steps` walks those of an experiment.

    A grid keeps the networks of all its experiments until its report is written. Those that differ in their seed alone are rehearsed once.
    """
    begun = resident() + (0 if "lightning_fabric" in sys.modules else FABRIC)
    ledger, alike = Ledger(), Counter(repr(replace(exp, seed=0)) for _, exp in chosen)
    rehearsal, unknown = rehearsed(store.root, ledger, counts), ""
    with override_device(META), seeded(0, "memory"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of networks that are never used
        for _, exp in chosen:
            before, times = ledger.now, alike.pop(repr(replace(exp, seed=0)), 0)
            try:
                with ledger:
                    if times:
                        steps(replace(exp, seed=0), rehearsal)
            except (*MODEL_ERRORS, FrostglassError) as error:
                unknown = unknown or f"{rehearsal.doing} cannot be rehearsed: {first_line(error)}"
            ledger.repeat(before, times)
    step = max(rehearsal.peaks, key=rehearsal.peaks.__getitem__, default="")
    return Need(begun + rehearsal.peaks.get(step, 0), step, unknown)
