"""Checks of a split: no person and no image on two sides, and parts that fit together."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from frostglass.core.errors import DataError
from frostglass.core.types import Images, Split
from frostglass.data._duplicates import near_copies
from frostglass.data._images import content_hashes
from frostglass.data.base import listed

PRIVATE = ("train", "validation", "test")
PARTS = (*PRIVATE, "public")
EVALUATORS = "evaluators"  # a private part that not every split has


def parts_of(split: Split) -> dict[str, Images]:
    """Return the parts of a split by name, those for evaluators last if there are any."""
    parts = dict(zip(PARTS, (split.train, split.validation, split.test, split.public), strict=True))
    return parts if split.evaluators is None else {**parts, EVALUATORS: split.evaluators}


def check_split(split: Split) -> None:
    """Raise if any person or image is on two sides, or if parts do not fit; lists every problem.

    People are compared by name, ignoring case and Unicode form. Images are compared by pixels: no
    image may be in two parts or under two names. Private images are also searched for near copies
    among the public ones (`near_copies`, which says what it finds).
    """
    problems = [*_part_problems(split)]
    if not problems:  # content can only be compared if the parts fit together
        problems = [*_name_problems(split), *_copy_problems(split)]
    if problems:
        raise DataError("; ".join(problems))


def _part_problems(split: Split) -> Iterator[str]:
    parts = parts_of(split)
    shapes = {name: part.shape for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        yield (
            f"the parts hold images of different shapes, {shapes}: read all with one size and "
            "number of channels"
        )
    private = [part for part in parts if part != "public"]
    if len({parts[part].names for part in private}) > 1:
        yield (
            f"{', '.join(private[:-1])} and {private[-1]} name different identities: all must list "
            "the same names in the same order"
        )
    for name, part in parts.items():
        yield from label_problems(name, part)
        absent = sorted(set(range(len(part.names))) - set(part.labels.tolist()))
        if absent and name != "public":
            yield (
                f"{name} has no image of {listed(part.names[who] for who in absent)}: every "
                "private identity needs one in each part"
            )


def label_problems(side: str, images: Images) -> Iterator[str]:
    """Check labels and names of a table or part, which is private unless `side` is "public"."""
    unnamed = side == "public" and not images.names
    valid = {-1} if unnamed else set(range(len(images.names)))
    if unknown := sorted(set(images.labels.tolist()) - valid):
        yield (
            f"{side} labels without a name: {listed(unknown)}; {len(images.names)} identities are "
            "named"
        )
    if side == "public" and not len(images):
        yield "no public images: an attacker's prior is trained on them"
    if side != "public" and len(images.names) < 2:
        yield f"{side} identities: {len(images.names)}; a classifier needs at least 2"


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _name_problems(split: Split) -> Iterator[str]:
    sides = {"private": split.train.names, "public": split.public.names}
    private, public = ({_folded(name): name for name in names} for names in sides.values())
    if both := sorted(private[name] for name in private.keys() & public.keys()):
        yield (
            f"{len(both)} identities are both private and public: {listed(both)}; keep each on one "
            "side"
        )
    for side, names in sides.items():
        counts = Counter(map(_folded, names))
        if twice := [name for name in names if counts[_folded(name)] > 1]:
            yield (
                f"{len(twice)} {side} identities have names that differ at most in case: "
                f"{listed(twice)}; merge or rename them"
            )


class _Image(NamedTuple):
    side: str
    label: int
    part: str
    source: str
    content: str


# By what two copies of an image first differ, in this order, and what that means.
COPIES: tuple[tuple[Callable[[_Image], object], str], ...] = (
    (
        lambda image: image.side,
        "{} images are both private and public: {}; remove them from one side",
    ),
    (
        lambda image: image.label,
        "{} images appear under two names: {}; keep each under the right one",
    ),
    (
        lambda image: image.part,
        "{} images are in two private parts: {}; keep one copy, as make_split does",
    ),
)
NEAR_COPIES = "{} private images are nearly the same as a public one: {}; remove them from one side"


def _copy_problems(split: Split) -> Iterator[str]:
    parts = parts_of(split)
    ours = [part for part in parts if part != "public"]
    private = [image for part in ours for image in _listing(part, parts[part])]
    public = _listing("public", split.public)
    copies: dict[str, list[_Image]] = defaultdict(list)
    for image in [*private, *public]:
        copies[image.content].append(image)
    pairs: dict[str, list[tuple[_Image, _Image]]] = {message: [] for _, message in COPIES}
    for first, *others in copies.values():
        for key, message in COPIES:
            if other := next((one for one in others if key(one) != key(first)), None):
                pairs[message].append((first, other))
                break
    pixels = torch.cat([parts[part].pixels for part in ours])
    found = near_copies(pixels, split.public.pixels)
    matches = [(private[row], public[match]) for row, match in found]
    pairs[NEAR_COPIES] = [pair for pair in matches if pair[0].content != pair[1].content]
    for message, copied in pairs.items():
        if copied:
            lines = (f"{a.part} {a.source} = {b.part} {b.source}" for a, b in copied)
            yield message.format(len(copied), listed(lines))


def _listing(part: str, images: Images) -> list[_Image]:
    side = "public" if part == "public" else "private"
    rows = zip(images.labels.tolist(), images.sources, content_hashes(images.pixels), strict=True)
    return [_Image(side, label, part, source, content) for label, source, content in rows]
