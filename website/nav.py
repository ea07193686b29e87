"""The navigation: which page is where. A page of docs/ that is in no section fails a test."""

from collections.abc import Collection
from typing import Any

from frostglass.cli.catalogue import KINDS
from website.methods import ABOUT

SECTIONS: dict[str, tuple[str, ...]] = {
    "Tutorials": (
        "tutorial-model-owner.md",
        "tutorial-split-inference.md",
        "tutorial-researcher.md",
        "notebooks/audit_your_model.md",
        "notebooks/defend_and_compare.md",
        "notebooks/protect_features.md",
    ),
    "Guides": (
        "threat-models.md",
        "audit-a-model.md",
        "harden.md",
        "protect-features.md",
        "data.md",
        "report.md",
        "verdict.md",
        "human-study.md",
        "extend.md",
        "plugin.md",
        "cluster.md",
        "faq.md",
        "security.md",
    ),
    "Reference": (
        "attacks.md",
        "defenses.md",
        "metrics.md",
        "robustness.md",
        "analysis.md",
        "faces.md",
        "configs.md",
        "api.md",
    ),
    "Results": (
        "results.md",
        "results-defenses.md",
        "results-attacks.md",
        "results-features.md",
        "results-one-seed.md",
        "published.md",
    ),
    "Project": ("architecture.md", "contributing.md", "changelog.md"),
}


def navigation(pages: Collection[str]) -> list[Any]:
    """Return the navigation of the pages that there are."""
    sections: list[Any] = [
        {title: [page for page in listed if page in pages]} for title, listed in SECTIONS.items()
    ]
    kinds: list[Any] = [
        {
            title: [
                f"methods/{kind}/index.md",
                *({name: f"methods/{kind}/{name}.md"} for name in KINDS[kind].names()),
            ]
        }
        for kind, (title, _, _) in ABOUT.items()
    ]
    sections.insert(3, {"Methods": ["methods/index.md", *kinds]})
    return [{"Home": "index.md"}, *sections]
