"""Fair splits: private train, validation and test pictures of the same people, and public pictures of other people.

An audit is only worth something if nobody and nothing is on both sides, so a split is checked by name and by content when it is made.
"""

import hashlib
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError, StoreError
from frostglass.core.types import Images, Split
from frostglass.data._images import content_hashes, fingerprints
from frostglass.data.base import Dataset, listed
from frostglass.runtime.seeding import generator_for

PRIVATE = ("train", "validation", "test")
PARTS = (*PRIVATE, "public")
FEWEST = 3  # pictures of a private identity: one for each private part
ALIKE = 0.995  # correlation of two fingerprints; `check_split` gives the figures behind it
ROWS_AT_ONCE = 1024
WORDS = ("names", "sources", "attribute_names")


def make_split(
    dataset: Dataset, *, test_fraction: float = 0.2, validation_fraction: float = 0.1, seed: int
) -> Split:
    """Divide the private table of a dataset, identity by identity, and check the whole.

    Each identity is shuffled by a generator of its own, so who else is in the dataset changes nothing, and has at least one picture in
    every part whatever the fractions. Exact repeats of a picture within one identity are dropped first, and counted in the manifest.
    """
    if not (
        test_fraction > 0 and validation_fraction > 0 and test_fraction + validation_fraction < 1
    ):
        raise ConfigError(
            f"test_fraction {test_fraction} and validation_fraction {validation_fraction} must be above 0 and together below 1"
        )
    private, public = dataset.tables()
    problems = [*_misnamed("private", private), *_misnamed("public", public)]
    if problems:
        raise DataError("; ".join(problems))
    kept = {"private": _without_repeats(private), "public": _without_repeats(public)}
    parts = _divide(kept["private"], test_fraction, validation_fraction, seed) | {
        "public": kept["public"]
    }
    manifest = {
        "parts": {name: _facts(part) for name, part in parts.items()},
        "repeats_dropped": {
            "private": len(private) - len(kept["private"]),
            "public": len(public) - len(kept["public"]),
        },
        "test_fraction": test_fraction,
        "validation_fraction": validation_fraction,
        "seed": seed,
    }
    split = _joined(parts, manifest)
    check_split(split)
    return split


def check_people(pictures: Sequence[int]) -> None:
    """Refuse public people of whom too few have pictures enough to train on; `pictures` counts those of each."""
    if sum(count >= FEWEST for count in pictures) < 2:
        raise DataError(
            f"a training on public people needs at least 2 of them with {FEWEST} or more pictures each, got {sum(pictures)} pictures of "
            f"{len(pictures)} named people: give public pictures in one folder per person, or raise data.public_images"
        )


def public_people(images: Images, *, seed: int) -> Split:
    """The public people as classes of their own, to pre-train on: those with enough pictures for train, validation and test."""
    counts = (
        torch.bincount(images.labels, minlength=len(images.names))
        if images.names
        else torch.zeros(0, dtype=torch.long)
    )
    check_people(counts.tolist())
    kept = (counts >= FEWEST).nonzero().flatten()
    number = torch.full((len(images.names),), -1).scatter(0, kept, torch.arange(len(kept)))
    mine = images.at((number[images.labels] >= 0).nonzero().flatten())
    people = replace(
        mine, labels=number[mine.labels], names=tuple(images.names[i] for i in kept.tolist())
    )
    return _joined({**_divide(people, 0.1, 0.1, seed), "public": images}, {})


def _without_repeats(images: Images) -> Images:
    """The first of each picture of an identity; repeats would sit in train and test at once."""
    first: dict[tuple[int, str], int] = {}
    for row, key in enumerate(
        zip(images.labels.tolist(), content_hashes(images.pixels), strict=True)
    ):
        first.setdefault(key, row)
    return images.at(torch.tensor(list(first.values()), dtype=torch.long))


def _divide(
    images: Images, test_fraction: float, validation_fraction: float, seed: int
) -> dict[str, Images]:
    counts = torch.bincount(images.labels, minlength=len(images.names)).tolist()
    few = [
        f"{name} ({count})"
        for name, count in zip(images.names, counts, strict=True)
        if count < FEWEST
    ]
    if few:
        raise DataError(
            f"{len(few)} private identities have fewer than {FEWEST} different pictures, one each for train, validation and test: "
            f"{listed(few)}; add pictures or leave these identities out"
        )
    rows: dict[str, list[Tensor]] = {part: [] for part in PRIVATE}
    for label, (name, count) in enumerate(zip(images.names, counts, strict=True)):
        order = torch.randperm(count, generator=generator_for(seed, "split", name))
        test = min(max(1, round(count * test_fraction)), count - 2)
        validation = min(max(1, round(count * validation_fraction)), count - 1 - test)
        mine = (images.labels == label).nonzero().flatten()[order]
        for part, chosen in zip(
            PRIVATE, mine.split([count - test - validation, validation, test]), strict=True
        ):
            rows[part].append(chosen)
    return {part: images.at(torch.cat(chosen).sort().values) for part, chosen in rows.items()}


