"""The threat model in the terms of others, what was not run, and what the audit cannot say."""

from collections.abc import Sequence

from frostglass.attacks.base import attacks
from frostglass.report import parts
from frostglass.report.entry import ADAPTIVE, LABEL_ONLY, Entry
from frostglass.report.study import Study
from frostglass.report.text import listed, number

NIST = "NIST AI 100-2 E2025"
REFERENCES = (
    "NIST AI 100-2 E2025, Adversarial Machine Learning: A Taxonomy and Terminology of Attacks and "
    "Mitigations: privacy attacks (data reconstruction, model inversion); attacker’s goal, "
    "knowledge and capabilities.",
    "MITRE ATLAS, technique AML.T0024.001, Invert AI Model (tactic: exfiltration).",
    "OWASP AISVS 1.0, C11.2, mitigation of membership inference and model inversion (earlier "
    "drafts: C11.4).",
    "EDPB Opinion 28/2024 of 17 December 2024: how likely is it that personal data is extracted "
    "from a model, or obtained by queries, with all means reasonably likely to be used? These "
    "numbers are evidence for that question and do not answer it.",
)
KNOWLEDGE = {
    "gradients": "white box: the network and its weights",
    "scores": "black box: answers with scores",
    "labels": "black box: predicted labels alone",
}
OF_FEATURES = {
    "encode": "queries to the device: plain features of its own images",
    "encoder": "the device’s half of the network",
    "protection": "protected features of its own images",
}
MEANING = {
    LABEL_ONLY: "asks for labels alone, so that masked gradients do not stop it",
    ADAPTIVE: "knows the defense and works around it",
}
OTHERS = "membership inference, property inference and model extraction"


def threat_section(study: Study) -> parts.Section:
    """Return who attacks with what, row by row, in the terms of NIST and MITRE."""
    model = study.surface == "model"
    goal = (
        "Images of the people whom the model was trained on; one class is one person"
        if model
        else "The image behind a feature that left the device, of a person the attacker never saw"
    )
    rows: list[list[parts.Cell | str]] = [
        ["Goal", goal, f"privacy compromise: data reconstruction, model inversion ({NIST})"],
        ["Stage", "After training; nothing is poisoned", f"deployment-time attack ({NIST})"],
        ["Knowledge", "; ".join(_knowledge(study)), f"white-box, black-box knowledge ({NIST})"],
        ["Capabilities", _capabilities(study), f"query access, model access ({NIST})"],
        ["Other data", _other_data(study), "auxiliary data of other people"],
        [
            "Technique",
            ", ".join(study.methods),
            "AML.T0024.001, Invert AI Model (MITRE ATLAS)" if model else "nearest: AML.T0024.001",
        ],
        [
            "Verification",
            "Measured recognition, with controls and adaptive attacks where listed",
            "C11.2 (OWASP AISVS 1.0)",
        ],
    ]
    table = parts.Table("Threat model", ["question", "in this audit", "term, source"], rows, "told")
    content: list[parts.Part] = [table, parts.Items(REFERENCES, "plain note")]
    return parts.Section("Threat model", "Threat model: who attacks, with what", content)


def _knowledge(study: Study) -> list[str]:
    known = KNOWLEDGE if study.surface == "model" else OF_FEATURES
    levels = list(dict.fromkeys(each for entry in study.entries for each in _granted(entry)))
    return [known.get(level, level) for level in levels] or ["the released features alone"]


def _granted(entry: Entry) -> list[str]:
    if entry.surface == "model":
        return [entry.access] if entry.access else []
    return list(entry.facts.access)


def _capabilities(study: Study) -> str:
    people = len(study.first.identities)
    queries = sorted(entry.facts.queries / people for entry in study.entries)
    low, high = (number(each, "count") for each in (queries[0], queries[-1]))
    each = low if low == high else f"{low} to {high}"
    return f"{each} queries for each person; {number(study.candidates, 'count')} guesses kept"


def _other_data(study: Study) -> str:
    methods = [(entry.facts.prior or {}).get("method") for entry in study.entries]
    names = [str(each.get("name")) for each in methods if isinstance(each, dict)]
    priors = listed(sorted(set(names)))
    made = f", and a generator made from such images ({priors})" if priors else ""
    return f"Public images of other people{made}"


