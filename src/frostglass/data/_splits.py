"""Fair splits: private train, validation and test images of the same people, public ones of others.

An audit is only valid if no person and no image is on both sides, so a split is checked by name
and by content when it is made.
"""

import hashlib
import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
MIN_IMAGES = 3  # of a private identity: one for each private part
ALIKE = 0.995  # correlation of two fingerprints; `check_split` gives the figures behind it
ROWS_AT_ONCE = 1024


def make_split(
    dataset: Dataset, *, test_fraction: float = 0.2, validation_fraction: float = 0.1, seed: int
) -> Split:
    """Divide the private table of a dataset, identity by identity, and check the whole.

    Each identity has its own random generator, so its parts do not depend on who else is in the
    dataset, and it has at least one image in every part for any fractions. Exact repeats of an
    image within one identity are dropped first, and counted in the manifest.
    """
    if not (
        test_fraction > 0 and validation_fraction > 0 and test_fraction + validation_fraction < 1
    ):
        raise ConfigError(
            f"test_fraction {test_fraction} and validation_fraction {validation_fraction} must be "
            "above 0 and together below 1"
        )
    private, public = dataset.tables()
    if problems := [*_label_problems("private", private), *_label_problems("public", public)]:
        raise DataError("; ".join(problems))
    kept_private, kept_public = _without_repeats(private), _without_repeats(public)
    parts = _divide(kept_private, test_fraction, validation_fraction, seed)
    parts["public"] = kept_public
    manifest = {
        "parts": {name: _facts(part) for name, part in parts.items()},
        "repeats_dropped": {
            "private": len(private) - len(kept_private),
            "public": len(public) - len(kept_public),
        },
        "test_fraction": test_fraction,
        "validation_fraction": validation_fraction,
        "seed": seed,
    }
    split = _joined(parts, manifest)
    check_split(split)
    return split


def check_people(images: Sequence[int]) -> None:
    """Raise if too few public people have enough images to train on; `images` counts each's."""
    if sum(count >= MIN_IMAGES for count in images) < 2:
        raise DataError(
            f"training on public people needs at least 2 people with {MIN_IMAGES} or more images "
            f"each, got {sum(images)} images of {len(images)} named people. Provide public images "
            "in one folder per person, or raise data.public_images."
        )


def public_people(images: Images, *, seed: int) -> Split:
    """Return a split to pre-train on, with public people as classes.

    People with too few images for train, validation and test are left out.
    """
    counts = torch.zeros(0, dtype=torch.long)
    if images.names:
        counts = torch.bincount(images.labels, minlength=len(images.names))
    check_people(counts.tolist())
    kept = (counts >= MIN_IMAGES).nonzero().flatten()
    number = torch.full((len(images.names),), -1).scatter(0, kept, torch.arange(len(kept)))
    own = images.at((number[images.labels] >= 0).nonzero().flatten())
    names = tuple(images.names[i] for i in kept.tolist())
    people = replace(own, labels=number[own.labels], names=names)
    return _joined({**_divide(people, 0.1, 0.1, seed), "public": images}, {})


def _without_repeats(images: Images) -> Images:
    """Keep the first of equal images of an identity; repeats would be in train and test at once."""
    first: dict[tuple[int, str], int] = {}
    keys = zip(images.labels.tolist(), content_hashes(images.pixels), strict=True)
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    return images.at(torch.tensor(list(first.values()), dtype=torch.long))


def _divide(
    images: Images, test_fraction: float, validation_fraction: float, seed: int
) -> dict[str, Images]:
    counts = torch.bincount(images.labels, minlength=len(images.names)).tolist()
    people = list(zip(images.names, counts, strict=True))
    if few := [f"{name} ({count})" for name, count in people if count < MIN_IMAGES]:
        raise DataError(
            f"{len(few)} private identities have fewer than {MIN_IMAGES} different images, one "
            f"each for train, validation and test: {listed(few)}. Add images or remove these "
            "identities."
        )
    rows: dict[str, list[Tensor]] = {part: [] for part in PRIVATE}
    for label, (name, count) in enumerate(people):
        order = torch.randperm(count, generator=generator_for(seed, "split", name))
        test = min(max(1, round(count * test_fraction)), count - 2)
        validation = min(max(1, round(count * validation_fraction)), count - 1 - test)
        own = (images.labels == label).nonzero().flatten()[order]
        sizes = [count - test - validation, validation, test]
        for part, chosen in zip(PRIVATE, own.split(sizes), strict=True):
            rows[part].append(chosen)
    return {part: images.at(torch.cat(chosen).sort().values) for part, chosen in rows.items()}