def check_split(split: Split) -> None:
    """Refuse a split with anybody or anything on two sides, or with parts that do not fit together; one error lists every problem.

    People are compared by name, case and Unicode form aside. Pictures are compared by their pixels: no picture may be in two parts
    or under two names. Private and public pictures are also compared by fingerprint, which finds copies that were re-encoded or resized:
    two that correlate by 0.995 or more are taken for one. The highest correlation of two different pictures was 0.955 among 10,000 x
    10,000 procedural faces of 32 pixels, 0.908 between scikit-learn's digits 0-4 and 5-9, 0.963 between MNIST's (30,596 x 29,404) and
    0.988 among 5,000 x 5,000 mere ovals on a gradient. Of 500 faces it finds every copy saved as JPEG of quality 50 at 128 pixels or
    resized by way of 32 to 256, but of those saved at 32 pixels only 95 % at quality 95 and 40 % at 75. It does not find crops, mirrored
    copies or other photos of the same progress.
    """
    problems = [*_unfit(split)]
    if not problems:  # contents can only be compared once the parts fit together
        problems = [*_shared_names(split), *_shared_pictures(split)]
    if problems:
        raise DataError("; ".join(problems))


def _joined(parts: Mapping[str, Images], manifest: Mapping[str, Any]) -> Split:
    return Split(
        train=parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        public=parts["public"],
        manifest=manifest,
    )


def _parts(split: Split) -> dict[str, Images]:
    return {part: getattr(split, part) for part in PARTS}


