"""Small copies of published datasets, in their layouts: plain images of few people."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

RECORD = 3073


def image(path: Path, number: int, size: tuple[int, int] = (48, 48), middle: int = 0) -> Path:
    """Write an image of random pixels, of which the central `middle` pixels are green."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if middle:
        top, left = (size[1] - middle) // 2, (size[0] - middle) // 2
        pixels[:] = (200, number % 256, 0)  # red, and different from image to image
        pixels[top : top + middle, left : left + middle] = (0, 200, number % 256)
    Image.fromarray(pixels).save(path)
    return path


def celeba(root: Path, people: Mapping[int, int], middle: int = 0) -> Path:
    """Write CelebA's files: `people` have so many images, which take turns in the files."""
    left, lines = dict(people), []
    while any(left.values()):
        for identity in [each for each in left if left[each]]:
            left[identity] -= 1
            lines.append((f"{len(lines) + 1:06}.jpg", identity))
    for number, (name, _) in enumerate(lines):
        png = image(root / "img_align_celeba" / f"{name}.png", number, (178, 218), middle)
        png.rename(png.with_suffix(""))  # a name as published, and pixels without loss
    (root / "identity_CelebA.txt").write_text("".join(f"{name} {who}\n" for name, who in lines))
    values = "".join(f"{name} {'1 -1' if who % 2 else '-1 1'}\n" for name, who in lines)
    (root / "list_attr_celeba.txt").write_text(f"{len(lines)}\nMale Smiling\n{values}")
    return root


def partition(root: Path, train: Iterable[int]) -> Path:
    """Write CelebA's partition: the people of `train` are in its training part."""
    people = [line.split() for line in (root / "identity_CelebA.txt").read_text().splitlines()]
    lines = (f"{name} {0 if int(who) in set(train) else 2}\n" for name, who in people)
    (root / "list_eval_partition.txt").write_text("".join(lines))
    return root


def folders(root: Path, names: Iterable[str], images: int = 4, first: int = 0) -> Path:
    """Write a folder of images for each name."""
    for place, name in enumerate(names):
        for number in range(images):
            image(root / name / f"{number:04}_01.png", first + 100 * place + number)
    return root


def ffhq(root: Path, images: int = 6, folder: str = "thumbnails128x128", middle: int = 88) -> Path:
    for number in range(images):
        image(root / folder / "00000" / f"{number:05}.png", 5000 + number, (128, 128), middle)
    return root


def afhq(root: Path, held_out: str = "val", images: int = 4) -> Path:
    for place, part in enumerate(("train", held_out)):
        folders(root / part, ("cat", "dog", "wild"), images, 7000 + 1000 * place)
    return root


def cifar10(root: Path, images: int = 40) -> Path:
    """Write the six files of the binary version: the classes take turns."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (images, RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(images) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return root


def dogs(root: Path, breeds: Iterable[str] = ("n01-Chihuahua", "n02-Pug"), images: int = 6) -> Path:
    """Write Stanford Dogs: the upper half of each image is the box of the dog."""
    names = []
    for place, breed in enumerate(breeds):
        for number in range(images):
            stem = f"{breed.partition('-')[0]}_{number}"
            image(root / "Images" / breed / f"{stem}.png", 900 + 100 * place + number)
            names.append(f"{breed}/{stem}.png")
            box = root / "Annotation" / breed / stem
            box.parent.mkdir(parents=True, exist_ok=True)
            corners = "<xmin>0</xmin><ymin>0</ymin><xmax>48</xmax><ymax>24</ymax>"
            box.write_text(f"<annotation><object><bndbox>{corners}</bndbox></object></annotation>")
    for file, some in {"train": names[::2], "test": names[1::2]}.items():
        matlab_list(root / f"{file}_list.mat", some)
    return root


def matlab_list(path: Path, names: Iterable[str]) -> None:
    column = np.array([[np.array([name], object)] for name in names], object)
    savemat(path, {"file_list": column.reshape(-1, 1)})
