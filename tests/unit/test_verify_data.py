"""`frostglass data`: what a dataset on disk lacks, in words, and how to prepare it."""

import gzip
import hashlib
import json

import pytest

import data_layouts as layouts
from commands import error_of, frostglass
from frostglass.core.errors import ConfigError, DataError
from frostglass.data import celeba as celeba_module
from frostglass.data import ffhq as ffhq_module
from frostglass.data._verify import preparation_steps, published_names, verify


def states(name, root, **options):
    return {(each.part, each.state): each.text for each in verify(name, root, **options).findings}


def test_datasets_that_can_be_verified():
    assert published_names() == [
        *("afhq", "celeba", "cifar10", "facescrub", "ffhq", "hf", "lfw", "mnist"),
        *("stanford_dogs", "vggface2"),
    ]


@pytest.mark.parametrize("name", published_names())
def test_every_dataset_says_how_to_prepare_it(name):
    steps = preparation_steps(name)
    assert len(steps) >= 3
    assert f"`frostglass data verify {name} ROOT`" in steps[-1]
    with pytest.raises(DataError, match=r"no folder at .*nowhere\. .*: 1\. "):
        verify(name, layouts.Path("nowhere"))


def test_an_unknown_dataset():
    with pytest.raises(ConfigError, match=r"no published dataset named 'faces': .*known: afhq"):
        verify("faces", layouts.Path())


def test_celeba(tmp_path, monkeypatch):
    root = layouts.celeba(tmp_path, {1: 4, 2: 3})
    (root / "img_align_celeba" / "000003.jpg").unlink()
    found = states("celeba", root)
    assert found["img_align_celeba", "missing"] == "1 of 7 images missing: 000003.jpg"
    assert (
        found["identity_CelebA.txt", "missing"] == "2 identities, expected 10,177: 10,175 missing"
    )
    assert "needs it" in found["list_eval_partition.txt", "missing"]
    assert ("list_attr_celeba.txt", "differs") in found
    quick = states("celeba", root, hashes=False)
    assert ("list_attr_celeba.txt", "unchecked") in quick
    md5 = hashlib.md5((root / "list_attr_celeba.txt").read_bytes()).hexdigest()
    monkeypatch.setitem(celeba_module.HASHES, "list_attr_celeba.txt", md5)
    assert ("list_attr_celeba.txt", "ok") in states("celeba", root)


def test_ffhq_compares_every_image_with_the_hashes_of_its_list(tmp_path, monkeypatch):
    root = layouts.ffhq(tmp_path, images=3)
    monkeypatch.setattr(ffhq_module, "IMAGES", 3)
    assert "which has the hash of every image" in states("ffhq", root)["hashes", "unchecked"]
    folder = root / "thumbnails128x128" / "00000"
    entries = {
        str(number): {
            "thumbnail": {
                "file_path": f"thumbnails128x128/00000/{number:05}.png",
                "file_md5": hashlib.md5((folder / f"{number:05}.png").read_bytes()).hexdigest(),
            }
        }
        for number in range(3)
    }
    (root / ffhq_module.JSON).write_text(json.dumps(entries))
    md5 = hashlib.md5((root / ffhq_module.JSON).read_bytes()).hexdigest()
    monkeypatch.setattr(ffhq_module, "JSON_MD5", md5)
    assert verify("ffhq", root).complete
    layouts.image(folder / "00001.png", 77, (128, 128))
    found = states("ffhq", root)
    assert "1 images differ" in found["thumbnails128x128", "differs"]
    (root / ffhq_module.JSON).write_text("[]")
    assert "is not the list of FFHQ" in states("ffhq", root)["files", "differs"]


def test_counts_of_the_others(tmp_path):
    afhq = states("afhq", layouts.afhq(tmp_path / "afhq"))
    assert afhq["train/dog", "missing"] == "4 images, expected 4,739: 4,735 missing"
    second = states("afhq", layouts.afhq(tmp_path / "v2", "test"))
    assert second["test/dog", "missing"] == "4 images, expected 491: 487 missing"
    cifar = states("cifar10", layouts.cifar10(tmp_path / "cifar"))
    assert cifar["test_batch.bin", "missing"] == "40 images, expected 10,000: 9,960 missing"
    root = layouts.dogs(tmp_path / "dogs")
    (root / "Images" / "n02-Pug" / "n02_1.png").unlink()
    dogs = states("stanford_dogs", root)
    assert dogs["Images", "missing"] == "11 images, expected 20,580: 20,569 missing"
    assert "1 of its images are not in Images" in dogs["test_list.mat", "missing"]
    assert ("Annotation", "ok") in dogs
    layouts.folders(tmp_path / "vgg" / "train", ["n000002"])
    vgg = states("vggface2", tmp_path / "vgg")
    assert vgg["test", "missing"].startswith("no such folder")
    layouts.folders(tmp_path / "scrub" / "actors" / "faces", ["Bo"])
    scrub = states("facescrub", tmp_path / "scrub")
    assert scrub["actors", "missing"] == "1 people, expected 265: 264 missing"
    assert scrub["images", "unchecked"].startswith("4 faces; copies differ")


def test_mnist_is_compared_by_content(tmp_path):
    header = bytes([0, 0, 8, 1, 0, 0, 0, 2])
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + b"\1\2"))
    found = states("mnist", tmp_path)
    assert (
        found["train-labels-idx1-ubyte.gz", "missing"]
        == "2 digits, expected 60,000: 59,998 missing"
    )
    assert ("train-labels-idx1-ubyte.gz", "differs") in found
    assert ("train-images-idx3-ubyte", "missing") in found


def test_the_commands(tmp_path):
    root = layouts.cifar10(tmp_path)
    result = frostglass("data", "verify", "cifar10", str(root))
    assert result.code == 1
    assert "missing   test_batch.bin: 40 images" in result.out
    assert "1. get the binary version" in result.out
    facts = json.loads(frostglass("data", "verify", "cifar10", str(root), "--json").out)
    assert (facts["complete"], len(facts["findings"])) == (False, 6)
    assert frostglass("data", "steps", "celeba").out.startswith("1. get Img/img_align_celeba.zip")
    for command in (["verify", "cifar10", str(tmp_path / "none")], ["steps", "celebb"]):
        error_of(frostglass("data", *command))
