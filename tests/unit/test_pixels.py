"""Pixels that are read where they are indexed: views, tables in memory and in files."""

import os
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frostglass.core.pixels import PixelSource, chunks, content_hashes, joined, view
from frostglass.core.types import Images
from frostglass.data import _gather
from frostglass.data._gather import UnreadableImages, gathered, write_table
from frostglass.data._images import ImageFiles, read_image
from frostglass.data._splits import load_split, make_split, save_split
from tables import fixed

FIRST = torch.arange(5 * 12, dtype=torch.uint8).reshape(5, 3, 2, 2)
SECOND = FIRST[:3] + 100


class Counting(PixelSource):
    """Pixels that note which rows are read."""

    def __init__(self, pixels):
        self.pixels, self.seen = pixels, []

    @property
    def shape(self):
        return tuple(self.pixels.shape)

    def read(self, rows):
        self.seen += rows.tolist()
        return self.pixels[rows]


def test_a_view_reads_what_is_indexed_and_nothing_else():
    source = Counting(FIRST)
    some = view(view(source, torch.tensor([4, 2, 0])), torch.tensor([2, 1]))
    assert (some.shape, len(some), source.seen) == ((2, 3, 2, 2), 2, [])
    assert torch.equal(some[torch.tensor([1])], FIRST[[2]])
    assert source.seen == [2]
    assert torch.equal(some[:], FIRST[[0, 2]])
    assert torch.equal(some[0], FIRST[0])
    twice = some[torch.tensor([[1, 0], [1, 1]])]
    assert torch.equal(twice.flatten(0, 1), FIRST[[2, 0, 2, 2]])
    assert torch.equal(some[torch.tensor([False, True])], FIRST[[2]])
    with pytest.raises(IndexError):
        some[2]


def test_rows_of_many_images_are_read_without_numbering_all(monkeypatch):
    some, row = view(gathered([FIRST]), torch.tensor([3, 1])), torch.tensor([1])
    monkeypatch.setattr(torch, "arange", None)
    assert torch.equal(some[row], FIRST[[1]])


def test_joined_views_of_one_source_share_it():
    source, other = Counting(FIRST), Counting(SECOND)
    parts = [view(source, torch.tensor([3, 1])), other, view(source, torch.tensor([0]))]
    both = joined(parts)
    expected = torch.cat([FIRST[[3, 1]], SECOND, FIRST[:1]])
    assert [each is known for each, known in zip(both.sources, (source, other), strict=True)]
    assert torch.equal(both[:], expected)
    assert torch.equal(joined([both, both])[4:8], torch.cat([expected, expected])[4:8])
    order = torch.tensor([5, 0, 3])
    assert torch.equal(view(both, order)[:], expected[order])


def test_subsets_and_concatenations_of_images_copy_nothing():
    source = Counting(FIRST)
    images = Images(source, torch.tensor([0, 0, 1, 1, 2]), ("a", "b", "c"), tuple("vwxyz"))
    some = images.of_people(torch.tensor([2, 0]))
    twice = some.joined(images.at(torch.tensor([1])))
    assert source.seen == []
    assert twice.sources == ("v", "w", "z", "w")
    assert torch.equal(twice.floats(torch.tensor([2])), FIRST[[4]] / 255)
    assert source.seen == [4]


def test_meta_pixels_stay_meta():
    blank = torch.empty(4, 3, 2, 2, dtype=torch.uint8, device="meta")
    both = joined([view(blank, torch.tensor([1, 2])), FIRST])
    assert both.is_meta
    assert both[torch.tensor([0, 6, 6])].is_meta
    assert tuple(both[torch.tensor([0, 6, 6])].shape) == (3, 3, 2, 2)


def test_hashes_are_those_of_the_content_wherever_it_is(tmp_path):
    expected = content_hashes(FIRST)
    table = gathered([FIRST, SECOND], tmp_path / "file")
    assert torch.equal(table.hashes, torch.cat([expected, content_hashes(SECOND)]))
    mixed = joined([SECOND, view(table, torch.tensor([4, 0]))])
    assert torch.equal(content_hashes(mixed)[3:], expected[[4, 0]])
    assert len(content_hashes(FIRST[:0])) == 0


