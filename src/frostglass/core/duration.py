"""Times as a user writes and reads them."""

import re

UNITS = {"h": 3600, "m": 60, "s": 1}
NAMES = {"h": "h", "m": "min", "s": "s"}
EXAMPLES = "such as 2h, 90m, 1h30m or 45s"


def parse_duration(text: str) -> float | None:
    """Return the seconds of a time such as 1h30m; None if the text is no time, or 0."""
    if not re.fullmatch(r"\s*(\d+(\.\d+)?\s*[hms]\s*)+", text):
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([hms])", text)
    return sum(float(number) * UNITS[unit] for number, unit in parts) or None


def in_words(seconds: float) -> str:
    """Return a time for a reader, such as 1 h 30 min."""
    words = []
    for unit, size in UNITS.items():
        count = seconds / size if unit == "s" else seconds // size
        if count:
            words.append(f"{count:.10g} {NAMES[unit]}")
        seconds -= count * size
    return " ".join(words)
