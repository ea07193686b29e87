from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frostglass.core.errors import DataError
from frostglass.core.pixels import content_hashes
from frostglass.data._images import (
    SUFFIXES,
    read_image,
    read_images,
    resized,
)

SIZE = 16


def read(path, *, size=SIZE, channels=3, crop="centre"):
    return read_image(Path(path), size=size, channels=channels, crop=crop)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_square_image_of_the_right_size_is_read_unchanged(tmp_path):
    values = noise(SIZE, SIZE)
    Image.fromarray(values).save(tmp_path / "a.png")
    pixels = read(tmp_path / "a.png")
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert torch.equal(pixels, torch.from_numpy(values).permute(2, 0, 1))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_suffix_is_read(tmp_path, suffix):
    image = Image.new("RGB", (20, 20), (200, 100, 50))
    path = tmp_path / f"a{suffix}"
    (image.convert("L") if suffix == ".pgm" else image).save(path)
    expected = torch.tensor([200, 100, 50] if suffix != ".pgm" else [124, 124, 124])
    error = (read(path).int() - expected[:, None, None]).abs().max()
    assert error <= (3 if suffix in {".jpg", ".jpeg", ".webp"} else 0)


def test_the_content_decides_the_format_and_not_the_name(tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.bmp")
    (tmp_path / "a.bmp").rename(tmp_path / "a.png")
    assert read(tmp_path / "a.png")[0].float().mean() == 255


def test_other_formats_are_not_decoded_under_an_image_s_name(tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.pcx")
    (tmp_path / "a.pcx").rename(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png \(not a PNG, JPEG"):
        read(tmp_path / "a.png")


def test_centre_crop_cuts_and_none_squeezes(tmp_path):
    values = np.zeros((SIZE, 3 * SIZE, 3), np.uint8)
    values[:, SIZE : 2 * SIZE] = 255
    Image.fromarray(values).save(tmp_path / "wide.png")
    assert read(tmp_path / "wide.png").min() == 255
    squeezed = read(tmp_path / "wide.png", crop="none")[0, 0]
    assert squeezed[0] == 0
    assert squeezed[SIZE // 2] == 255
    assert squeezed[-1] == 0
    Image.fromarray(values.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    assert read(tmp_path / "tall.png").min() == 255


def test_exif_orientation_turns_the_image_upright(tmp_path):
    upright = noise(SIZE, SIZE)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned 90 degrees clockwise
    Image.fromarray(np.rot90(upright).copy()).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(read(tmp_path / "a.png"), torch.from_numpy(upright).permute(2, 0, 1))


def test_grey_and_colour_become_one_another(tmp_path):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert torch.equal(read(tmp_path / "grey.png"), torch.from_numpy(grey).expand(3, 16, 16))
    Image.new("RGB", (16, 16), (255, 0, 0)).save(tmp_path / "red.png")
    red = read(tmp_path / "red.png", channels=1)
    assert red.shape == (1, 16, 16)
    assert (red == 76).all()  # 0.299 of 255


def test_transparent_parts_are_shown_on_white(tmp_path):
    image = Image.new("RGBA", (16, 16), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 8, 16))
    image.save(tmp_path / "rgba.png")
    pixels = read(tmp_path / "rgba.png")
    assert pixels[:, 8, 2].tolist() == [255, 255, 255]
    assert pixels[:, 8, 13].tolist() == [255, 0, 0]

    Image.new("LA", (16, 16), (0, 128)).save(tmp_path / "half.png")
    assert read(tmp_path / "half.png", channels=1).unique().tolist() == [127]

    indexed = Image.new("P", (16, 16), 1)
    indexed.putpalette([0, 0, 0, 0, 0, 255])
    indexed.paste(0, (0, 0, 8, 16))
    indexed.save(tmp_path / "plain.png")
    indexed.save(tmp_path / "holes.png", transparency=0)
    assert read(tmp_path / "plain.png")[:, 8, 2].tolist() == [0, 0, 0]
    assert read(tmp_path / "holes.png")[:, 8, 2].tolist() == [255, 255, 255]
    assert read(tmp_path / "holes.png")[:, 8, 13].tolist() == [0, 0, 255]


def ramp(kind):
    return (
        np.linspace(0, 1, 256).reshape(16, 16)
        if kind == "F"
        else np.linspace(0, 65535, 256).reshape(16, 16).round()
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a.png", ramp("I").astype(np.uint16)),
        ("a.tif", ramp("I").astype(np.uint16)),
        ("a.pgm", ramp("I").astype(np.uint16)),
        ("a.tif", ramp("I").astype(np.int32)),
        ("a.tif", ramp("F").astype(np.float32)),
    ],
    ids=["png16", "tif16", "pgm16", "tif32", "float"],
)
def test_wide_values_are_scaled_and_not_clipped(tmp_path, name, values):
    Image.fromarray(values).save(tmp_path / name)
    expected = torch.arange(256).view(16, 16)
    assert torch.equal(read(tmp_path / name, channels=1)[0].int(), expected.int())


def test_big_endian_16_bit(tmp_path):
    values = ramp("I").astype(">u2")
    (tmp_path / "a.pgm").write_bytes(b"P5 16 16 65535\n" + values.tobytes())
    assert torch.equal(
        read(tmp_path / "a.pgm", channels=1)[0].int(), torch.arange(256).view(16, 16).int()
    )


@pytest.mark.parametrize("bad", [-0.5, 200.0, float("nan")])
def test_float_values_out_of_range_are_refused(tmp_path, bad):
    values = ramp("F").astype(np.float32)
    values[3, 3] = bad
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif \(float values from .* expected 0 to 1\)"):
        read(tmp_path / "a.tif")


def test_32_bit_values_out_of_range_are_refused(tmp_path):
    Image.fromarray(np.full((16, 16), 70_000, np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="integer values from 70000 to 70000, expected 0 to 65535"):
        read(tmp_path / "a.tif")


def test_cmyk(tmp_path):
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif").float().mean((1, 2)).tolist() == [255, 0, 0]


def test_black_and_white(tmp_path):
    Image.new("1", (16, 16), 1).save(tmp_path / "a.png")
    assert (read(tmp_path / "a.png") == 255).all()


def test_first_frame_of_an_animation(tmp_path):
    first, second = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (16, 16), "blue")
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert read(tmp_path / "a.gif")[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".bmp", ".webp", ".tif", ".ppm"])
def test_truncated_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    Image.fromarray(noise(64, 64)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"a\{suffix} \(") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_empty_missing_tiny_and_text_files_are_refused(tmp_path):
    (tmp_path / "empty.png").touch()
    with pytest.raises(DataError, match=r"empty\.png \(empty, 0 bytes\)"):
        read(tmp_path / "empty.png")
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(DataError, match=r"text\.png \(not a PNG"):
        read(tmp_path / "text.png")
    with pytest.raises(DataError, match=r"gone\.png \(.*No such file"):
        read(tmp_path / "gone.png")
    Image.new("RGB", (100, 7)).save(tmp_path / "tiny.png")
    with pytest.raises(DataError, match=r"tiny\.png \(100 x 7, less than 8 pixels a side\)"):
        read(tmp_path / "tiny.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "least.png")
    assert read(tmp_path / "least.png").shape == (3, SIZE, SIZE)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
# Above our limit, above Pillow's warning, above Pillow's error.
@pytest.mark.parametrize("side", [8001, 10_000, 100_000])
def test_huge_images_are_refused_before_they_are_decoded(tmp_path, side):
    header = b"P5 %d %d 255\n" % (side, side)
    (tmp_path / "huge.pgm").write_bytes(header + bytes(100))
    with pytest.raises(DataError, match=r"huge\.pgm \(.*(more than 64 megapixels|exceeds limit)"):
        read(tmp_path / "huge.pgm")


def test_all_bad_files_are_named_in_one_error(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(10)]
    for path in paths:
        path.write_text("no")
    Image.new("RGB", (16, 16)).save(paths[0])
    with pytest.raises(
        DataError,
        match=r"^9 of 10 images cannot be used: .*1\.png \(.*5\.png \(.* and 4 more\. Repair",
    ) as caught:
        read_images(paths, size=SIZE, channels=3, crop="centre")
    assert "6.png" not in str(caught.value)


def test_many_files_keep_their_order(tmp_path):
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number}.png")
        Image.new("L", (8 + number, 16), number).save(paths[-1])
    pixels = read_images(paths, size=SIZE, channels=1, crop="centre")
    assert pixels.shape == (40, 1, SIZE, SIZE)
    assert pixels[:, 0, 0, 0].tolist() == list(range(40))


def test_resized_keeps_range_and_mean():
    pixels = torch.from_numpy(noise(64, 64)).permute(2, 0, 1)[None]
    half = resized(pixels, 32)
    assert half.shape == (1, 3, 32, 32)
    assert half.dtype == torch.uint8
    assert (half.float().mean() - pixels.float().mean()).abs() < 1
    assert half.float().std() < 0.7 * pixels.float().std()  # averaged, not picked
    assert resized(torch.full((1, 1, 8, 8), 255, dtype=torch.uint8), 30).unique().tolist() == [255]
    assert resized(pixels, 64) is pixels


def test_content_hashes_differ_with_pixels():
    pixels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    pixels[2, 0, 7, 7] = 1
    first, second, third = hashes = content_hashes(pixels).tolist()
    assert first == second
    assert first != third
    assert content_hashes(pixels.flip(0)).tolist() == [third, second, first]
    assert content_hashes(pixels.transpose(2, 3)).tolist() == hashes  # not contiguous