def cost_section(study: Study) -> parts.Section:
    """Return what each attack took: queries, steps, seconds."""

    def row(entry: Entry) -> list[parts.Cell | str]:
        facts, people = entry.facts, len(entry.reconstructions)
        return [
            parts.named_cell(entry.label),
            number(facts.queries, "count"),
            number(facts.queries / people, "count"),
            number(facts.steps, "count"),
            number(facts.seconds, "seconds"),
            number(facts.seconds / people, "seconds"),
            number(entry.reconstructions.shape[1], "count"),
        ]

    chosen = [s.strongest for s in study.subjects] if study.many else study.entries
    head = ["audit", "queries", "queries per person", "steps per search", "time"]
    head += ["time per person", "guesses per person"]
    rows = [row(entry) for entry in chosen]
    text = (
        "Queries are images that the attack passes to the model or the device, without those used "
        "to train a prior. Times hold for the machine of this run; an attacker may have a faster "
        "one."
    )
    if study.many:
        text += " The strongest attack on each subject."
    table = parts.Table("Attacker’s cost", head, rows, long=study.many)
    shown = parts.folded_if(study.many, f"Cost of {len(rows)} attacks", table)
    return parts.Section("Cost", "What the attacks cost", [shown, parts.Note(text)])


def not_run_section(study: Study) -> parts.Section:
    """Return the attacks that were not run, and why."""
    rows: list[list[parts.Cell | str]] = [
        [name, "failed", reason] for name, reason in map(_named_reason, study.failed)
    ]
    rows += [[name, "not run", reason] for name, reason in map(_named_reason, study.not_run)]
    for kinds, subjects in study.untried.items():
        meaning = "; ".join(MEANING[kind] for kind in MEANING if kind in kinds)
        why = f"not in the config, or vacuous{': ' + meaning if meaning else ''}"
        rows.append([f"Kinds: {kinds}", f"on {subjects}", why])
    used = {str(entry.facts.attack.get("name")) for entry in study.entries}
    known = [name for name in attacks.names() if attacks.get(name).surface == study.surface]
    if others := [name for name in known if name not in used]:
        rows.append([f"Methods: {', '.join(others)}", "not run", _why(study)])
    rows.append([f"Other privacy attacks: {OTHERS}", "not run", "Frostglass does not measure them"])
    table = parts.Table("Attacks not run", ["attack", "state", "why"], rows, "told")
    return parts.Section("Not run", "Attacks that were not run, and why", [table])


def _named_reason(text: str) -> tuple[str, str]:
    name, _, reason = text.partition(": ")
    return (name, reason) if reason else ("an audit", text)


def _why(study: Study) -> str:
    levels = {entry.access for entry in study.entries}
    if study.surface == "model" and levels and "gradients" not in levels:
        return (
            "not in the config; those that follow gradients need the weights, which this attacker "
            "does not have"
        )
    return "not in the config"


def limits_section(study: Study) -> parts.Section:
    items = parts.Items(_limits(study, number(len(study.first.identities), "count")))
    return parts.Section("Limits", "What this audit cannot say", [items])


def _limits(study: Study, people: str) -> Sequence[str]:
    items = [
        "It measures the attacks listed here. A stronger or later attack may find more; nothing "
        "here is a proof that nobody can be reconstructed.",
        f"{people} people were attacked. Intervals are over such people; a person who is unlike "
        "them may be more exposed than any average says.",
        "Recognition is decided by a network at a stated rate of false alarms, not by people who "
        "know the person.",
        "It says nothing about other privacy attacks, about who may use the model, or about the "
        "law: those are decisions of people.",
    ]
    if study.surface == "features":
        items.append(
            "Features of held-out images were attacked. Repeated releases, or features of videos, "
            "give an attacker more."
        )
    elif any(subject.kind == "given" for subject in study.subjects):
        items.append(
            "The given model may have been trained on the images that its accuracy is measured on."
        )
    if study.redacted:
        items.append("Faces and names were removed from this page: it cannot be checked by eye.")
    return items
