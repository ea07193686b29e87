"""Model cards: what a model is, what its audits measured, and what that does not say."""

from collections.abc import Mapping, Sequence

from frostglass.attacks.base import Surface
from frostglass.models.checkpoint import DESCRIPTION, WEIGHTS

MEASURED = """\
- It is measured, not proven: the figures hold for the attacks in the table, with their prior and
  budget. Another attack, a better generator or more time can find more."""
MEANS = """\
- The figures are means over people. Some people are more exposed than others; the report names
  them.
- Training again, with other people or settings, gives another model: measure it again."""
LIMITS: Mapping[Surface, str] = {
    "model": f"""\
{MEASURED}
- The people are still in the weights. A defense makes them harder to reconstruct; it does not
  remove them.
- An attacker with several guesses, or who knows something about a person (hair, age, a name),
  recovers more than the first guess says; "any guess" counts every candidate of an attack.
- Nothing is said about other leaks: who was in the training set (membership), attributes, or copies
  of training images found by other means.
{MEANS}""",
    "features": f"""\
{MEASURED}
- Who it is may be read from a feature without an image: an attack that maps features to identities
  is not in the table unless it was given.
- Attributes are not protected: the server is meant to read them, and others may be read as well.
- An attacker who gets several releases of one image can average them. Release the feature of an
  image once, or always the same one.
- Utility is that of the attacked people's held-out images; other images may be answered worse.
{MEANS}""",
}
NAMES, NUMBERS = "it names the private people", "people are numbered"
FILES: Mapping[Surface, str] = {
    "model": f"""\
`{WEIGHTS}` holds the weights; `{DESCRIPTION}` the architecture, the recipe, and the classes in \
the order of the outputs: {NAMES}.

```python
from frostglass.models.checkpoint import load_target
from frostglass.training.build import rebuild_network

target = load_target("model", rebuild_network)  # this folder
scores = target.module(images)  # (N, channels, height, width), in [0, 1]
```
""",
    "features": """\
`client` holds the device's half with its protection, `server` the other half: the layers each of \
them runs, and how to build them. `frostglass release client PHOTOS --out features.safetensors` \
protects a folder of images.

```python
import frostglass as fg

client, server = fg.Client.load("client"), fg.Server.load("server")  # in this folder
features = client.protect(images)  # what may leave the device; images (N, channels, height, width)
logits = server.answer(features)
```
""",
}


def document(
    opening: Sequence[str], measured: Sequence[str], surface: Surface, *, named: bool = True
) -> str:
    """Return a card as Markdown: an opening, what was measured, its limits, and the files.

    Args:
        named: whether the classes of the model are the names of people.
    """
    lines = [
        *opening,
        "",
        *measured,
        "",
        "## What it does not protect against",
        "",
        LIMITS[surface],
        "",
        "## Files",
        "",
        FILES[surface] if named else FILES[surface].replace(NAMES, NUMBERS),
    ]
    return "\n".join(lines)
