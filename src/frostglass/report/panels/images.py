"""The images of a study: a column for each person, a row for each audit."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from frostglass.report.charts import THUMBNAIL, data_uri, shape
from frostglass.report.entry import Entry
from frostglass.report.parts import (
    Cell,
    Details,
    Gallery,
    Items,
    Note,
    Part,
    Section,
    Thumbnail,
    named_cell,
)
from frostglass.report.recognition import top1_short
from frostglass.report.study import Study
from frostglass.report.text import number

PEOPLE_SHOWN = 16  # in the first table of images; the others are folded away


def people_shown(study: Study, image_bytes: int) -> list[list[int]]:
    """Choose people by position, as many as `image_bytes` allow: a first table, then the rest."""
    largest = max(
        shape[0] * math.prod(min(side, THUMBNAIL) for side in shape[1:])
        for shape in (entry.reconstructions.shape[2:] for entry in study.shown)
    )
    # 4/3 for base64, and the table's own text.
    column = (len(study.shown) + 1) * (largest * 4 / 3 + 300)
    people = len(study.first.identities)
    within = _spread(people, max(1, min(people, int(image_bytes / column))))
    first = [within[place] for place in _spread(len(within), min(PEOPLE_SHOWN, len(within)))]
    rest = [place for place in within if place not in first]
    starts = range(0, len(rest), PEOPLE_SHOWN)
    return [first, *(rest[start : start + PEOPLE_SHOWN] for start in starts)]


def _spread(total: int, count: int) -> list[int]:
    """Return `count` positions out of `total`, the same distance apart."""
    return [round(step * (total - 1) / max(1, count - 1)) for step in range(count)]


def images_sections(study: Study, image_bytes: int) -> list[Section]:
    """Return the section of images; none on a page without images."""
    if not study.shows_images:
        return []
    tables = people_shown(study, image_bytes)
    people, included = len(study.first.identities), sum(map(len, tables))
    count = number(people, "count")
    text = f"All {count} people of this audit."
    if len(tables[0]) < people:
        shown = number(len(tables[0]), "count")
        text = f"{shown} of {count} people, chosen by position at even intervals, not by success."
    if included < people:
        missing = number(people - included, "count")
        text += f" {missing} people are left out to keep this page small; their numbers count."
    if len(study.shown) < len(study.entries):
        subject = "model" if study.surface == "model" else "protection"
        each = study.shown_each
        strongest = f"the {each} strongest attacks" if each > 1 else "the strongest attack"
        text += (
            f" Images of {len(study.shown)} of {len(study.entries)} audits are here, to keep this "
            f"page small: {strongest} on each {subject}."
        )
    if any(entry.embeds for entry in study.shown):
        text += (
            " An attack that predicts face embeddings makes no image: its row shows the public "
            "image nearest to the embedding, and the number is that of the embedding."
        )
    parts: list[Part] = [Note(_note(study)), legend(study), _gallery(study, tables[0]), Note(text)]
    if len(tables) > 1:
        rest = number(included - len(tables[0]), "count")
        galleries = [_gallery(study, places) for places in tables[1:]]
        parts.append(Details(f"The other {rest} people", galleries))
    return [Section("Images", "What the attacker sees", parts)]


def _note(study: Study) -> str:
    each = "an" if len(study.shown) < len(study.entries) else "each"
    if study.surface == "model":
        count = number(study.candidates, "count")
        kept = f" (the first of {count} kept)" if study.candidates > 1 else ""
        return (
            f"Each column is one person: a private image, then what {each} attack "
            f"reconstructed{kept}. The marks under an image say which evaluators accept it."
        )
    first = "first image" if study.subjects[0].facts.images_per_person > 1 else "image"
    return (
        f"Each column is one person: the {first} whose feature left the device, then what {each} "
        "attack reconstructed from it; always the first reconstruction, not the best. Under an "
        "image: its similarity, and which evaluators accept it."
    )


def legend(study: Study) -> Items:
    items: list[str] = [
        Markup("Evaluator {} ({}{}): {} accepts it as the person, {} does not").format(
            place + 1,
            network.model,
            ", decides" if network.decides else ", excluded" if network.excluded else "",
            shape(place),
            shape(place, False),
        )
        for place, network in enumerate(study.first.evaluators)
    ]
    partial = any(entry.facts.partial for entry in study.shown)
    stopped = ["Dashed frame: the search stopped early, so the image says little"]
    return Items(items + stopped * partial, "legend")


def _gallery(study: Study, places: Sequence[int]) -> Gallery:
    names = [study.first.identities[place] for place in places]
    images, features = study.runs[0].images, study.surface == "features"
    private = images["victims"][:, 0] if features else images["private"]
    given = any(subject.kind == "given" for subject in study.subjects)
    shown = "of the folder" if given else "held out of training"
    header = Cell("private image", ["stays on the device" if features else shown])
    rows: list[tuple[Cell, Sequence[Thumbnail | None]]] = [
        (
            header,
            [
                Thumbnail(data_uri(private[place]), f"private image of {name}")
                for place, name in zip(places, names, strict=True)
            ],
        )
    ]
    for entry in study.shown:
        score = number(entry.score.value, study.unit)
        text = f"similarity {score}" if features else f"{score} recognised, {top1_short(entry)}"
        text += ", vacuous" if entry.vacuous else ""
        text += "; a stranger who looks like the embedding" if entry.embeds else ""
        thumbnails = [_thumbnail(entry, name) for name in names]
        rows.append((named_cell(entry.label, text), thumbnails))
    return Gallery(names, rows)


def _thumbnail(entry: Entry, name: str) -> Thumbnail | None:
    """Return the first reconstruction of a person; None for one who was not attacked."""
    rows = entry.run.rows[entry.number]
    if name not in rows.names:
        return None
    place = rows.names.index(name)

    def value(column: str) -> float:
        return rows.columns[column][place, 0].item()

    verdicts = [value(name) == 1 for name in entry.facts.verified]
    return Thumbnail(
        data_uri(entry.reconstructions[place, 0]),
        f"reconstruction of {name}, {entry.label}",
        Markup("").join(shape(number, yes) for number, yes in enumerate(verdicts)),
        ", ".join(
            f"evaluator {place} {'accepts' if yes else 'does not accept'} it"
            for place, yes in enumerate(verdicts, 1)
        ),
        number(value("similarity"), "decimal") if entry.surface == "features" else "",
        name in entry.facts.partial,
    )
