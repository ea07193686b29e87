"""Names for what a report compares: titles of methods, and settings that tell equal names apart."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from frostglass.auditing.expand import CONTROL, GIVEN, UNDEFENDED
from frostglass.core.registry import Registry
from frostglass.core.types import GIVEN_IMAGES, HELD_OUT_IMAGES

SELF_EXPLANATORY = ("case", "title")  # settings whose value needs no name before it


def known(registry: Registry, method: Mapping[str, Any]) -> Any | None:
    """Return the class of a method, or None if it is not part of this installation.

    A path `package.module:Class` is never imported: a report must not run code that a file names.
    """
    name = str(method.get("name"))
    return registry.get(name) if name in registry.names() else None


def titled(registry: Registry, method: Mapping[str, Any]) -> str:
    """Return the display title of a method; its name if it is not installed."""
    return getattr(known(registry, method), "title", "") or str(method.get("name"))


def model_name(defenses: Sequence[str], *, given: bool, control: bool = False) -> str:
    """Name a model as every table and sentence does: by its defenses, or by where it comes from.

    `defenses` are titles. A given model was read from a file; `control` is the undefended model
    that an audit trains to show that its attack works.
    """
    if control:
        return CONTROL
    return " + ".join(defenses) or (GIVEN if given else UNDEFENDED)


def accuracy_images(*, given: bool) -> str:
    """Name the images of a model's accuracy: a given model may have been trained on them."""
    return GIVEN_IMAGES if given else HELD_OUT_IMAGES


def distinct(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Make names unique: append the first setting in which equal ones differ, then the next."""
    labels, settings = list(names), [_flat(values) for values in facts]
    while repeated := [label for label, times in Counter(labels).items() if times > 1]:
        for label in repeated:
            members = [place for place, other in enumerate(labels) if other == label]
            keys = dict.fromkeys(key for place in members for key in settings[place])
            key = next((key for key in keys if _differs(settings, members, key)), None)
            for count, place in enumerate(members, 1):
                if key is None:
                    labels[place] += f" · {count}"
                    continue
                prefix = "" if key in SELF_EXPLANATORY else f"{key.rsplit('.', 1)[-1]}="
                labels[place] += f" · {prefix}{_short(settings[place].get(key))}"
    return labels


def _differs(settings: Sequence[Mapping[str, Any]], members: Iterable[int], key: str) -> bool:
    """Whether a setting tells members apart as it is written: none and [] look alike."""
    return len({_short(settings[place].get(key)) for place in members}) > 1


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted paths; a list of plain values is one value."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = enumerate(value)
    else:
        return {path: value}
    inner = [_flat(item, f"{path}.{key}" if path else str(key)) for key, item in items]
    return {key: item for part in inner for key, item in part.items()}


def _short(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
