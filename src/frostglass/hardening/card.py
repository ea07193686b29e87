"""The model card: what the recommended model is, what it leaks, and what it does not prevent."""

from dataclasses import dataclass

from frostglass.core.types import Target
from frostglass.hardening.final import EVERYBODY, OTHER_HALF, Finalist, Model
from frostglass.hardening.space import described
from frostglass.models.checkpoint import DESCRIPTION, WEIGHTS
from frostglass.report.seeds import Share

LIMITS = """\
- It is measured, not proven: the figures hold for the attacks in the table, with their prior and
  budget. Another attack, a better generator or more time can find more.
- The people are still in the weights. The defense makes them harder to reconstruct; it does not
  remove them.
- An attacker with several guesses, or who knows something about a person (hair, age, a name),
  recovers more than the first guess says; "any guess" counts every candidate of an attack.
- Nothing is said about other leaks: who was in the training set (membership), attributes, or copies
  of training images found by other means.
- The figures are means over people. Some people are more exposed than others; the report names
  them.
- Training again, with other people or settings, gives another model: measure it again."""


@dataclass(frozen=True)
class CardFacts:
    """What a card says of the recommended model, beside its own files."""

    name: str
    finalist: Finalist
    target: Target
    accuracy: float  # the least that the user accepts
    models: dict[str, tuple[Model, Model]]  # by population: undefended, recommended
    seeds: int
    evaluator: str
    rate: str
    remark: str


def card(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    target, finalist = facts.target, facts.finalist
    size = "×".join(map(str, target.image_shape))
    lines = [
        f"# {facts.name}, hardened with {finalist.title}",
        "",
        f"A classifier of {len(target.classes)} people ({target.info['model']}, images of {size}, "
        f"values in 0 to 1), trained with `{described(finalist.tables)}`. `frostglass harden` "
        "chose these settings: the least verified leak at an accuracy of at least "
        f"{facts.accuracy:.1%}.",
        "",
        "## Accuracy and leak",
        "",
        f"This model classifies {finalist.accuracy:.1%} of held-out images correctly. The table "
        f"has means over {facts.seeds} seed{'s' if facts.seeds > 1 else ''}, this model being the "
        "first, with 95 % intervals over people and seeds (accuracy: range over seeds). Verified: "
        f"{facts.evaluator} takes the reconstruction for the person at a false-accept rate of "
        f"{facts.rate}, under the strongest of {len(_attacks(facts))} attacks.",
        "",
        "| models of | model | accuracy | verified, first guess | verified, any guess | attack |",
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
        LIMITS,
        "",
        "## Files",
        "",
        f"`{WEIGHTS}` holds the weights; `{DESCRIPTION}` the architecture, the recipe, and the "
        "classes in the order of the outputs: it names the private people.",
        "",
        "```python",
        "from frostglass.models.checkpoint import load_target",
        "from frostglass.training.build import rebuild_network",
        "",
        'target = load_target("model", rebuild_network)  # this folder',
        "scores = target.module(images)  # (N, channels, height, width), in [0, 1]",
        "```",
        "",
    ]
    return "\n".join(lines)


def _attacks(facts: CardFacts) -> list[str]:
    return list(dict.fromkeys(case for pair in facts.models.values() for case in pair[1].rows))


def _line(population: str, model: Model) -> str:
    cells: list[str | Share] = [model.title, model.accuracy, model.leak, model.any, model.attack]
    return f"| {population} | " + " | ".join(map(str, cells)) + " |"
