"""A page for each method of each registry: what `frostglass show` prints, as Markdown."""

import json
from typing import Any

from frostglass.cli.catalogue import EXAMPLE_WORDS, KINDS, attackers_of, describe, entries
from website.text import cell, code, fenced, prose, table

ABOUT = {
    "attacks": ("Attacks", "attacks.md", "What reconstructs people from a model, or from features"),
    "defenses": (
        "Defenses",
        "defenses.md",
        "What hides them: in training, or on release",
    ),
    "priors": (
        "Priors",
        "attacks.md#priors",
        "The attacker's generators of public faces",
    ),
    "metrics": ("Metrics", "metrics.md", "What is measured on reconstructions"),
    "datasets": ("Datasets", "audit-a-model.md#1-prepare-the-images", "Where images come from"),
    "models": ("Models", "audit-a-model.md#2-describe-the-model", "Networks that are attacked"),
    "threats": ("Threats", "robustness.md", "Adversarial examples and backdoors"),
    "analyses": ("Analyses", "analysis.md", "Why models leak, as tables and figures"),
}
# How a config names a method of each kind; analyses are named on the command line.
PLACES = {
    "attacks": "[attack]", "defenses": "[[defenses]]", "priors": "[prior]",
    "metrics": "[[metrics]]", "datasets": "[data]", "threats": "[[threats]]",
}  # fmt: skip


def method_pages() -> dict[str, str]:
    """Return every generated page by its address: an index, and one of each kind and method."""
    pages = {"methods/index.md": _overview()}
    for kind in ABOUT:
        pages[f"methods/{kind}/index.md"] = _index(kind)
        for name in KINDS[kind].names():
            pages[f"methods/{kind}/{name}.md"] = method_page(kind, name)
    return pages


def _overview() -> str:
    rows = [
        [f"[{title}]({kind}/index.md)", cell(about), str(len(KINDS[kind].names()))]
        for kind, (title, _, about) in ABOUT.items()
    ]
    return (
        "# Methods\n\nEvery method that is registered, from its docstring; "
        "`frostglass show NAME` prints the same.\n\n" + table(["kind", "what", "methods"], rows)
    )


def _index(kind: str) -> str:
    title, guide, about = ABOUT[kind]
    rows = []
    for entry in entries(kind):
        surface = f" (on {entry['surface']})" if entry.get("surface") == "features" else ""
        use = describe(entry["name"])["use"]
        name = f"[`{entry['name']}`]({entry['name']}.md){surface}"
        rows.append([name, cell(entry["summary"]), *([cell(use)] if kind in USES else [])])
    header = ["name", "what it does", *(["use it when"] if kind in USES else [])]
    return f"# {title}\n\n{about}. Guide: [{guide.partition('#')[0]}](../../{guide}).\n\n" + table(
        header, rows
    )


USES = ("attacks", "defenses", "priors", "metrics", "threats")


def method_page(kind: str, name: str) -> str:
    """Return one method: formula, use, cost, parameters, variants, paper, differences."""
    facts = describe(name)
    summary, _, rest = facts["about"].partition("\n\n")
    parts = [f"# {prose(facts['title'])}", _kind_line(kind, facts), prose(summary)]
    parts += [prose(paragraph) for paragraph in rest.split("\n\n") if paragraph]
    sections = (
        ("When to use it", facts["use"]),
        ("Cost", _cost(facts)),
        ("Attackers who know it", attackers_of(facts)),
    )
    for heading, text in sections:
        if text:
            parts += [f"## {heading}", prose(text[0].upper() + text[1:])]
    if example := _example(kind, facts):
        parts += ["## In a config", example]
    parts += _parameters(facts) + _variants(facts)
    for heading, key in (("Paper", "paper"), ("Differences from the paper", "differs")):
        if facts[key]:
            parts += [f"## {heading}", prose(facts[key][0].upper() + facts[key][1:])]
    return "\n\n".join(parts) + "\n"


def _kind_line(kind: str, facts: dict[str, Any]) -> str:
    singular = facts["kind"]
    surface = getattr(KINDS[kind].get(facts["name"]), "surface", "") if kind == "attacks" else ""
    on = f" on {'a model' if surface == 'model' else 'features'}" if surface else ""
    return f"`{facts['name']}` · [{singular}](index.md){on} · {code(facts['file'])}"


def _cost(facts: dict[str, Any]) -> str:
    if not facts["cost"] or "Cost: " in facts["text"]:
        return facts["cost"]
    return f"{facts['cost']}. At the defaults, with {EXAMPLE_WORDS}."


def _example(kind: str, facts: dict[str, Any]) -> str:
    """Return how a config asks for the method, with what it requires."""
    if kind == "analyses":
        return fenced("sh", f"frostglass analyze {facts['name']} CONFIG.toml")
    if kind == "models":
        return fenced("toml", f'[target]\nmodel = "{facts["name"]}"')
    lines = [PLACES[kind], f'name = "{facts["name"]}"']
    lines += [f'{one["name"]} = "..."' for one in facts["parameters"] if one["required"]]
    return fenced("toml", "\n".join(lines))


def _parameters(facts: dict[str, Any]) -> list[str]:
    if not facts["parameters"]:
        return []
    rows = [
        [
            f"`{one['name']}`",
            "required" if one["required"] else code(_value(one["default"])),
            code(one["type"]),
            cell(facts["meanings"].get(one["name"], "")),
        ]
        for one in facts["parameters"]
    ]
    return ["## Parameters", table(["name", "default", "type", "meaning"], rows)]


def _variants(facts: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"`{one['name']}`",
            cell(one["why"]),
            "<br>".join(code(f"{key} = {json.dumps(value)}") for key, value in one["sets"].items()),
        ]
        for one in facts["variants"]
    ]
    return ["## Variants", table(["variant", "why", "sets"], rows)] if rows else []


def _value(default: Any) -> str:
    """Return a default as a config would write it."""
    if default is None:
        return "none"
    return json.dumps(default, default=str, ensure_ascii=False)