def _unfit(split: Split) -> Iterator[str]:
    parts = _parts(split)
    shapes = {name: part.shape for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        yield f"the parts hold pictures of different shapes, {shapes}: read all with one size and number of channels"
    if len({parts[part].names for part in PRIVATE}) > 1:
        yield "train, validation and test name different identities: all three must list the same names in the same order"
    for name, part in parts.items():
        yield from _misnamed(name, part)
        absent = (
            sorted(set(range(len(part.names))) - set(part.labels.tolist()))
            if name != "public"
            else []
        )
        if absent:
            yield f"{name} has no picture of {listed(part.names[who] for who in absent)}: every private identity needs one in each part"


def _misnamed(side: str, images: Images) -> Iterator[str]:
    """What is wrong with the labels and names of a table or part, private unless `side` is "public"."""
    unnamed = side == "public" and not images.names
    strangers = sorted(
        set(images.labels.tolist()) - ({-1} if unnamed else set(range(len(images.names))))
    )
    if strangers:
        yield f"{side} labels that name nobody: {listed(strangers)}; {len(images.names)} identities are named"
    if side == "public" and not len(images):
        yield "no public pictures: an attacker's prior is learned from them"
    if side != "public" and len(images.names) < 2:
        yield f"{side} identities: {len(images.names)}; a classifier needs at least 2"


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _shared_names(split: Split) -> Iterator[str]:
    private, public = (
        {_folded(name): name for name in images.names} for images in (split.train, split.public)
    )
    both = sorted(private[name] for name in private.keys() & public.keys())
    if both:
        yield f"{len(both)} identities are both private and public: {listed(both)}; keep each on one side"
    for side, images in (("private", split.train), ("public", split.public)):
        counts = Counter(map(_folded, images.names))
        twice = [name for name in images.names if counts[_folded(name)] > 1]
        if twice:
            yield f"{len(twice)} {side} identities have names that differ at most in case: {listed(twice)}; merge or rename them"


class _Picture(NamedTuple):
    side: str
    label: int
    part: str
    source: str
    content: str


# By what two copies of a picture first differ, in this order, and what that means.
COPIES = {
    "side": "{} pictures are both private and public: {}; remove them from one side",
    "label": "{} pictures appear under two names: {}; keep each under the right one",
    "part": "{} pictures leak from one private part into another: {}; keep one copy, as make_split does",
}
NEAR_COPIES = (
    "{} private pictures are nearly the same as a public one: {}; remove them from one side"
)


def _shared_pictures(split: Split) -> Iterator[str]:
    private = [picture for part in PRIVATE for picture in _pictures(part, getattr(split, part))]
    public = _pictures("public", split.public)
    copies: dict[str, list[_Picture]] = defaultdict(list)
    for picture in [*private, *public]:
        copies[picture.content].append(picture)
    found: dict[str, list[tuple[_Picture, _Picture]]] = defaultdict(list)
    for first, *others in copies.values():
        for difference in COPIES:
            other = next(
                (one for one in others if getattr(one, difference) != getattr(first, difference)),
                None,
            )
            if other:
                found[difference].append((first, other))
                break
    yield from (
        _told(message, found[difference])
        for difference, message in COPIES.items()
        if found[difference]
    )
    pixels = torch.cat([getattr(split, part).pixels for part in PRIVATE])
    pairs = [(private[row], public[match]) for row, match in _alike(pixels, split.public.pixels)]
    near = [(ours, theirs) for ours, theirs in pairs if ours.content != theirs.content]
    if near:
        yield _told(NEAR_COPIES, near)


def _pictures(part: str, images: Images) -> list[_Picture]:
    side = "public" if part == "public" else "private"
    rows = zip(images.labels.tolist(), images.sources, content_hashes(images.pixels), strict=True)
    return [_Picture(side, label, part, source, content) for label, source, content in rows]


def _told(message: str, pairs: Sequence[tuple[_Picture, _Picture]]) -> str:
    return message.format(
        len(pairs),
        listed(f"{one.part} {one.source} = {other.part} {other.source}" for one, other in pairs),
    )


def _alike(private: Tensor, public: Tensor) -> Iterator[tuple[int, int]]:
    """Rows of private pictures that are copies of a public one to the eye, each with its best match."""
    theirs = fingerprints(public).T
    for block, ours in enumerate(fingerprints(private).split(ROWS_AT_ONCE)):
        likeness, match = (ours @ theirs).max(1)
        for row in (likeness >= ALIKE).nonzero().flatten().tolist():
            yield block * ROWS_AT_ONCE + row, int(match[row])


def _facts(images: Images) -> dict[str, Any]:
    """Size and content hash of a part: pixels, labels, names and attributes, but not where the files lay."""
    names = json.dumps([images.shape, images.names, images.attribute_names])
    digest = hashlib.sha256(names.encode())
    for tensor in _tensors(images).values():
        digest.update(tensor.numpy().data)
    return {"pictures": len(images), "identities": len(images.names), "sha256": digest.hexdigest()}


def _tensors(images: Images) -> dict[str, Tensor]:
    tensors = {"pixels": images.pixels, "labels": images.labels, "attributes": images.attributes}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def save_split(split: Split, folder: Path) -> None:
    """Write split.safetensors (pixels, labels, attributes) and split.json (manifest, names, sources) into an existing folder."""
    parts = _parts(split)
    save_file(
        {
            f"{name}.{kind}": tensor
            for name, part in parts.items()
            for kind, tensor in _tensors(part).items()
        },
        folder / "split.safetensors",
    )
    words = {name: {field: getattr(part, field) for field in WORDS} for name, part in parts.items()}
    manifest = {**split.manifest, "parts": {name: _facts(part) for name, part in parts.items()}}
    (folder / "split.json").write_text(json.dumps({"manifest": manifest, "words": words}))


def load_split(folder: Path) -> Split:
    """The split that `save_split` wrote, without keys; refused unless it is exactly what its manifest says."""
    try:
        text = json.loads((folder / "split.json").read_text())
        tensors = load_file(folder / "split.safetensors")
        parts = {part: _images(part, tensors, text["words"][part]) for part in PARTS}
        manifest = text["manifest"]
        changed = [name for name, part in parts.items() if manifest["parts"][name] != _facts(part)]
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"no usable split in {folder} ({error}): make it again") from error
    unknown = sorted(
        set(tensors) - {f"{name}.{kind}" for name, part in parts.items() for kind in _tensors(part)}
    )
    if changed or unknown:
        raise StoreError(
            f"the split in {folder} is not that of its manifest ({listed(changed + unknown)}): its files changed, make it again"
        )
    return _joined(parts, manifest)


def _images(part: str, tensors: Mapping[str, Tensor], words: Mapping[str, Sequence[str]]) -> Images:
    return Images(
        pixels=tensors[f"{part}.pixels"],
        labels=tensors[f"{part}.labels"],
        attributes=tensors.get(f"{part}.attributes"),
        names=tuple(words["names"]),
        sources=tuple(words["sources"]),
        attribute_names=tuple(words["attribute_names"]),
    )
