"""Published datasets in their layouts on disk, made small here."""

import pytest
import torch

import data_layouts as layouts
from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError, DataError
from frostglass.data import (
    Afhq,
    Celeba,
    Cifar10,
    Facescrub,
    Ffhq,
    Folder,
    StanfordDogs,
    Vggface2,
    datasets,
    make_split,
)
from frostglass.data._verify import published_names
from frostglass.plan.problems import problems

MANY = {7: 31, 3: 30, 12: 30, 1001: 4, 1002: 5, 20: 29}


@pytest.fixture(scope="module")
def celeba(tmp_path_factory):
    return layouts.celeba(tmp_path_factory.mktemp("celeba"), MANY, middle=108)


@pytest.fixture
def small(tmp_path):
    return layouts.celeba(tmp_path / "celeba", {1: 5, 2: 4, 3: 3, 4: 2, 5: 4})


def names(images):
    return images.names, torch.bincount(images.labels).tolist()


def test_the_gmi_split_has_the_first_people_with_thirty_images(celeba):
    data = Celeba(root=celeba, identities=2)
    private, public = data.tables()
    assert names(private) == (("3", "7"), [30, 31])
    assert names(public) == (("1001", "1002"), [4, 5])  # not 20, whose number is below 1001
    assert data.counts() == (2, 61, 9)
    assert data.people() == ({"3": 30, "7": 31}, {"1001": 4, "1002": 5})
    assert (data.most_of_one(), data.public_people()) == (31, [4, 5])
    assert len(data.files()) == 70
    with pytest.raises(DataError, match=r"expected 1,000 people with at least 30 images .* got 3"):
        Celeba(root=celeba).counts()


def test_the_crop_of_celeba_is_the_published_one(celeba):
    """The central 108 pixels are green; 55 from the top and 35 from the left."""
    pixels = Celeba(root=celeba, identities=2, size=108).tables()[0].pixels[0]
    assert (pixels[0] == 0).all()
    assert (pixels[1] == 200).all()
    wider = Celeba(root=celeba, identities=2, size=112, crop=112 / 178).tables()[0].pixels[0]
    assert (wider[0, 0] == 200).all()
    assert (wider[1, 2:110, 2:110] == 200).all()


def test_frequent_people_and_the_first_images_of_each(small):
    data = Celeba(root=small, split="frequent", identities=3, train_images=3, size=16)
    private, public = data.tables()
    assert names(private) == (("1", "2", "5"), [5, 4, 4])
    assert names(public) == (("3", "4"), [3, 2])
    assert private.labels[data.published_test()].tolist() == [0, 0, 1, 2]
    split = make_split(data, test_fraction="published", validation_fraction=0.1, seed=0)
    assert split.test.sources == tuple(
        source for source, held in zip(private.sources, data.published_test(), strict=True) if held
    )
    assert split.manifest["test_fraction"] == "published"
    with pytest.raises(DataError, match=r"train_images must be less than the images of every"):
        Celeba(root=small, split="frequent", identities=3, train_images=4).counts()


def test_the_partition_of_celeba(small):
    data = Celeba(root=small, split="partition", size=16)
    with pytest.raises(DataError, match=r"no list_eval_partition.txt in .* CelebA: 1. get Img"):
        data.counts()
    layouts.partition(small, [1, 2, 4])
    private, public = data.tables()
    assert names(private) == (("1", "2"), [5, 4])  # 4 has two images, which are nobody's
    assert names(public) == (("3", "5"), [3, 4])
    file = small / "list_eval_partition.txt"
    file.write_text(file.read_text().replace("000001.jpg 0", "000001.jpg 1"))
    with pytest.raises(DataError, match=r"parts of list_eval_partition.txt overlap: 1 people"):
        data.counts()


def lists(folder, train, test, public):
    folder.mkdir(exist_ok=True)
    for name, rows in {"trainset": train, "testset": test, "ganset": public}.items():
        (folder / f"{name}.txt").write_text("".join(f"{row}\n" for row in rows))
    return folder


