"""Images as PNG and scores as marks on a scale; equal input gives equal bytes."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from frostglass.report.text import Interval, number

THUMBNAIL = 64  # pixels a side of an image in a table
LARGE = 128  # pixels a side of an image shown large
REDACTED = 3  # pixels a side that are left of a redacted image
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)

# One shape for each evaluator, full and hollow, so that colour alone says nothing.
SHAPES = (("●", "○"), ("◆", "◇"), ("▲", "△"), ("■", "□"))
PATHS = (
    "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0z",
    "M0-7L7 0L0 7L-7 0z",
    "M0-6.5L6.5 5L-6.5 5z",
    "M-5-5H5V5H-5z",
)


class Score(Interval, Protocol):
    value: float


@dataclass(frozen=True)
class Mark:
    """One line of a chart: a share with its interval, and that of the prior-only baseline.

    `evaluator` counts from 0; a hollow mark is top-1, which is not recognition.
    """

    name: str
    evaluator: int
    score: Score
    baseline: float | None
    hollow: bool = False


def shape(evaluator: int, accepted: bool = True) -> Markup:
    """Return the coloured symbol of an evaluator, counted from 0; hollow if it does not accept."""
    place = evaluator % len(SHAPES)
    return Markup(f'<span class="j{place + 1}">{SHAPES[place][not accepted]}</span>')


def track(marks: Sequence[Mark]) -> Markup:
    """Draw the scores of one audit on a scale from 0 to 100 %, one line for each mark.

    Positions are percentages and sizes are pixels, so the drawing fits a phone and its text keeps
    its size; colours come from the page's style.
    """
    height = 24 * len(marks)
    parts = [
        f'<svg class="track" height="{height}" role="img"><title>{_described(marks)}</title>',
        _rules(height),
    ]
    for place, mark in enumerate(marks):
        y, kind, score = 24 * place + 12, mark.evaluator % len(PATHS), mark.score
        # Beside the interval, on the side where there is room.
        side = ("end", _x(score.low), -9) if score.high > 0.8 else ("start", _x(score.high), 9)
        if mark.baseline is not None:
            x = _x(mark.baseline)
            parts.append(f'<line class="guess" x1="{x}" x2="{x}" y1="{y - 8}" y2="{y + 8}"/>')
        parts.append(
            f'<g class="evaluator j{kind + 1}{" hollow" if mark.hollow else ""}">'
            f'<line class="reach" x1="{_x(score.low)}" x2="{_x(score.high)}" y1="{y}" y2="{y}"/>'
            f'<svg x="{_x(score.value)}" y="{y}" overflow="visible">'
            f'<path d="{PATHS[kind]}"/></svg>'
            f'<text x="{side[1]}" y="{y + 4}" dx="{side[2]}" text-anchor="{side[0]}">'
            f"{'top-1 ' if mark.hollow else ''}{number(score.value, 'percent')}</text></g>"
        )
    return Markup("".join([*parts, "</svg>"]))


def scale() -> Markup:
    """Draw the axis under the tracks."""
    anchors = {0.0: "start", 1.0: "end"}
    names = "".join(
        f'<text x="{_x(at)}" y="16" text-anchor="{anchors.get(at, "middle")}">'
        f"{number(at, 'percent')}</text>"
        for at in TICKS
    )
    return Markup(
        f'<svg class="track axis" height="22" aria-hidden="true">{_rules(5)}{names}</svg>'
    )


def _x(share: float) -> str:
    return f"{1 + 98 * min(max(share, 0.0), 1.0):.2f}%"


def _rules(height: int) -> str:
    return "".join(
        f'<line class="rule" x1="{_x(at)}" x2="{_x(at)}" y1="0" y2="{height}"/>' for at in TICKS
    )


def _described(marks: Sequence[Mark]) -> str:
    """Describe the marks for screen readers."""

    def percent(value: float) -> str:
        return number(value, "percent")

    return "; ".join(
        f"{m.name}: {percent(m.score.value)}, interval {percent(m.score.low)} to "
        f"{percent(m.score.high)}"
        + ("" if m.baseline is None else f", prior only {percent(m.baseline)}")
        for m in marks
    )


def redacted(pixels: Tensor) -> Tensor:
    """Reduce images (..., C, H, W) to a few averages each: colours stay, faces do not."""
    flat = F.adaptive_avg_pool2d(pixels.flatten(0, -4).float(), REDACTED)
    return flat.round().to(pixels.dtype).unflatten(0, pixels.shape[:-3])


def data_uri(pixels: Tensor, most: int = THUMBNAIL) -> str:
    """Encode one image, uint8 (C, H, W), as a data URI with at most so many pixels a side."""
    return "data:image/png;base64," + base64.b64encode(png(pixels, most)).decode()


def png(pixels: Tensor, most: int) -> bytes:
    """Encode one image, uint8 (C, H, W), as a PNG file with at most so many pixels a side."""
    array = pixels.numpy()
    image = Image.fromarray(
        array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0))
    )
    if max(image.size) > most:
        image.thumbnail((most, most), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()