def check_split(split: Split) -> None:
    """Raise if any person or image is on two sides, or if parts do not fit; lists every problem.

    People are compared by name, ignoring case and Unicode form. Images are compared by pixels: no
    image may be in two parts or under two names. Private and public images are also compared by
    fingerprint, which finds re-encoded and resized copies: two that correlate by 0.995 or more
    count as one. The highest correlation of two different images was 0.955 among 10,000 x 10,000
    procedural faces of 32 pixels, 0.908 between scikit-learn's digits 0-4 and 5-9, 0.963 between
    MNIST's (30,596 x 29,404) and 0.988 among 5,000 x 5,000 ovals on a gradient. Of 500 faces it
    finds every copy saved as JPEG of quality 50 at 128 pixels or resized via 32 to 256, but of
    those saved at 32 pixels only 95 % at quality 95 and 40 % at 75. It does not find crops,
    mirrored copies or other photos of the same moment.
    """
    problems = [*_part_problems(split)]
    if not problems:  # content can only be compared if the parts fit together
        problems = [*_name_problems(split), *_copy_problems(split)]
    if problems:
        raise DataError("; ".join(problems))


def _joined(parts: Mapping[str, Images], manifest: Mapping[str, Any]) -> Split:
    train, validation, test, public = (parts[name] for name in PARTS)
    return Split(train, validation, test, public, manifest)


def _parts(split: Split) -> dict[str, Images]:
    parts = (split.train, split.validation, split.test, split.public)
    return dict(zip(PARTS, parts, strict=True))


def _part_problems(split: Split) -> Iterator[str]:
    parts = _parts(split)
    shapes = {name: part.shape for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        yield (
            f"the parts hold images of different shapes, {shapes}: read all with one size and "
            "number of channels"
        )
    if len({parts[part].names for part in PRIVATE}) > 1:
        yield (
            "train, validation and test name different identities: all three must list the same "
            "names in the same order"
        )
    for name, part in parts.items():
        yield from _label_problems(name, part)
        absent = sorted(set(range(len(part.names))) - set(part.labels.tolist()))
        if absent and name != "public":
            yield (
                f"{name} has no image of {listed(part.names[who] for who in absent)}: every "
                "private identity needs one in each part"
            )


def _label_problems(side: str, images: Images) -> Iterator[str]:
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
    parts = _parts(split)
    private = [image for part in PRIVATE for image in _listing(part, parts[part])]
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
    pixels = torch.cat([parts[part].pixels for part in PRIVATE])
    matches = [(private[row], public[match]) for row, match in _alike(pixels, split.public.pixels)]
    pairs[NEAR_COPIES] = [pair for pair in matches if pair[0].content != pair[1].content]
    for message, copied in pairs.items():
        if copied:
            lines = (f"{a.part} {a.source} = {b.part} {b.source}" for a, b in copied)
            yield message.format(len(copied), listed(lines))


def _listing(part: str, images: Images) -> list[_Image]:
    side = "public" if part == "public" else "private"
    rows = zip(images.labels.tolist(), images.sources, content_hashes(images.pixels), strict=True)
    return [_Image(side, label, part, source, content) for label, source, content in rows]


def _alike(private: Tensor, public: Tensor) -> Iterator[tuple[int, int]]:
    """Yield rows of private images that look like a copy of a public one, with the best match."""
    theirs = fingerprints(public).T
    for block, ours in enumerate(fingerprints(private).split(ROWS_AT_ONCE)):
        likeness, match = (ours @ theirs).max(1)
        for row in (likeness >= ALIKE).nonzero().flatten().tolist():
            yield block * ROWS_AT_ONCE + row, int(match[row])


def _facts(images: Images) -> dict[str, Any]:
    """Return size and content hash of a part: pixels, labels, names, attributes, not file paths."""
    names = json.dumps([images.shape, images.names, images.attribute_names])
    digest = hashlib.sha256(names.encode())
    for tensor in _tensors(images).values():
        digest.update(tensor.numpy().data)
    return {"images": len(images), "identities": len(images.names), "sha256": digest.hexdigest()}


def _tensors(images: Images) -> dict[str, Tensor]:
    tensors = {"pixels": images.pixels, "labels": images.labels, "attributes": images.attributes}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def save_split(split: Split, folder: Path) -> None:
    """Write split.safetensors (tensors) and split.json (manifest and words) into a folder."""
    parts = _parts(split)
    tensors = {
        f"{name}.{kind}": tensor
        for name, part in parts.items()
        for kind, tensor in _tensors(part).items()
    }
    save_file(tensors, folder / "split.safetensors")
    words = {
        name: {
            "names": part.names,
            "sources": part.sources,
            "attribute_names": part.attribute_names,
        }
        for name, part in parts.items()
    }
    manifest = {**split.manifest, "parts": {name: _facts(part) for name, part in parts.items()}}
    (folder / "split.json").write_text(json.dumps({"manifest": manifest, "words": words}))


def load_split(folder: Path) -> Split:
    """Read what `save_split` wrote; raises unless it matches its manifest exactly."""
    try:
        text = json.loads((folder / "split.json").read_text())
        tensors = load_file(folder / "split.safetensors")
        parts = {part: _images(part, tensors, text["words"][part]) for part in PARTS}
        manifest = text["manifest"]
        changed = [name for name, part in parts.items() if manifest["parts"][name] != _facts(part)]
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"no usable split in {folder} ({error}): make it again") from error
    known = {f"{name}.{kind}" for name, part in parts.items() for kind in _tensors(part)}
    changed += sorted(set(tensors) - known)
    if changed:
        raise StoreError(
            f"the split in {folder} does not match its manifest ({listed(changed)}): its files "
            "changed, make it again"
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