def test_chunks_cover_all_images_within_a_size():
    parts = list(chunks(10, (3, 4, 4), 48 * 4))
    assert parts == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert list(chunks(2, (3, 4, 4), 1)) == [slice(0, 1), slice(1, 2)]


def test_a_gathered_file_is_mapped_and_closed_to_others(tmp_path):
    tmp_path.chmod(0o700)
    file = tmp_path / "pixels"
    file.write_text("left by a process that was killed")
    table = gathered([FIRST, view(SECOND, torch.tensor([2, 0]))], file)
    assert torch.equal(table[:], torch.cat([FIRST, SECOND[[2, 0]]]))
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(file.resolve()) in Path("/proc/self/maps").read_text()
    again = tmp_path / "again"
    assert gathered([FIRST, SECOND[[2, 0]]], again).path == again
    assert again.read_bytes() == file.read_bytes()
    file.unlink()
    assert torch.equal(table[4], FIRST[4])


def test_a_table_is_linked_not_copied(tmp_path, monkeypatch):
    table = gathered([FIRST], tmp_path / "first")
    write_table(table, tmp_path / "linked")
    assert os.path.samefile(tmp_path / "first", tmp_path / "linked")

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    write_table(table, tmp_path / "copied")
    assert not os.path.samefile(tmp_path / "first", tmp_path / "copied")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "copied").read_bytes()


def test_files_are_decoded_once_each_and_bad_ones_named_together(tmp_path, monkeypatch):
    paths = []
    for number in range(9):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(np.full((20, 20, 3), number, np.uint8)).save(paths[-1])
    decoded = []

    def spy(path, **values):
        decoded.append(path)
        return read_image(path, **values)

    monkeypatch.setattr("frostglass.data._images.read_image", spy)
    files = ImageFiles(paths, 16, 3, "centre")
    table = gathered([files, view(files, torch.tensor([8]))], tmp_path / "pixels")
    assert sorted(decoded) == sorted([*paths, paths[8]])
    assert table[:][:, 0, 0, 0].tolist() == [*range(9), 8]
    for number in (1, 7):
        paths[number].write_text("damaged")
    with pytest.raises(UnreadableImages, match=r"^2 of 9 images .*1\.png .*7\.png ") as caught:
        gathered([view(files, torch.arange(4)), view(files, torch.arange(4, 9))])
    assert len(caught.value.unreadable) == 2


def test_a_split_in_a_file_is_the_split_in_memory(tmp_path):
    data = fixed(attributes=True)
    held, in_file = make_split(data, seed=0), make_split(data, seed=0, file=tmp_path / "work")
    assert held.manifest == in_file.manifest
    for name, split in (("held", held), ("file", in_file)):
        (tmp_path / name).mkdir()
        save_split(split, tmp_path / name)
    for path in (tmp_path / "held").iterdir():
        assert path.read_bytes() == (tmp_path / "file" / path.name).read_bytes()
    assert os.path.samefile(tmp_path / "work", tmp_path / "file" / "pixels.safetensors")
    loaded = load_split(tmp_path / "file")
    tables = {id(part.pixels.sources[0]) for part in (loaded.train, loaded.test, loaded.public)}
    assert len(tables) == 1


def test_another_process_maps_the_file_and_gets_no_copy_of_the_pixels(tmp_path):
    """torch sends tensors to other processes by moving them to shared memory."""
    split = make_split(fixed(), seed=0, file=tmp_path / "pixels")
    (table,) = split.train.pixels.sources
    sent = ForkingPickler.dumps((split.train, split.public))
    assert not table.tensor.is_shared()
    train, public = ForkingPickler.loads(sent)
    assert train.pixels.sources[0] is public.pixels.sources[0]
    assert train.pixels.sources[0].path == tmp_path / "pixels"
    assert torch.equal(train.floats(), split.train.floats())
    held = make_split(fixed(), seed=0)
    ForkingPickler.dumps(held.train)
    assert held.train.pixels.sources[0].tensor.is_shared(), "this is how a copy is noticed"


def test_threads_do_not_change_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(_gather, "chunks", lambda count, shape: chunks(count, shape, 1))
    pixels = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8)
    contents = []
    for threads in (1, 8):
        monkeypatch.setattr(_gather, "THREADS", threads)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        gathered([pixels], tmp_path / str(threads))
        contents.append((tmp_path / str(threads)).read_bytes())
    assert contents[0] == contents[1]
