"""Flickr-Faces-HQ, read from its folders of thumbnails or of full images."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Shape
from frostglass.data._catalogue import catalogue
from frostglass.data._file_dataset import ImageSize, PublicOnly, Side, side_of, without_names
from frostglass.data._inspect import Finding, count, hashed, md5_of
from frostglass.data.base import Crop, datasets, listed

FOLDERS = {"thumbnails": "thumbnails128x128", "images": "images1024x1024"}
ENTRIES = {"thumbnails": "thumbnail", "images": "image"}  # of the JSON file
JSON, JSON_MD5 = "ffhq-dataset-v2.json", "425ae20f06a4da1d4dc0f46d40ba5fd6"
IMAGES = 70_000


@datasets.register
@parameters
class Ffhq(PublicOnly):
    """FFHQ's 70,000 faces without identities: the public images of another dataset.

    Use it as `public = { name = "ffhq", root = "ffhq" }` of a dataset of people. Both published
    folders are read, `thumbnails128x128` and `images1024x1024`, flat or in folders of a thousand
    (00000/00000.png); nothing is downloaded.

    The low-resolution protocols cut the central 88 of 128 pixels (the default). PPA and IF-GMI cut
    the central 800 of 1024 (`crop = 0.78125`).

    Paper: Karras et al., A Style-Based Generator Architecture for GANs, CVPR 2019.

    Args:
        root: folder with thumbnails128x128/ or images1024x1024/.
        size: pixels a side; that of the private images.
        crop: centred square, as a share of the side.
        folder: which of the two to read; by default thumbnails if they are there.
        images: only the first images, by number.
    """

    title: ClassVar[str] = "FFHQ"
    preparation: ClassVar[str] = (
        "1. get thumbnails128x128 (2 GB) or images1024x1024 (89 GB) from github.com/NVlabs/"
        "ffhq-dataset; 2. unpack them to ROOT/thumbnails128x128/ or ROOT/images1024x1024/, and put "
        f"{JSON} into ROOT if hashes are to be compared; 3. name ROOT as root, and check it with "
        "`frostglass data verify ffhq ROOT`"
    )

    root: Path
    size: ImageSize = 64
    crop: Crop = 88 / 128
    folder: Literal["thumbnails", "images"] | None = None
    images: Annotated[int, Field(ge=1)] | None = None

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def everyone(self) -> Side:
        root = self.root.expanduser()
        wanted = [self.folder] if self.folder else list(FOLDERS)
        there = [root / FOLDERS[kind] for kind in wanted if (root / FOLDERS[kind]).is_dir()]
        if not there:
            names = " or ".join(FOLDERS[kind] for kind in wanted)
            raise self.missing(f"no {names} in {root}")
        listing = catalogue(there[0])
        files = sorted(listing.files, key=lambda file: file.stem)[: self.images]
        listing = listing._replace(files=files, labels=[-1] * len(files), names=[])
        return without_names(side_of(listing, self.size, self.crop))

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        kinds = [kind for kind, name in FOLDERS.items() if (root / name).is_dir()]
        if not kinds:
            text = f"neither {' nor '.join(FOLDERS.values())} is in {root}"
            return [Finding("images", "missing", text)]
        findings = []
        for kind in kinds:
            files = catalogue(root / FOLDERS[kind]).files
            findings.append(count(FOLDERS[kind], "images", len(files), IMAGES))
        if not (root / JSON).is_file():
            text = f"no {JSON} in {root}, which has the hash of every image"
            return [*findings, Finding("hashes", "unchecked", text)]
        findings.append(hashed(root, JSON, JSON_MD5, check=hashes))
        if hashes:
            findings += [_compared(root, kind) for kind in kinds]
        return findings


def _compared(root: Path, kind: str) -> Finding:
    """Compare the MD5 of every image with the one in the JSON file."""
    files = {file.name: file for file in catalogue(root / FOLDERS[kind]).files}
    changed = [
        name
        for name, md5 in _published(root / JSON, ENTRIES[kind])
        if name in files and md5_of(files[name]) != md5
    ]
    if changed:
        text = f"{len(changed):,} images differ from {JSON}: {listed(changed)}. Get them again"
        return Finding(FOLDERS[kind], "differs", text)
    return Finding(FOLDERS[kind], "ok", f"all {len(files):,} images have the MD5 of {JSON}")


def _published(path: Path, entry: str) -> Iterator[tuple[str, str]]:
    """Read the name and MD5 of each image."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for item in content.values():
            yield Path(item[entry]["file_path"]).name, item[entry]["file_md5"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the list of FFHQ ({error}): get it again") from error
