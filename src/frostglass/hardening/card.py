"""The model card: what the recommended model is, what it leaks, and what it does not prevent."""

from collections.abc import Mapping
from dataclasses import dataclass

from frostglass.attacks.base import Surface
from frostglass.core.types import Target
from frostglass.hardening.final import EVERYBODY, OTHER_HALF, Finalist, Model
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import described
from frostglass.models.checkpoint import DESCRIPTION, WEIGHTS
from frostglass.report.seeds import Share

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
- The people are still in the weights. The defense makes them harder to reconstruct; it does not
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
HEADINGS: Mapping[Surface, str] = {
    "model": "accuracy | verified, first guess | verified, any guess",
    "features": "{utility} | verified | similarity",
}
FILES: Mapping[Surface, str] = {
    "model": f"""\
`{WEIGHTS}` holds the weights; `{DESCRIPTION}` the architecture, the recipe, and the classes in \
the order of the outputs: it names the private people.

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


@dataclass(frozen=True)
class CardFacts:
    """What a card says of the recommended model, beside its own files."""

    name: str
    goal: Goal
    finalist: Finalist
    target: Target
    models: dict[str, tuple[Model, Model]]  # by population: undefended, recommended
    seeds: int
    evaluator: str
    rate: str
    remark: str


def card(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    goal = facts.goal
    headings = HEADINGS[goal.surface].format(utility=goal.title)
    lines = [
        *_opening(facts),
        "",
        f"## {goal.key.capitalize()} and leak",
        "",
        f"{_utility(facts)} The table has means over {facts.seeds} "
        f"seed{'s' if facts.seeds > 1 else ''}, this model being the first, with 95 % intervals "
        f"over people and seeds ({goal.title}: range over seeds). Verified: {facts.evaluator} "
        "takes the reconstruction for the person at a false-accept rate of "
        f"{facts.rate}, under the strongest of {len(_attacks(facts))} attacks.{_similarity(goal)}",
        "",
        f"| models of | model | {headings} | attack |",
        "|---|---|---|---|---|---|",
        *(
            _line(population, model)
            for population in facts.models
            for model in facts.models[population]
        ),
        "",
        f"The {OTHER_HALF} of the people had no part in choosing the settings, which were tuned on "
        f"models of the first half with other evaluators and seeds. This model is of {EVERYBODY}. "
        f"Attacks: {'; '.join(_attacks(facts))}.",
        *(["", facts.remark] if facts.remark else []),
        "",
        "## What it does not protect against",
        "",
        LIMITS[goal.surface],
        "",
        "## Files",
        "",
        FILES[goal.surface],
    ]
    return "\n".join(lines)


def _opening(facts: CardFacts) -> list[str]:
    goal, target, finalist = facts.goal, facts.target, facts.finalist
    size = "×".join(map(str, target.image_shape))
    network, settings = f"{target.info['model']}, images of {size}", described(finalist.tables)
    chosen = (
        "chose these settings: the least verified leak at an "
        f"{goal.title} of at least {goal.text(goal.least)}."
    )
    if goal.surface == "model":
        return [
            f"# {facts.name}, hardened with {finalist.title}",
            "",
            f"A classifier of {len(target.classes)} people ({network}, values in 0 to 1), trained "
            f"with `{settings}`. `frostglass harden` {chosen}",
        ]
    return [
        f"# {facts.name}, protected with {finalist.title}",
        "",
        f"A split model ({network}, values in 0 to 1) that predicts {len(target.classes)} "
        f"attributes. The output of `{target.cut}` leaves the device, protected with "
        f"`{settings}`. `frostglass harden --protect` {chosen}",
    ]


def _utility(facts: CardFacts) -> str:
    goal, value = facts.goal, facts.goal.text(facts.finalist.utility)
    if goal.surface == "model":
        return f"This model classifies {value} of held-out images correctly."
    return (
        f"The server's answers to the released features of held-out images have a mean "
        f"{goal.title} of {value} over attributes."
    )


def _similarity(goal: Goal) -> str:
    if goal.surface == "model":
        return ""
    return (
        " Similarity: cosine of reconstruction and true image in an embedder trained on other "
        "people, the highest of any attack."
    )


def _attacks(facts: CardFacts) -> list[str]:
    return list(dict.fromkeys(case for pair in facts.models.values() for case in pair[1].rows))


def _line(population: str, model: Model) -> str:
    cells: list[str | Share] = [model.title, model.utility, model.leak, model.widest, model.attack]
    return f"| {population} | " + " | ".join(map(str, cells)) + " |"
