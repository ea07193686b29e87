"""The model card: what the recommended model is, what it leaks, and what it does not prevent."""

from collections.abc import Mapping
from dataclasses import dataclass

from frostglass.attacks.base import Surface
from frostglass.core.types import Target
from frostglass.hardening.final import EVERYBODY, OTHER_HALF, Finalist, Model
from frostglass.hardening.goal import Goal
from frostglass.hardening.space import described
from frostglass.report.card import document
from frostglass.report.seeds import Share

HEADINGS: Mapping[Surface, str] = {
    "model": "accuracy | verified, first guess | verified, any guess",
    "features": "{utility} | verified | similarity",
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
    measured = [
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
    ]
    return document(_opening(facts), measured, goal.surface)


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
