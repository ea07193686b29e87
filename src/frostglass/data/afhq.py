"""Animal Faces-HQ, read from its folders of cats, dogs and wild animals."""

from pathlib import Path
from typing import ClassVar, Literal

from frostglass.core.parameters import parameters
from frostglass.core.types import Shape
from frostglass.data._catalogue import catalogue
from frostglass.data._file_dataset import ImageSize, PublicOnly, Side, side_of, without_names
from frostglass.data._inspect import Finding, count
from frostglass.data.base import Crop, datasets
from frostglass.data.facescrub import joined

ANIMALS = ("cat", "dog", "wild")
TRAIN, HELD_OUT = "train", ("val", "test")  # the second version renamed its part
# Images of cats, dogs and wild animals in each part of the two versions.
FIRST = {"train": (5153, 4739, 4738), "val": (500, 500, 500)}
SECOND = {"train": (5065, 4678, 4593), "test": (493, 491, 483)}


@datasets.register
@parameters
class Afhq(PublicOnly):
    """AFHQ's animal faces, dogs by default: the public images of another dataset.

    Use it as `public = { name = "afhq", root = "afhq" }` of `stanford_dogs`. Both versions are
    read, train/dog with val/dog or test/dog; nothing is downloaded. No crop is published: whole
    images (512 pixels) are resized.

    Paper: Choi et al., StarGAN v2: Diverse Image Synthesis for Multiple Domains, CVPR 2020.

    Args:
        root: folder with train/ and val/ (or test/), each with cat/, dog/ and wild/.
        size: pixels a side; that of the private images.
        crop: "centre", or a share of the side.
        animal: which animals.
        part: "train", or "all" to add the held-out images.
    """

    title: ClassVar[str] = "AFHQ"
    preparation: ClassVar[str] = (
        "1. get afhq.zip or afhq_v2.zip as github.com/clovaai/stargan-v2 says; 2. unpack it, which "
        "gives ROOT/train/dog/ and ROOT/val/dog/ (ROOT/test/dog/ of the second version); 3. name "
        "ROOT as root, and check it with `frostglass data verify afhq ROOT`"
    )

    root: Path
    size: ImageSize = 64
    crop: Crop = "centre"
    animal: Literal["cat", "dog", "wild"] = "dog"
    part: Literal["train", "all"] = "train"

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def everyone(self) -> Side:
        root = self.root.expanduser()
        parts = [TRAIN]
        if self.part == "all":
            parts += [next((each for each in HELD_OUT if (root / each).is_dir()), HELD_OUT[0])]
        folders = [root / part / self.animal for part in parts]
        for folder in folders:
            if not folder.is_dir():
                raise self.missing(f"no folder at {folder}")
        listing = joined(root, [catalogue(folder) for folder in folders])
        return without_names(side_of(listing, self.size, self.crop))

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        second = (root / HELD_OUT[1]).is_dir() and not (root / HELD_OUT[0]).is_dir()
        findings = []
        for part, published in (SECOND if second else FIRST).items():
            for animal, images in zip(ANIMALS, published, strict=True):
                place = f"{part}/{animal}"
                if not (root / place).is_dir():
                    findings.append(Finding(place, "missing", f"no such folder in {root}"))
                    continue
                got = len(catalogue(root / place).files)
                findings.append(count(place, "images", got, images))
        return findings
