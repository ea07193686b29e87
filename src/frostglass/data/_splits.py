"""Fair splits: private train, validation and test images of the same people, public ones of others.

An audit is only valid if no person and no image is on both sides, so a split is checked by name
and by content when it is made.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError, StoreError
from frostglass.core.pixels import PixelTable, PixelView, content_hashes, mapped_table, view
from frostglass.core.types import Images, Split
from frostglass.data._checks import (
    EVALUATORS,
    OPTIONAL,
    PARTS,
    SECRET,
    check_split,
    label_problems,
    parts_of,
)
from frostglass.data._gather import gathered, write_table
from frostglass.data._secret import withhold
from frostglass.data.base import Dataset, listed
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import read_tensors, write_tensors
from frostglass.store.hashing import file_hash

PIXELS = "pixels.safetensors"
PUBLISHED = "published"
TestShare = float | str  # a share, or PUBLISHED
MIN_IMAGES = 3  # of a private identity: one for each private part that every split has


def make_split(
    dataset: Dataset,
    *,
    test_fraction: TestShare = 0.2,
    validation_fraction: float = 0.1,
    evaluator_fraction: float = 0.0,
    secret_people: int = 0,
    seed: int,
    file: Path | None = None,
) -> Split:
    """Divide the private table of a dataset, identity by identity, and check the whole.

    Each identity has its own random generator, so its parts do not depend on who else is in the
    dataset, and it has at least one image in every part for any fractions. Test and validation
    images are the same with any `evaluator_fraction`, the share that the target never sees and
    only evaluators train on. Exact repeats of an image within one identity are dropped first, and
    counted in the manifest. With a `test_fraction` of "published", the test part is the one that
    the dataset was published with. `secret_people` named public people, drawn at random, are
    withheld from the public part and join the dataset's own secret people. If public images have no
    identities, the manifest says so: `public_people` is "unknown". With `file`, pixels are written
    there and mapped, so that memory does not grow with the number of images.
    """
    shares = _shares(test_fraction, validation_fraction, evaluator_fraction)
    private, public, *own = _tables(dataset, file)
    if problems := [*label_problems("private", private), *label_problems("public", public)]:
        raise DataError("; ".join(problems))
    firsts, kept_public = _first_of_equals(private), public.at(_first_of_equals(public))
    kept_private, test = private.at(firsts), _published_test(dataset, test_fraction)
    parts = _private_parts(kept_private, shares, None if test is None else test[firsts], seed)
    parts["public"], secret = withhold(
        kept_public, own[0] if own else None, secret_people, seed=seed
    )
    if secret is not None:
        parts[SECRET] = secret
    manifest = {
        "parts": {name: _facts(part) for name, part in parts.items()},
        "repeats_dropped": {
            "private": len(private) - len(kept_private),
            "public": len(public) - len(kept_public),
        },
        "test_fraction": test_fraction,
        "validation_fraction": validation_fraction,
        **({"evaluator_fraction": evaluator_fraction} if evaluator_fraction else {}),
        **({"secret_people": secret_people} if secret_people else {}),
        **({} if public.names else {"public_people": "unknown"}),
        "seed": seed,
    }
    split = _joined(parts, manifest)
    check_split(split)
    return split


def _tables(dataset: Dataset, file: Path | None) -> list[Images]:
    """Read the private, the public and perhaps the secret images, as views of one table."""
    tables = [*dataset.tables()]
    if (secret := dataset.secret_table()) is not None:
        tables.append(secret)
    if len({table.shape for table in tables}) > 1:
        raise DataError(
            f"the tables hold images of different shapes, {[table.shape for table in tables]}: "
            "read all with one size and number of channels"
        )
    return _in_one_table(tables, file)


def _in_one_table(parts: Sequence[Images], file: Path | None) -> list[Images]:
    table = gathered([part.pixels for part in parts], file)
    rows = torch.arange(len(table)).split([len(part) for part in parts])
    return [replace(part, pixels=view(table, own)) for part, own in zip(parts, rows, strict=True)]


def _private_parts(
    images: Images, shares: Mapping[str, float], test: Tensor | None, seed: int
) -> dict[str, Images]:
    """Divide private images by shares; `test` says which are for testing, if that is published."""
    if test is None:
        return _divide(images, shares, seed)
    rest = {part: share for part, share in shares.items() if part != "test"}
    parts = _divide(images.at((~test).nonzero().flatten()), rest, seed)
    return parts | {"test": images.at(test.nonzero().flatten())}


def _published_test(dataset: Dataset, share: TestShare) -> Tensor | None:
    """Return which private images are published for testing, if these are asked for."""
    if share != PUBLISHED:
        return None
    if (test := dataset.published_test()) is None:
        raise DataError(
            f'split.test = "published": {dataset.name} as it is set up here names no test images. '
            "Give a share such as 0.2"
        )
    return test


def held_out_share(dataset: Dataset, share: TestShare) -> float:
    """Return the share of private images in the test part."""
    test = _published_test(dataset, share)
    return float(share) if test is None else test.double().mean().item()


def _shares(given: TestShare, validation: float, evaluators: float) -> dict[str, float]:
    """Return the shares by part; evaluators come last, so that the others do not depend on them."""
    test = 1e-9 if isinstance(given, str) else given
    if not (test > 0 and validation > 0 and evaluators >= 0 and test + validation + evaluators < 1):
        raise ConfigError(
            f"test_fraction {given} and validation_fraction {validation} must be above 0, "
            f"evaluator_fraction {evaluators} at least 0, and all together below 1"
        )
    return {"test": test, "validation": validation, EVALUATORS: evaluators}


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
    return _joined(
        {
            **_divide(images.of_people(kept), {"test": 0.1, "validation": 0.1}, seed),
            "public": images,
        },
        {},
    )


def _joined(parts: Mapping[str, Images], manifest: Mapping[str, Any]) -> Split:
    train, validation, test, public = (parts[name] for name in PARTS)
    evaluators, secret = (parts.get(name) for name in OPTIONAL)
    return Split(train, validation, test, public, manifest, evaluators=evaluators, secret=secret)


def _first_of_equals(images: Images) -> Tensor:
    """Return the rows of the first of equal images of each identity.

    Repeats would be in train and test at once.
    """
    first: dict[tuple[int, bytes], int] = {}
    hashes = map(bytes, content_hashes(images.pixels).numpy())
    for row, key in enumerate(zip(images.labels.tolist(), hashes, strict=True)):
        first.setdefault(key, row)
    return torch.tensor(list(first.values()), dtype=torch.long)


def _divide(images: Images, held_out: Mapping[str, float], seed: int) -> dict[str, Images]:
    """Divide images into train and the parts of `held_out`, which gives the share of each."""
    held_out = {part: share for part, share in held_out.items() if share > 0}
    counts = torch.bincount(images.labels, minlength=len(images.names)).tolist()
    people = list(zip(images.names, counts, strict=True))
    parts = ["train", *reversed(held_out)]
    if few := [f"{name} ({count})" for name, count in people if count < len(parts)]:
        raise DataError(
            f"{len(few)} private identities have fewer than {len(parts)} different images, one "
            f"each for {', '.join(parts[:-1])} and {parts[-1]}: {listed(few)}. Add images or "
            "remove these identities."
        )
    rows: dict[str, list[Tensor]] = {part: [] for part in parts}
    for label, (name, count) in enumerate(people):
        order = torch.randperm(count, generator=generator_for(seed, "split", name))
        own = (images.labels == label).nonzero().flatten()[order]
        free, sizes = count - len(held_out), []  # one image is kept for every other part
        for share in held_out.values():
            sizes.append(min(max(1, round(count * share)), free))
            free -= sizes[-1] - 1
        for part, chosen in zip(parts, own.split([free, *reversed(sizes)]), strict=True):
            rows[part].append(chosen)
    return {part: images.at(torch.cat(chosen).sort().values) for part, chosen in rows.items()}


def _facts(images: Images) -> dict[str, Any]:
    """Return size and content hash of a part: pixels, labels, names, attributes, not file paths."""
    names = json.dumps([images.shape, images.names, images.attribute_names])
    digest = hashlib.sha256(names.encode())
    digest.update(content_hashes(images.pixels).numpy().data)
    for tensor in _tensors(images).values():
        digest.update(tensor.numpy().data)
    return {"images": len(images), "identities": len(images.names), "sha256": digest.hexdigest()}


def _tensors(images: Images) -> dict[str, Tensor]:
    tensors = {"labels": images.labels, "attributes": images.attributes}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def save_split(split: Split, folder: Path) -> None:
    """Write the pixels, split.safetensors (which rows are whose) and split.json (words)."""
    parts = parts_of(split)
    table = _table_of(parts)
    if table is None:
        stored = dict(zip(parts, _in_one_table([*parts.values()], folder / PIXELS), strict=True))
        table, parts = _table_of(stored), stored
        assert table is not None
    else:
        write_table(table, folder / PIXELS)
    tensors = {
        f"{name}.{kind}": tensor
        for name, part in parts.items()
        for kind, tensor in {"rows": _rows(part), **_tensors(part)}.items()
    }
    write_tensors(folder / "split.safetensors", {**tensors, "hashes": table.hashes})
    words = {
        name: {
            "names": part.names,
            "sources": part.sources,
            "attribute_names": part.attribute_names,
        }
        for name, part in parts.items()
    }
    manifest = {**split.manifest, "parts": {name: _facts(part) for name, part in parts.items()}}
    content = {"manifest": manifest, "words": words, "pixels": file_hash(folder / PIXELS)}
    (folder / "split.json").write_text(json.dumps(content))


def _table_of(parts: Mapping[str, Images]) -> PixelTable | None:
    """Return the table that all parts are views of, if there is one."""
    sources = [
        source
        for part in parts.values()
        for source in (part.pixels.sources if isinstance(part.pixels, PixelView) else [None])
    ]
    table = sources[0]
    one = isinstance(table, PixelTable) and all(source is table for source in sources)
    return table if one and isinstance(table, PixelTable) else None


def _rows(part: Images) -> Tensor:
    assert isinstance(part.pixels, PixelView)  # of one table
    return part.pixels.rows


def load_split(folder: Path) -> Split:
    """Map what `save_split` wrote; raises unless it matches its manifest exactly."""
    try:
        text = json.loads((folder / "split.json").read_text())
        tensors, _ = read_tensors(folder / "split.safetensors")
        table = mapped_table(folder / PIXELS, tensors["hashes"])
        optional = [part for part in OPTIONAL if part in text["words"]]
        parts = {
            part: _images(part, table, tensors, text["words"][part]) for part in (*PARTS, *optional)
        }
        manifest = text["manifest"]
        changed = [name for name, part in parts.items() if manifest["parts"][name] != _facts(part)]
        if file_hash(folder / PIXELS) != text["pixels"] or len(table) != len(table.hashes):
            changed.append("pixels")
    except (OSError, SafetensorError, StoreError, ValueError, TypeError, KeyError, IndexError) as e:
        raise StoreError(f"no usable split in {folder} ({e}): make it again") from e
    known = {f"{name}.{kind}" for name, part in parts.items() for kind in ("rows", *_tensors(part))}
    changed += sorted(set(tensors) - known - {"hashes"})
    if changed:
        raise StoreError(
            f"the split in {folder} does not match its manifest ({listed(changed)}): its files "
            "changed, make it again"
        )
    return _joined(parts, manifest)


def _images(
    part: str,
    table: PixelTable,
    tensors: Mapping[str, Tensor],
    words: Mapping[str, Sequence[str]],
) -> Images:
    return Images(
        pixels=view(table, tensors[f"{part}.rows"]),
        labels=tensors[f"{part}.labels"],
        attributes=tensors.get(f"{part}.attributes"),
        names=tuple(words["names"]),
        sources=tuple(words["sources"]),
        attribute_names=tuple(words["attribute_names"]),
    )