def test_lists_of_the_published_code(small, tmp_path):
    """Of five people, 1 and 2 are private; the images of a person are five apart at first."""
    train = ["000001.png 0", "000006.png 0", "000002.png 1", "000007.png 1"]
    folder = lists(tmp_path / "lists", train, ["000011.png 0", "000012.png 1"], ["000003.png"])
    data = Celeba(root=small, lists=folder, size=16)
    private, public = data.tables()
    assert names(private) == (("1", "2"), [3, 3])
    assert private.sources[2] == "000011.jpg"
    assert data.published_test().tolist() == [False, False, True] * 2
    assert public.sources == ("000003.jpg",)
    split = make_split(data, test_fraction="published", validation_fraction=0.3, seed=0)
    assert split.test.sources == ("000011.jpg", "000012.jpg")
    assert len(split.train) == len(split.validation) == 2


@pytest.mark.parametrize(
    ("train", "test", "public", "message"),
    [
        (["000001.jpg"], ["000001.jpg"], ["000003.jpg"], "trainset.txt and testset.txt .* overlap"),
        (["000001.jpg"], ["000006.jpg"], ["000011.jpg"], "images of 1 private people, 1: nobody"),
        (["900000.jpg"], ["000006.jpg"], ["000003.jpg"], "names 1 images that identity_CelebA.txt"),
    ],
)
def test_lists_that_cannot_be(small, tmp_path, train, test, public, message):
    folder = lists(tmp_path / "lists", train, test, public)
    with pytest.raises(DataError, match=message):
        Celeba(root=small, lists=folder).counts()


def test_a_missing_list_or_image_is_named(small, tmp_path):
    (tmp_path / "lists").mkdir()
    with pytest.raises(DataError, match=r"no trainset.txt and no testset.txt and no ganset.txt in"):
        Celeba(root=small, lists=tmp_path / "lists").counts()
    (small / "img_align_celeba" / "000001.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 13 images are missing in .*: 000001.jpg. CelebA: 1"):
        Celeba(root=small, split="frequent", identities=3).counts()
    (small / "identity_CelebA.txt").write_text("000001.jpg one\n")
    with pytest.raises(DataError, match=r"line 1: expected a file name and the number of an ident"):
        Celeba(root=small).counts()
    with pytest.raises(ConfigError, match=r'lists name all images of split = "gmi"'):
        Celeba(root=small, lists=tmp_path, split="frequent")


def test_attributes_of_celeba(small):
    data = Celeba(root=small, split="frequent", identities=3, attributes=True, size=16)
    private, public = data.tables()
    assert data.attribute_names() == ("Male", "Smiling")
    assert private.attributes[:, 0].tolist() == [
        who % 2 == 1 for who in [1] * 5 + [2] * 4 + [5] * 4
    ]
    assert public.attributes is not None
    assert data.describes_public()
    assert data.constant_attributes() == ()


def test_public_images_of_another_dataset(small, tmp_path):
    ffhq = {"name": "ffhq", "root": str(layouts.ffhq(tmp_path / "ffhq"))}
    data = Celeba(root=small, split="frequent", identities=3, size=32, public=ffhq)
    _, public = data.tables()
    assert (public.names, public.labels.tolist()) == ((), [-1] * 6)
    assert public.shape == (3, 32, 32)
    assert (public.pixels[0][0] == 0).all()  # the central 88 of 128 pixels, which are green
    split = make_split(data, seed=0)
    assert split.manifest["public_people"] == "unknown"
    people = layouts.folders(tmp_path / "mine", ["a", "b"])
    own = Folder(private=people, public=ffhq | {"images": 3}, size=32)
    assert own.counts() == (2, 8, 3)
    assert len(own.files()) == 11
    assert own.people() == ({"a": 4, "b": 4}, {})


def test_a_public_dataset_that_cannot_be(small):
    with pytest.raises(
        ConfigError, match=r"public: expected a table with a name, one of afhq, cel"
    ):
        Celeba(root=small, public={"name": "faces"})
    with pytest.raises(
        ConfigError, match=r"public.size must be that of the private images, 64, got"
    ):
        Celeba(root=small, public={"name": "ffhq", "root": "x", "size": 32})
    with pytest.raises(ConfigError, match=r"public: Ffhq: root: required"):
        Celeba(root=small, public={"name": "ffhq"})
    with pytest.raises(DataError, match=r"ffhq has no identities, so that none can be private"):
        Ffhq(root=small).counts()


