"""CelebA, read from the folder of its aligned images and its text files."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.data._attributes import Attributes
from frostglass.data._catalogue import Catalogue
from frostglass.data._celeba_lists import IDENTITIES, PARTITION, numbered, split_lists
from frostglass.data._file_dataset import PeopleDataset, Side, side_of
from frostglass.data._inspect import Finding, absent, archives, count, hashed, image_names, present
from frostglass.data.base import Crop, datasets, listed

IMAGES, ATTRIBUTES = "img_align_celeba", "list_attr_celeba.txt"
GMI_IMAGES, GMI_FIRST_PUBLIC, GMI_PUBLIC_IMAGES = 30, 1001, 30_000
TRAIN_PARTITION = 0
HASHES = {
    IDENTITIES: "32bd1bd63d3c78cd57e08160ec5ed1e2",
    ATTRIBUTES: "75e246fa4810816ffd6ee81facbd244c",
    PARTITION: "d32c9cbf5e040fd4025c592c306e6668",
}
ARCHIVES = {"img_align_celeba.zip": "00d2c5bc6d35e252742224ab0c1e8fcb"}
NEEDED_FOR = {
    IDENTITIES: "it says who is in each image",
    ATTRIBUTES: "models of attributes need it (data.attributes)",
    PARTITION: 'data.split = "partition" needs it',
}


@datasets.register
@parameters
class Celeba(PeopleDataset):
    """CelebA's aligned images with the people, parts and crops of the papers.

    Get `Img/img_align_celeba.zip` (the JPEG files) and the text files of `Anno` and `Eval` from the
    dataset's page and unpack them into `root`; nothing is downloaded. Who is private:

    - `gmi`: the 1,000 identities with the lowest numbers that have at least 30 images, 30,027
      images. Public: 30,000 images of identities from 1001 on with fewer than 30. The lists of the
      published code (`lists`) hold exactly these private people and images, and say which 3,009
      images are for testing and which 30,000 are public.
    - `frequent`: the 1,000 identities with the most images (of equals, the first in the files);
      public are all others. PPA and VMI do this.
    - `partition`: the people of CelebA's training part, public those of its other parts. With fewer
      than `min_images` they are left out.

    The low-resolution protocols cut the central 108 of 178 pixels, VMI 128; those at 224 pixels use
    a re-aligned copy of the original images (HD-CelebA-Cropper), here the largest square of the
    aligned ones.

    Paper: Liu et al., Deep Learning Face Attributes in the Wild, ICCV 2015. Splits: GMI (Zhang et
    al., CVPR 2020), PPA (Struppek et al., ICML 2022), VMI (Wang et al., NeurIPS 2021).
    Differs: without `lists` the test part is drawn for each person, and the 30,000 public images
    are chosen by a hash of their names. PPA draws its test part over all images, which leaves some
    people without a test image. VMI's choice among people with 30 images follows no stated order.

    Args:
        root: folder with img_align_celeba/, identity_CelebA.txt and list_attr_celeba.txt.
        size: pixels a side.
        crop: centred square, as a share of the 178 pixels: 108/178 as in GMI, 128/178 as in VMI,
            or "centre" for all of them.
        split: who is private.
        lists: folder with trainset.txt, testset.txt and ganset.txt of the published code, for
            `split = "gmi"`; then `split.test = "published"` uses its test part.
        identities: how many private people, by default 1,000, or all of a partition.
        min_images: images that a private person of a partition must have.
        train_images: the first images of each person are for training and the others for testing,
            with `split.test = "published"`; VMI has 25.
        public_images: at most so many public images, by default 30,000 for `gmi` and all otherwise.
        public: table of another dataset, whose images are the public ones instead.
        attributes: read the 40 attributes, for models that predict them.
    """

    title: ClassVar[str] = "CelebA"
    preparation: ClassVar[str] = (
        "1. get Img/img_align_celeba.zip and the files of Anno and Eval from the dataset's page "
        "(mmlab.ie.cuhk.edu.hk/projects/CelebA.html); 2. unpack the images to ROOT/"
        f"{IMAGES}/000001.jpg; 3. put {IDENTITIES}, {ATTRIBUTES} and {PARTITION} into ROOT; 4. set "
        "data.root, and check it with `frostglass data verify celeba ROOT`"
    )

    crop: Crop = 108 / 178
    split: Literal["gmi", "frequent", "partition"] = "gmi"
    lists: Path | None = None
    identities: Annotated[int, Field(ge=2)] | None = None
    min_images: Annotated[int, Field(ge=3)] = 3
    train_images: Annotated[int, Field(ge=2)] | None = None
    public_images: Annotated[int, Field(ge=1)] | None = None
    attributes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lists and (self.split != "gmi" or self.identities or self.train_images):
            raise ValueError(
                'lists name all images of split = "gmi": remove lists, or split, identities and '
                "train_images"
            )

    def everyone(self) -> Side:
        people = self._identities()
        return self._side(list(people), people)

    def sides(self) -> tuple[Side, Side]:
        people = self._identities()
        private, test, public = self._chosen(people)
        ours = self._side(private, people)
        if test is not None:
            flags = [source in test for source in ours.images.sources]
            ours = replace(ours, test=torch.tensor(flags))
        theirs = self.others() or self._side(self._some(public), people)
        if self.attributes:
            ours, theirs = self._described(ours, theirs)
        return ours, theirs

    def _chosen(self, people: dict[str, int]) -> tuple[list[str], set[str] | None, list[str]]:
        """Return the private images, those of them for testing if that is known, and the public."""
        if self.lists:
            lists = split_lists(self.lists, people)
            return [*lists.train, *lists.test], set(lists.test), lists.public
        images: dict[int, list[str]] = defaultdict(list)
        for name, identity in people.items():
            images[identity].append(name)
        private, public = self._people({who: len(names) for who, names in images.items()})
        test = None
        if self.train_images:
            test = {name for who in private for name in images[who][self.train_images :]}
            if few := [who for who in private if len(images[who]) <= self.train_images]:
                raise DataError(
                    f"train_images must be less than the images of every private person, got "
                    f"{self.train_images}: identity {listed(few)} has no more. Lower it."
                )
        return _of(images, private), test, _of(images, public)

    def _people(self, images: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Return the identities of private and public people, who have so many images each."""
        if self.split == "gmi":
            enough = sorted(who for who, many in images.items() if many >= GMI_IMAGES)
            others = [
                w for w, many in images.items() if w >= GMI_FIRST_PUBLIC and many < GMI_IMAGES
            ]
            return self._first(enough, f"at least {GMI_IMAGES} images", 1000), others
        if self.split == "frequent":
            ranked = sorted(images, key=lambda who: -images[who])  # stable: equals by the files
            private = self._first(ranked, "any images", 1000)
            return private, sorted(set(images) - set(private))
        inside, outside = self._partition()
        enough = sorted(who for who in inside if images.get(who, 0) >= self.min_images)
        words = f"at least {self.min_images} images in the training part"
        return self._first(enough, words, len(enough)), sorted(outside & set(images))

    def _first(self, people: Sequence[int], have: str, by_default: int) -> list[int]:
        wanted = self.identities or by_default
        if not 2 <= wanted <= len(people):
            raise DataError(
                f"expected {max(2, wanted):,} people with {have} in {IDENTITIES}, got "
                f"{len(people):,}: lower data.identities, or get the whole file"
            )
        return list(people[:wanted])

    def _partition(self) -> tuple[set[int], set[int]]:
        """Return the people of the training part and those of the other parts."""
        parts = numbered(self._file(PARTITION), "the number of a part")
        people = self._identities()
        inside = {
            people[name]
            for name, part in parts.items()
            if part == TRAIN_PARTITION and name in people
        }
        outside = {
            people[name]
            for name, part in parts.items()
            if part != TRAIN_PARTITION and name in people
        }
        if both := sorted(inside & outside):
            raise DataError(
                f"the parts of {PARTITION} overlap: {len(both)} people are in the training part "
                f"and in another, identity {listed(both)}. Get the file again."
            )
        return inside, outside

    def _identities(self) -> dict[str, int]:
        return numbered(self._file(IDENTITIES), "the number of an identity")

    def _file(self, name: str) -> Path:
        if not (path := self.folder / name).is_file():
            raise self.missing(f"no {name} in {self.folder}, and {NEEDED_FOR[name]}")
        return path

    def _some(self, names: Sequence[str]) -> list[str]:
        """Return as many public images as wanted, chosen by a hash of their names."""
        by_default = GMI_PUBLIC_IMAGES if self.split == "gmi" and not self.lists else None
        most = self.public_images or by_default
        if most is None or most >= len(names):
            return list(names)
        return sorted(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:most])

    def _side(self, names: Iterable[str], people: Mapping[str, int]) -> Side:
        """List images by identity, in the order of the identities' numbers."""
        names = sorted(names, key=lambda name: (people[name], name))
        folder = self.existing(self.root, part=IMAGES)
        there = image_names(folder)
        if lost := [name for name in names if name not in there]:
            raise self.missing(
                f"{len(lost):,} of {len(names):,} images are missing in {folder}: {listed(lost)}"
            )
        label = {who: place for place, who in enumerate(sorted({people[name] for name in names}))}
        labels = [label[people[name]] for name in names]
        files = [folder / name for name in names]
        return side_of(
            Catalogue(folder, files, labels, list(map(str, label)), []), self.size, self.crop
        )

    def _described(self, ours: Side, theirs: Side) -> tuple[Side, Side]:
        """Add the attributes of private images, and of public ones if they are CelebA's."""
        table = Attributes(self._file(ATTRIBUTES))
        own = list(theirs.images.sources) if self.public is None else []
        values, others = table.of(list(ours.images.sources), own)
        ours = replace(
            ours,
            images=replace(ours.images, attributes=values, attribute_names=table.names),
            files=[*ours.files, table.path],
        )
        if others is not None and own:
            images = replace(theirs.images, attributes=others, attribute_names=table.names)
            theirs = replace(theirs, images=images)
        return ours, theirs

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        findings = []
        for name, md5 in HASHES.items():
            lost = present(root, name, NEEDED_FOR[name])
            findings.append(lost or hashed(root, name, md5, check=hashes))
        findings += archives(root, ARCHIVES, check=hashes)
        if not (root / IMAGES).is_dir():
            return [*findings, Finding(IMAGES, "missing", f"no such folder in {root}")]
        there = image_names(root / IMAGES)
        findings.append(count(IMAGES, "images", len(there), 202_599))
        if (root / IDENTITIES).is_file():
            people = numbered(root / IDENTITIES, "the number of an identity")
            findings.append(count(IDENTITIES, "identities", len(set(people.values())), 10_177))
            findings.append(absent(IMAGES, list(people), there))
            images = Counter(people.values())
            private = sorted(who for who, many in images.items() if many >= GMI_IMAGES)[:1000]
            total = sum(images[who] for who in private)
            findings.append(count("GMI split", "private images", total, 30_027))
        return findings


def _of(images: Mapping[int, list[str]], people: Iterable[int]) -> list[str]:
    return [name for who in people for name in images[who]]
