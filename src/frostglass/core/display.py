"""Short displays for notebooks: image grids and small HTML tables."""

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image
from torch import Tensor

MAX_ROWS = 8  # rows of a grid shown in a notebook


def image_grid(images: Tensor, columns: int | None = None) -> Image.Image:
    """Tile images (N, C, H, W) in [0, 1] row by row; by default into a square."""
    count, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = images.new_zeros(rows * columns, channels, height, width)
    canvas[:count] = images.detach().clamp(0, 1)
    tiled = canvas.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2)
    pixels = tiled.reshape(rows * height, columns * width, channels)
    return Image.fromarray(pixels.mul(255).round().byte().cpu().numpy().squeeze())


def image_tag(image: Image.Image, scale: int = 2, alt: str = "reconstructions") -> str:
    """Return an <img> element with the image's pixels inside; `alt` says what it shows."""
    data = io.BytesIO()
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(
        data, format="PNG"
    )
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{alt}" src="data:image/png;base64,{encoded}">'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table of escaped values."""

    def line(cells: Iterable[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