def test_ffhq_in_both_layouts(tmp_path):
    root = layouts.ffhq(tmp_path, images=4)
    assert len(Ffhq(root=root).everyone().images) == 4
    with pytest.raises(DataError, match=r"no images1024x1024 in .* FFHQ: 1. get thumbnails"):
        Ffhq(root=root, folder="images").everyone()
    layouts.ffhq(tmp_path, 2, "images1024x1024")
    chosen = Ffhq(root=root, folder="images", crop=800 / 1024).everyone().images
    assert chosen.sources == ("00000/00000.png", "00000/00001.png")


@pytest.mark.parametrize("groups", [True, False])
def test_facescrub_in_both_layouts(tmp_path, groups):
    if groups:
        layouts.folders(tmp_path / "actors" / "faces", ["Bo", "Cy"])
        layouts.folders(tmp_path / "actresses" / "faces", ["Ann"], first=1000)
    else:
        layouts.folders(tmp_path, ["Bo/face", "Cy/face", "Zoe/face"])
        layouts.folders(tmp_path, ["Bo/image"], first=500)
    data = Facescrub(root=tmp_path, identities=2, crop=54 / 64, size=32)
    private, public = data.tables()
    assert names(private) == (("Bo", "Cy"), [4, 4])
    assert names(public) == (("Ann",) if groups else ("Zoe",), [4])
    with pytest.raises(DataError, match=r"all 3 people in .* are private, and public images are"):
        Facescrub(root=tmp_path).counts()
    with pytest.raises(DataError, match=r"identities must be at most 3"):
        Facescrub(root=tmp_path, identities=4).counts()


def test_a_group_of_facescrub_is_missing(tmp_path):
    layouts.folders(tmp_path / "actors" / "faces", ["Bo", "Cy"])
    with pytest.raises(DataError, match=r"holds actors and no actresses. FaceScrub: 1. ask"):
        Facescrub(root=tmp_path, identities=2).counts()


def test_vggface2(tmp_path):
    layouts.folders(tmp_path / "train", ["n000002", "n000003", "n000004"])
    with pytest.raises(DataError, match=r"no folder at .*/test. VGGFace2: 1. get"):
        Vggface2(root=tmp_path).counts()
    layouts.folders(tmp_path / "test", ["n000001"], first=1000)
    data = Vggface2(root=tmp_path, identities=2, max_images=3, size=32)
    private, public = data.tables()
    assert names(private) == (("n000002", "n000003"), [3, 3])
    assert names(public) == (("n000001",), [4])
    layouts.folders(tmp_path / "test", ["n000003"], first=2000)
    with pytest.raises(
        DataError, match=r"train and test in .* overlap: 1 people are in both, n0000"
    ):
        data.counts()


