"""Checks of a split: no person and no image on two sides, and parts that fit together."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, combinations
from typing import NamedTuple

from frostglass.core.errors import DataError
from frostglass.core.pixels import Pixels, content_hashes, joined
from frostglass.core.types import Images, Split
from frostglass.data._duplicates import near_copies
from frostglass.data.base import listed

PRIVATE = ("train", "validation", "test")
PARTS = (*PRIVATE, "public")
EVALUATORS = "evaluators"  # a private part that not every split has
SECRET = "secret"  # people whom only the owner of the model has; not in every split
OPTIONAL = (EVALUATORS, SECRET)


def parts_of(split: Split) -> dict[str, Images]:
    """Return the parts of a split by name, the optional ones last if there are any."""
    parts = dict(zip(PARTS, (split.train, split.validation, split.test, split.public), strict=True))
    optional = {EVALUATORS: split.evaluators, SECRET: split.secret}
    return parts | {name: part for name, part in optional.items() if part is not None}


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
    private = [part for part in parts if side_of(part) == "private"]
    if len({parts[part].names for part in private}) > 1:
        yield (
            f"{', '.join(private[:-1])} and {private[-1]} name different identities: all must list "
            "the same names in the same order"
        )
    for name, part in parts.items():
        yield from label_problems(name, part)
        absent = sorted(set(range(len(part.names))) - set(part.labels.tolist()))
        if absent and side_of(name) == "private":
            yield (
                f"{name} has no image of {listed(part.names[who] for who in absent)}: every "
                "private identity needs one in each part"
            )


def side_of(part: str) -> str:
    """Return whose images a part holds: those of private, public or secret people."""
    return part if part in ("public", SECRET) else "private"


def label_problems(side: str, images: Images) -> Iterator[str]:
    """Check labels and names of a table or part; `side` is as `side_of` returns it, or a part."""
    unnamed = side == "public" and not images.names
    valid = {-1} if unnamed else set(range(len(images.names)))
    if unknown := sorted(set(images.labels.tolist()) - valid):
        yield (
            f"{side} labels without a name: {listed(unknown)}; {len(images.names)} identities are "
            "named"
        )
    if side == "public" and not len(images):
        yield "no public images: an attacker's prior is trained on them"
    if side_of(side) == "private" and len(images.names) < 2:
        yield f"{side} identities: {len(images.names)}; a classifier needs at least 2"


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _name_problems(split: Split) -> Iterator[str]:
    sides = {"private": split.train.names, "public": split.public.names}
    if split.secret is not None:
        sides[SECRET] = split.secret.names
    folded = {side: {_folded(name): name for name in names} for side, names in sides.items()}
    for one, other in combinations(sides, 2):
        if both := sorted(folded[one][name] for name in folded[one].keys() & folded[other].keys()):
            yield (
                f"{len(both)} identities are both {one} and {other}: {listed(both)}; keep each on "
                "one side"
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
    content: bytes


# By what two copies of an image first differ, in this order, and what that means.
COPIES: tuple[tuple[Callable[[_Image], object], str], ...] = (
    (
        lambda image: image.side,
        "{count} images are both {one} and {other}: {images}; remove them from one side",
    ),
    (
        lambda image: image.label,
        "{count} images appear under two names: {images}; keep each under the right one",
    ),
    (
        lambda image: image.part,
        "{count} images are in two {one} parts: {images}; keep one copy, as make_split does",
    ),
)
NEAR_COPIES = (
    "{count} {one} images are nearly the same as a {other} one: {images}; remove them from one side"
)
# Images of secret people are also compared with private ones: a decoy must not be its own person.
NEAR = (("private", "public"), (SECRET, "public"), (SECRET, "private"))


def _copy_problems(split: Split) -> Iterator[str]:
    sides: dict[str, list[_Image]] = {"private": [], "public": [], SECRET: []}
    pixels: dict[str, list[Pixels]] = {side: [] for side in sides}
    copies: dict[bytes, list[_Image]] = defaultdict(list)
    for name, part in parts_of(split).items():
        sides[side_of(name)] += _listing(name, part)
        pixels[side_of(name)].append(part.pixels)
    for image in chain(sides["private"], sides["public"], sides[SECRET]):
        copies[image.content].append(image)
    pairs: dict[tuple[str, str, str], list[tuple[_Image, _Image]]] = defaultdict(list)
    for first, *others in copies.values():
        for key, message in COPIES:
            if other := next((one for one in others if key(one) != key(first)), None):
                pairs[message, first.side, other.side].append((first, other))
                break
    for near in NEAR:
        if all(sides[side] for side in near):
            # The smaller side asks: the time is that of its images.
            few, many = sorted(near, key=lambda side: len(sides[side]))
            found = near_copies(joined(pixels[few]), joined(pixels[many]))
            matches = [(sides[few][row], sides[many][match]) for row, match in found]
            pairs[NEAR_COPIES, *near] = [
                (a, b) if few == near[0] else (b, a) for a, b in matches if a.content != b.content
            ]
    for (message, side, beside), copied in pairs.items():
        if copied:
            lines = listed(f"{a.part} {a.source} = {b.part} {b.source}" for a, b in copied)
            yield message.format(count=len(copied), one=side, other=beside, images=lines)


def _listing(part: str, images: Images) -> list[_Image]:
    hashes = map(bytes, content_hashes(images.pixels).numpy())
    rows = zip(images.labels.tolist(), images.sources, hashes, strict=True)
    return [_Image(side_of(part), label, part, source, content) for label, source, content in rows]
