"""What a report shows, and how: numbers and settings as text, scores as marks on a scale, pictures as PNG. Equal input gives equal bytes."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image
from torch import Tensor

Kind = Literal[
    "percent", "points", "gain", "count", "seconds", "ratio", "decimal", "change", "plain"
]
NARROW = "\u202f"  # a narrow space that does not break
JOINER = "\u2060"  # forbids a line break
LARGEST = 64  # pixels a side; a picture is shown no larger than a thumbnail
FROSTED = 3  # pixels a side that are left of a redacted picture

# One shape for each judge, full and hollow, so that nothing is told by colour alone.
SHAPES = (("●", "○"), ("◆", "◇"), ("▲", "△"), ("■", "□"))
PATHS = (
    "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0z",
    "M0-7L7 0L0 7L-7 0z",
    "M0-6.5L6.5 5L-6.5 5z",
    "M-5-5H5V5H-5z",
)


class Interval(Protocol):
    low: float
    high: float


def number(value: float | None, kind: Kind = "plain") -> str:
    """A value as the page writes it; every number of a report goes through here."""
    if value is None:
        return "–"
    if kind == "percent":
        text = f"{_trimmed(100 * value)}{NARROW}%"
    elif kind == "points":
        text = _trimmed(100 * value)
    elif kind == "gain":
        text = f"{'+' if value > 0 else ''}{_trimmed(100 * value)} points"
    elif kind == "count":
        text = f"{value:,.0f}".replace(",", NARROW)
    elif kind == "seconds":
        text = _duration(value)
    elif kind in ("decimal", "change"):
        text = f"{round(value, 2) + 0.0:{'+' if kind == 'change' and round(value, 2) else ''}.2f}"
    elif kind == "ratio":
        text = f"{value:.2f}{NARROW}×"
    else:
        text = str(value) if isinstance(value, int) else f"{value:.3g}"
    return text.replace("-", "−")


def _trimmed(value: float) -> str:
    """At most one decimal, and no minus before a zero."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{_trimmed(seconds / length)}{NARROW}{unit}"
    return f"{_trimmed(seconds)}{NARROW}s"


def span(score: Interval) -> str:
    """An interval of shares, "88.4–100 %", that stays on one line."""
    return f"{number(score.low, 'points')}–{JOINER}{number(score.high, 'percent')}"


def listed(words: Sequence[str]) -> str:
    """Words as one phrase: "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


@dataclass(frozen=True)
class Mark:
    """One line of a chart: a share with its interval, and the share that guessing reaches."""

    value: float
    low: float
    high: float
    guess: float | None


def track(marks: Sequence[Mark]) -> Markup:
    """The scores of one audit on a scale from 0 to 100 %, one line for each judge.

    Places are percentages and sizes pixels, so the drawing fits a phone and its text keeps its size; colours are the page's.
    """
    height = 24 * len(marks)
    parts = [
        f'<svg class="track" height="{height}" role="img"><title>{_spoken(marks)}</title>',
        _lines(height),
    ]
    for judge, mark in enumerate(marks):
        y, path = 24 * judge + 12, PATHS[judge % len(PATHS)]
        # Beside the interval, on the side where there is room.
        side = ("end", _x(mark.low), -9) if mark.high > 0.8 else ("start", _x(mark.high), 9)
        if mark.guess is not None:
            parts.append(
                f'<line class="guess" x1="{_x(mark.guess)}" x2="{_x(mark.guess)}" y1="{y - 8}" y2="{y + 8}"/>'
            )
        parts.append(
            f'<g class="judge j{judge % len(PATHS) + 1}"><line class="reach" x1="{_x(mark.low)}" x2="{_x(mark.high)}" y1="{y}" y2="{y}"/>'
            f'<svg x="{_x(mark.value)}" y="{y}" overflow="visible"><path d="{path}"/></svg>'
            f'<text x="{side[1]}" y="{y + 4}" dx="{side[2]}" text-anchor="{side[0]}">{number(mark.value, "percent")}</text></g>'
        )
    return Markup("".join([*parts, "</svg>"]))


def scale() -> Markup:
    """The axis under the tracks."""
    names = "".join(
        f'<text x="{_x(at)}" y="16" text-anchor="{"start" if at == 0 else "end" if at == 1 else "middle"}">{number(at, "percent")}</text>'
        for at in (0, 0.25, 0.5, 0.75, 1)
    )
    return Markup(
        f'<svg class="track axis" height="22" aria-hidden="true">{_lines(5)}{names}</svg>'
    )


def _x(share: float) -> str:
    return f"{1 + 98 * min(max(share, 0.0), 1.0):.2f}%"


def _lines(height: int) -> str:
    return "".join(
        f'<line class="rule" x1="{_x(at)}" x2="{_x(at)}" y1="0" y2="{height}"/>'
        for at in (0, 0.25, 0.5, 0.75, 1)
    )


def _spoken(marks: Sequence[Mark]) -> str:
    return "; ".join(
        f"judge {judge}: {number(m.value, 'percent')}, interval {number(m.low, 'percent')} to {number(m.high, 'percent')}"
        + ("" if m.guess is None else f", guessing {number(m.guess, 'percent')}")
        for judge, m in enumerate(marks, 1)
    )


def frosted(pixels: Tensor) -> Tensor:
    """Pictures (..., C, H, W) reduced to a few averages each: colours stay, faces do not."""
    flat = F.adaptive_avg_pool2d(pixels.flatten(0, -4).float(), FROSTED)
    return flat.round().to(pixels.dtype).unflatten(0, pixels.shape[:-3])


def picture(pixels: Tensor) -> str:
    """One picture, uint8 (C, H, W), as a data URI; large ones are reduced to thumbnails."""
    array = pixels.numpy()
    image = Image.fromarray(
        array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0))
    )
    if max(image.size) > LARGEST:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def toml(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Settings as a TOML file that `frostglass run` reads."""
    plain = {
        key: value
        for key, value in values.items()
        if not isinstance(value, Mapping) and value is not None
    }
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"[{'.'.join(map(_key, path))}]"] if path and (plain or not tables) else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    blocks = ["\n".join(lines)] if lines else []
    return "\n\n".join([*blocks, *(toml(table, (*path, key)) for key, table in tables.items())])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any, *, inline: bool = False) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A run's JSON has no other words for these; see `read_run`.
        endless = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
        return endless.get(value) or json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item, inline=True)}' for key, item in value.items() if item is not None)} }}"
    if isinstance(value, list):
        items = [_value(item, inline=True) for item in value]
        broken = not inline and any(isinstance(item, Mapping | list) for item in value)
        return (
            "[\n" + "".join(f"  {item},\n" for item in items) + "]"
            if broken
            else f"[{', '.join(items)}]"
        )
    return repr(value)


def slug(name: str) -> str:
    """A file name made of a run's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