def test_cifar10(tmp_path):
    data = Cifar10(root=layouts.cifar10(tmp_path))
    private, public = data.tables()
    assert names(private) == (("airplane", "automobile", "bird", "cat", "deer"), [24] * 5)
    assert public.names[-1] == "truck"
    file = (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes()
    row = private.sources.index("data_batch_2.bin 11")
    expected = torch.tensor(list(file[11 * 3073 + 1 : 12 * 3073])).byte().view(3, 32, 32)
    assert torch.equal(private.pixels[row], expected)
    assert private.labels[row] == 1
    test = data.published_test()
    assert [
        source.split()[0] for source, held in zip(private.sources, test, strict=True) if held
    ] == ["test_batch.bin"] * 20
    split = make_split(data, test_fraction="published", seed=0)
    assert len(split.test) == 20
    few = Cifar10(root=tmp_path, images_per_class=3, size=16)
    assert few.counts() == (5, 15, 15)
    assert few.tables()[0].pixels[:2].shape == (2, 3, 16, 16)
    with pytest.raises(ConfigError, match=r"3 in both private_classes and public_classes"):
        Cifar10(root=tmp_path, private_classes=(3,), public_classes=(3, 4))


def test_pickles_of_cifar10_are_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"\x80\x02cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(DataError, match=r"holds the Python version .* pickles .* binary version"):
        Cifar10(root=tmp_path).counts()
    binary = layouts.cifar10(tmp_path) / "cifar-10-batches-bin"
    (binary / "data_batch_3.bin").write_bytes(b"x" * 5000)
    with pytest.raises(
        DataError, match=r"data_batch_3.bin has 5,000 bytes, expected a multiple of"
    ):
        Cifar10(root=tmp_path).counts()
    (binary / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"no data_batch_3.bin in .* CIFAR-10: 1. get the binary"):
        Cifar10(root=tmp_path).counts()


def test_stanford_dogs_with_cats_for_the_public(tmp_path):
    root, animals = layouts.dogs(tmp_path / "dogs"), layouts.afhq(tmp_path / "afhq")
    with pytest.raises(DataError, match=r'all breeds in .* such as public = { name = "afhq"'):
        StanfordDogs(root=root).counts()
    public = {"name": "afhq", "root": str(animals), "animal": "cat", "part": "all"}
    data = StanfordDogs(root=root, public=public, size=24)
    private, others = data.tables()
    assert names(private) == (("Chihuahua", "Pug"), [6, 6])
    assert (len(others), others.names) == (8, ())
    assert data.published_test().tolist() == [False, True] * 6
    whole = StanfordDogs(root=root, public=public, size=48).tables()[0].pixels[0]
    boxed = StanfordDogs(root=root, public=public, size=24, boxes=True, crop=1.0)
    assert torch.equal(boxed.tables()[0].pixels[0], whole[:, :24, 12:36])  # the box is its top
    (root / "Annotation" / "n02-Pug" / "n02_3").write_text("<annotation/>")
    with pytest.raises(DataError, match=r"n02_3 has no box"):
        boxed.counts()


def test_lists_of_stanford_dogs(tmp_path):
    root, animals = layouts.dogs(tmp_path / "dogs"), layouts.afhq(tmp_path / "afhq", "test")
    data = StanfordDogs(root=root, public={"name": "afhq", "root": str(animals), "part": "all"})
    assert data.counts() == (2, 12, 8)
    layouts.matlab_list(root / "test_list.mat", ["n01-Chihuahua/n01_0.png"])
    with pytest.raises(
        DataError, match=r"train_list.mat and test_list.mat in .* overlap: 1 images"
    ):
        data.counts()
    (root / "test_list.mat").write_bytes(b"no list")
    with pytest.raises(DataError, match=r"test_list.mat is not a list of Stanford Dogs"):
        data.counts()
    (root / "test_list.mat").unlink()
    with pytest.raises(DataError, match=r"no test_list.mat in .* beside the other list. Stanford"):
        data.counts()


def test_afhq_without_its_animals(tmp_path):
    with pytest.raises(DataError, match=r"no folder at .*train/dog. AFHQ: 1. get afhq.zip"):
        Afhq(root=tmp_path).everyone()


def test_a_test_part_that_is_not_published(small):
    with pytest.raises(DataError, match=r'"published": celeba .* names no test images'):
        make_split(
            Celeba(root=small, split="frequent", identities=3), test_fraction="published", seed=0
        )


@pytest.mark.parametrize("name", published_names())
def test_missing_data_is_a_problem_of_check_with_the_steps(name, tmp_path):
    dataset = datasets.get(name)
    table = {"name": name, "root": str(tmp_path / "none")}
    if name == "hf":
        table["public"] = "test"
    if name in ("ffhq", "afhq"):
        people = layouts.folders(tmp_path / "mine", ["a", "b"])
        table = {"name": "folder", "private": str(people), "public": table}
    evaluators = [{"model": "cnn"}, {"model": "resnet"}]
    settings = {"data": table, "evaluators": evaluators, "attack": {"name": "gmi"}}
    lines = problems(experiments(settings))
    assert any(dataset.preparation in line for line in lines)
    assert all("\n" not in line for line in lines)
