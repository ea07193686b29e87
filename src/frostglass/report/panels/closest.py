"""The most exposed people, and those nearest to being recognised, shown large."""

import math

from torch import Tensor

from frostglass.report.charts import LARGE, data_uri
from frostglass.report.entry import Entry
from frostglass.report.parts import Details, Heading, Note, Pair, Pairs, Part, Section
from frostglass.report.study import Study
from frostglass.report.text import number

MAX_SUBJECTS = 3  # subjects whose people are shown large
MAX_PEOPLE = 4  # in each row


def closest_sections(study: Study, image_bytes: int) -> tuple[list[Section], int]:
    """Return the section of large images, and its size; none if there are no faces to show."""
    if study.redacted or not study.shows_images:
        return [], 0
    entries = [subject.strongest for subject in study.subjects if not subject.strongest.embeds]
    count = _affordable(entries[:MAX_SUBJECTS], image_bytes)
    if not count:
        return [], 0
    content: list[Part] = [Note(_note(study, len(entries)))]
    others: list[Part] = []
    for entry in entries[:MAX_SUBJECTS]:
        exposed, nearest = ranked(entry)
        limit = number(entry.threshold)
        content += [Heading(f"Most exposed: {entry.label}")]
        content += [_pairs(study, entry, exposed[:count])] if exposed else [Note("Nobody.")]
        if nearest:
            others += [
                Heading(f"Nearest to being recognised: {entry.label}"),
                Note(f"Not accepted: their match is not above the threshold of {limit}."),
                _pairs(study, entry, nearest[:count]),
            ]
    shown = [part for part in (*content, *others) if isinstance(part, Pairs)]
    pairs = [pair for part in shown for pair in part.pairs]
    content += [Details("Who comes nearest to being recognised", others)] if others else []
    used = sum(len(pair.real) + len(pair.reconstruction) for pair in pairs)
    return [Section("Closest", "The most exposed people", content)], used


def ranked(entry: Entry) -> tuple[list[int], list[int]]:
    """Return people with a verified reconstruction, and the others; best matches first."""
    best = entry.match.amax(1)
    accepted = entry.run.rows[entry.number].columns[entry.verified].amax(1) > 0
    order = best.argsort(descending=True, stable=True).tolist()
    return [place for place in order if accepted[place]], [p for p in order if not accepted[p]]


def _affordable(entries: list[Entry], image_bytes: int) -> int:
    """Return how many people fit into each row."""
    if not entries:
        return 0
    channels, *sides = entries[0].reconstructions.shape[2:]
    # 4/3 for base64; two images for each person, two rows for each audit.
    size = channels * math.prod(min(side, LARGE) for side in sides) * 4 / 3 + 300
    return min(MAX_PEOPLE, int(image_bytes / (4 * len(entries) * size)))


def _note(study: Study, subjects: int) -> str:
    real = "the image whose feature left the device"
    if study.surface == "model":
        given = any(subject.kind == "given" for subject in study.subjects)
        real = f"a real image of the person{'' if given else ', held out of training'}"
    text = (
        f"Left: {real}. Right: of the person’s reconstructions by the strongest attack, the one "
        "that matches the person best. Most exposed people would be recognised by it; the others "
        "would not, and come nearest."
    )
    if subjects > MAX_SUBJECTS:
        text += f" The first {MAX_SUBJECTS} of {subjects} are shown."
    return text


def _pairs(study: Study, entry: Entry, places: list[int]) -> Pairs:
    names = entry.run.rows[entry.number].names
    items = []
    for place in places:
        candidate = int(entry.match[place].argmax())
        match = entry.match[place, candidate].item()
        limit = number(entry.threshold)
        relation = "above" if match > entry.threshold else "not above"
        real = _real(study, entry, names[place], candidate)
        items.append(
            Pair(
                names[place],
                data_uri(real, LARGE),
                data_uri(entry.reconstructions[place, candidate], LARGE),
                f"match {number(match)}, {relation} {limit}",
            )
        )
    return Pairs(entry.label, items)


def _real(study: Study, entry: Entry, name: str, candidate: int) -> Tensor:
    """Return a held-out image of a person; on features the one that was reconstructed."""
    images, place = study.runs[0].images, study.first.identities.index(name)
    if study.surface == "model":
        return images["private"][place]
    each = entry.reconstructions.shape[1] // entry.facts.images_per_person
    return images["victims"][place, candidate // each]
