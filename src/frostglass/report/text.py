"""Numbers, settings and lists as the page writes them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

Kind = Literal[
    "percent", "rate", "points", "gain", "count", "seconds", "ratio", "decimal", "change", "plain"
]
NARROW = "\u202f"  # a narrow space that does not break
JOINER = "\u2060"  # forbids a line break


class Interval(Protocol):
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def number(value: float | None, kind: Kind = "plain") -> str:
    """Format a value; every number of a report goes through here."""
    if value is None:
        return "–"
    if kind == "rate" and value < 0.1:  # may be far below 1 %
        text = f"{100 * value:.2g}{NARROW}%"
    elif kind in ("percent", "rate"):
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
    """Format with at most one decimal, and no minus before a zero."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


def p_value_text(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{_trimmed(seconds / length)}{NARROW}{unit}"
    return f"{_trimmed(seconds)}{NARROW}s"


def span(score: Interval, kind: Kind = "percent") -> str:
    """Format an interval on one line: "88.4–100 %", or "0.38 to 0.52" where it may be negative."""
    if kind == "percent":
        return f"{number(score.low, 'points')}–{JOINER}{number(score.high, 'percent')}"
    return f"{number(score.low, kind)} to {number(score.high, kind)}".replace(" ", "\u00a0")


def listed(words: Sequence[str]) -> str:
    """Join words to one phrase: "a, b and c"."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def spoken(label: str) -> str:
    """Format a label for a sentence: "CALoR · rank=3 · a=1" becomes "CALoR (rank=3, a=1)"."""
    name, *details = label.split(" · ")
    return f"{name} ({', '.join(details)})" if details else name


def toml(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Format settings as a TOML file that `frostglass run` reads."""
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
        # run.json holds infinite settings as text; see `load.read_run`.
        infinite = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return infinite.get(value) or quoted
    if isinstance(value, Mapping):
        items = {key: item for key, item in value.items() if item is not None}
        pairs = [f"{_key(key)} = {_value(item, inline=True)}" for key, item in items.items()]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        entries = [_value(item, inline=True) for item in value]
        if not inline and any(isinstance(item, Mapping | list) for item in value):
            return "[\n" + "".join(f"  {entry},\n" for entry in entries) + "]"
        return f"[{', '.join(entries)}]"
    return repr(value)


def slug(name: str) -> str:
    """Make a file name of a run's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
