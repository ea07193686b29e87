"""The pages of a study as text, and the files that they load."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

MEDIA_TYPES = {
    "study.css": "text/css",
    "study.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
LETTERS = "ABCD"


@dataclass(frozen=True)
class Asset:
    """A file that pages load."""

    content: bytes
    media_type: str


@cache
def asset(name: str) -> Asset | None:
    """Return a file that pages load, by its exact name; None for any other name."""
    if name not in MEDIA_TYPES:
        return None
    content = resources.files("frostglass.study").joinpath("pages", name).read_bytes()
    return Asset(content, MEDIA_TYPES[name])


def page(template: str, **values: Any) -> str:
    """Return a page as HTML."""
    return _environment().get_template(template).render(letters=LETTERS, **values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("frostglass.study", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
