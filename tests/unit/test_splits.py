"""Splits: how they are made, and what is refused."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frostglass.core.errors import ConfigError, DataError
from frostglass.data._splits import PARTS, check_split, make_split
from frostglass.data.digits import Digits
from frostglass.data.faces import Faces
from frostglass.data.folder import Folder
from frostglass.data.mnist import Mnist
from tables import Fixed, fixed, some_images, sources_of, with_image

# making


def test_sizes_and_completeness():
    data = fixed()
    split = make_split(data, seed=0)
    count = {name: [int(n) for n in torch.bincount(getattr(split, name).labels)] for name in PARTS}
    assert count == {
        "train": [7, 14, 1],
        "validation": [1, 2, 1],
        "test": [2, 4, 1],
        "public": [6, 6],
    }
    assert split.classes == ("ann", "bob", "cy")
    assert split.validation.names == split.test.names == split.classes
    assert sorted(split.train.sources + split.validation.sources + split.test.sources) == sorted(
        data.private.sources
    )
    for part in (split.train, split.validation, split.test):
        assert list(part.sources) == sorted(part.sources, key=data.private.sources.index)
        for row in range(len(part)):
            origin = data.private.sources.index(part.sources[row])
            assert torch.equal(part.pixels[row], data.private.pixels[origin])
            assert part.labels[row] == data.private.labels[origin]


def test_same_seed_same_split_other_seed_other_split():
    split = make_split(fixed(), seed=0)
    assert make_split(fixed(), seed=0).manifest == split.manifest
    assert make_split(fixed(), seed=1).test.sources != split.test.sources


def test_an_identity_s_parts_do_not_depend_on_other_identities():
    data = fixed(counts=(10, 20, 9))
    everyone = make_split(data, seed=5)
    rows = (data.private.labels != 0).nonzero().flatten()
    without_ann = data.private.at(rows)
    without_ann = replace(without_ann, labels=without_ann.labels - 1, names=("bob", "cy"))
    fewer = make_split(replace(data, private=without_ann), seed=5)
    for name in ("bob", "cy"):
        assert sources_of(fewer, name) == sources_of(everyone, name)


def test_identities_are_shuffled_independently():
    private = some_images(("ann", "bob"), (30, 30), 1)
    private = replace(private, sources=tuple(str(number) for number in [*range(30), *range(30)]))
    split = make_split(Fixed(private, some_images(("dee",), (5,), 2)), seed=0)
    assert sources_of(split, "ann") != sources_of(split, "bob")


@pytest.mark.parametrize(
    ("test", "validation"), [(0.01, 0.01), (0.9, 0.05), (0.05, 0.9), (0.5, 0.49)]
)
def test_every_identity_is_in_every_part_at_any_fraction(test, validation):
    split = make_split(
        fixed(counts=(3, 4, 5)), test_fraction=test, validation_fraction=validation, seed=0
    )
    for part in (split.train, split.validation, split.test):
        assert torch.bincount(part.labels, minlength=3).min() >= 1


@pytest.mark.parametrize(
    ("test", "validation"), [(0, 0.1), (0.1, 0), (0.5, 0.5), (-0.1, 0.2), (float("nan"), 0.1)]
)
def test_impossible_fractions_are_refused(test, validation):
    with pytest.raises(
        ConfigError,
        match=r"test_fraction .* must be above 0, .* all together below 1",
    ):
        make_split(fixed(), test_fraction=test, validation_fraction=validation, seed=0)


def test_identities_with_too_few_images_are_named():
    with pytest.raises(
        DataError,
        match=r"2 private identities have fewer than 3 .*: ann \(1\), cy \(2\)\. Add images",
    ):
        make_split(fixed(counts=(1, 20, 2)), seed=0)


def test_repeats_within_an_identity_are_dropped_and_counted():
    data = fixed()
    private = with_image(
        with_image(data.private, 4, data.private.pixels[3]), 5, data.private.pixels[3]
    )
    public = with_image(data.public, 1, data.public.pixels[0])
    split = make_split(Fixed(private, public), seed=0)
    assert split.manifest["repeats_dropped"] == {"private": 2, "public": 1}
    assert len(split.train) + len(split.validation) + len(split.test) == len(data.private) - 2
    assert split.public.sources == (data.public.sources[0], *data.public.sources[2:])
    with pytest.raises(DataError, match=r"fewer than 3 different images, .*: cy \(2\)"):
        make_split(
            replace(data, private=with_image(data.private, 31, data.private.pixels[32])), seed=0
        )


def test_attributes_travel_with_their_images():
    data = fixed(attributes=True)
    split = make_split(data, seed=0)
    assert split.test.attribute_names == ("hat", "beard")
    for row, source in enumerate(split.test.sources):
        assert torch.equal(
            split.test.attributes[row], data.private.attributes[data.private.sources.index(source)]
        )


def test_manifest_is_plain_and_sensitive_to_content():
    data = fixed()
    manifest = make_split(data, seed=3).manifest
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["seed"] == 3
    assert manifest["test_fraction"] == 0.2
    assert manifest["parts"]["public"]["images"] == 12
    assert manifest["parts"]["train"]["identities"] == 3
    hashes = [facts["sha256"] for facts in manifest["parts"].values()]
    assert len(set(hashes)) == 4
    one_level = data.public.pixels[0] ^ torch.zeros_like(data.public.pixels[0]).index_fill_(
        0, torch.tensor([0]), 1
    )
    renamed = replace(data.public, names=("dee", "eva"))
    relabelled = replace(data.public, labels=data.public.labels.flip(0))
    for public in (with_image(data.public, 0, one_level), renamed, relabelled):
        changed = make_split(replace(data, public=public), seed=3).manifest["parts"]
        assert changed["public"]["sha256"] != hashes[3]
        assert changed["train"] == manifest["parts"]["train"]
    moved = replace(
        data.public, sources=tuple(f"elsewhere/{source}" for source in data.public.sources)
    )
    assert make_split(replace(data, public=moved), seed=3).manifest == manifest


def test_digits_make_a_split_without_problems():
    split = make_split(Digits(size=16), seed=0)
    assert split.manifest["repeats_dropped"] == {"private": 0, "public": 0}
    assert len(split.train) > 4 * len(split.validation)


MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


@pytest.mark.slow
@pytest.mark.skipif(
    not MNIST.is_dir(), reason="MNIST's files are not at ../shared/data/mnist beside the repository"
)
def test_mnist_makes_a_split_without_problems():
    split = make_split(Mnist(root=MNIST), seed=0)
    assert sum(len(getattr(split, part)) for part in PARTS) == 60_000


@pytest.mark.slow
def test_thousands_of_faces_make_a_split_without_problems():
    data = Faces(identities=1000, images=5, public_identities=5000, public_images=1)
    split = make_split(data, seed=0)
    assert split.manifest["repeats_dropped"] == {"private": 0, "public": 0}


# checking


def test_overlapping_identities_are_refused_whatever_their_case():
    with pytest.raises(
        DataError, match=r"1 identities are both private and public: Bob; keep each on one side"
    ):
        make_split(fixed(names=("ann", "Bob", "cy"), public=("bOB", "eve")), seed=0)
    with pytest.raises(DataError, match="1 identities are both private and public"):
        make_split(
            fixed(names=("Zoe\u0301", "bob", "cy"), public=("zo\u00e9", "eve")), seed=0
        )  # accent as a letter of its own


def test_names_that_differ_in_case_only_are_refused():
    with pytest.raises(
        DataError,
        match=r"2 private identities have names that differ at most in case: ann, Ann; merge",
    ):
        make_split(fixed(names=("ann", "bob", "Ann")), seed=0)


def test_the_same_image_private_and_public():
    data = fixed()
    private = with_image(data.private, 12, data.public.pixels[7])
    with pytest.raises(
        DataError,
        match=r"^1 images are both private and public: \w+ bob/12\.png = public eve/7\.png[^=]*$",
    ):
        make_split(replace(data, private=private), seed=0)


@pytest.mark.parametrize("side", ["private", "public"])
def test_the_same_image_under_two_names(side):
    data = fixed()
    table = getattr(data, side)
    table = with_image(table, 0, table.pixels[-1])
    with pytest.raises(
        DataError,
        match=r"^1 images appear under two names: \w+ \w+/\d+\.png = \w+ \w+/\d+\.png; keep each",
    ):
        make_split(replace(data, **{side: table}), seed=0)


def test_an_image_in_train_and_test():
    split = make_split(fixed(), seed=0)
    copied = replace(split, test=with_image(split.test, 0, split.train.pixels[0]))
    with pytest.raises(
        DataError,
        match=r"^1 images are in two private parts: train ann/\d+\.png = test ann/\d+\.png; keep",
    ):
        check_split(copied)


def test_near_copies_between_private_and_public():
    data = fixed()
    stream = io.BytesIO()
    original = Image.fromarray(data.private.pixels[11].permute(1, 2, 0).numpy())
    original.resize((64, 64), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=75)
    copy = torch.from_numpy(
        np.array(Image.open(stream).resize((16, 16), Image.Resampling.BILINEAR))
    ).permute(2, 0, 1)
    assert not torch.equal(copy, data.private.pixels[11])
    public = with_image(data.public, 3, copy)
    with pytest.raises(
        DataError,
        match=r"^1 private images are nearly the same .*: \w+ bob/11\.png = public dee/3\.png",
    ):
        make_split(replace(data, public=public), seed=0)
    mirrored = with_image(data.public, 3, copy.flip(-1))
    with pytest.raises(DataError, match=r"^1 private images are nearly .*: \w+ bob/11\.png = "):
        make_split(replace(data, public=mirrored), seed=0)
    # Within the private side near copies are allowed: two photos of one moment are.
    private = with_image(data.private, 12, copy)
    make_split(replace(data, private=private), seed=0)


def test_one_error_lists_all_problems_and_cuts_long_lists():
    data = fixed(public=("ann", "eve"))
    private = data.private
    for row in range(10, 17):
        private = with_image(private, row, data.public.pixels[row - 10])
    private = with_image(private, 0, private.pixels[25])
    with pytest.raises(DataError) as caught:
        make_split(replace(data, private=private), seed=0)
    message = str(caught.value)
    assert "1 identities are both private and public: ann" in message
    assert "7 images are both private and public" in message
    assert message.count(" = public ") == 5
    assert "and 2 more" in message
    assert "1 images appear under two names" in message
    assert "nearly the same" not in message
    assert "\n" not in message


def test_public_images_without_identities():
    data = fixed()
    unnamed = replace(data.public, names=(), labels=torch.full((12,), -1))
    split = make_split(replace(data, public=with_image(unnamed, 0, unnamed.pixels[11])), seed=0)
    assert split.public.labels.unique().tolist() == [-1]
    assert split.manifest["repeats_dropped"]["public"] == 1
    assert split.manifest["public_people"] == "unknown"
    assert "public_people" not in make_split(data, seed=0).manifest
    with pytest.raises(DataError, match="public labels without a name: -1; 2 identities are named"):
        make_split(replace(data, public=replace(unnamed, names=("dee", "eve"))), seed=0)


def test_tables_that_break_the_contract_are_refused():
    data = fixed()
    with pytest.raises(DataError, match="private labels without a name: 2; 2 identities are named"):
        make_split(replace(data, private=replace(data.private, names=("ann", "bob"))), seed=0)
    with pytest.raises(DataError, match="private identities: 0; a classifier needs at least 2"):
        make_split(
            replace(data, private=replace(data.private, names=(), labels=torch.full((33,), -1))),
            seed=0,
        )
    with pytest.raises(DataError, match="no public images: an attacker's prior is trained on them"):
        make_split(replace(data, public=data.public.at(torch.tensor([], dtype=torch.long))), seed=0)
    with pytest.raises(DataError, match="the tables hold images of different shapes"):
        make_split(
            replace(data, public=replace(data.public, pixels=data.public.pixels[:, :1])), seed=0
        )


def test_parts_that_do_not_fit_together_are_refused():
    split = make_split(fixed(), seed=0)
    with pytest.raises(DataError, match="train, validation and test name different identities"):
        check_split(replace(split, test=replace(split.test, names=("ann", "cy", "bob"))))
    with pytest.raises(
        DataError, match="test has no image of ann: every private identity needs one in each part"
    ):
        check_split(
            replace(split, test=split.test.at((split.test.labels != 0).nonzero().flatten()))
        )


# a folder of files, from disk to split


def test_folder_to_split(tmp_path):
    def save(name, seed, size=40):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path)

    for person in range(3):
        for number in range(4):
            save(f"private/p{person}/{number}.png", 10 * person + number, size=30 + number)
            save(f"public/q{person}/{number}.png", 100 + 10 * person + number)
    data = Folder(private=tmp_path / "private", public=tmp_path / "public", size=16)
    split = make_split(data, seed=0)
    assert [len(getattr(split, part)) for part in PARTS] == [6, 3, 3, 12]

    save("public/q1/copy.jpg", 12, size=200)  # private p1/2 again, larger and re-encoded
    with pytest.raises(
        DataError,
        match=r"1 private images are nearly the same as .*: \w+ p1/2\.png = public q1/copy\.jpg",
    ):
        make_split(data, seed=0)
    (tmp_path / "public/q1/copy.jpg").unlink()

    save("private/single/0.png", 500)
    with pytest.raises(
        DataError,
        match=r"1 private identities have fewer than 3 different images, .*: single \(1\)",
    ):
        make_split(data, seed=0)
