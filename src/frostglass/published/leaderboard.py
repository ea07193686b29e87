"""A folder of claims as a table: each defense by the attack that recognises most people."""

from collections.abc import Sequence
from dataclasses import dataclass

from frostglass.published.claims import Claim, Interval

CAPTION = (
    "Recognised: share of people whose reconstruction a face verifier accepts, at a false-accept "
    "rate of 1 %, under the strongest of the attacks (mean over people and seeds, 95 % interval; "
    "models: by the first candidate). Utility: accuracy, or MCC of a server's answers, with its "
    "range over seeds. Compare defenses within one world, at the same utility."
)


@dataclass(frozen=True)
class Place:
    """A defense in a world, under the strongest of its attacks."""

    claim: Claim
    attacks: int

    @property
    def utility(self) -> Interval:
        return self.claim.scores[self.claim.utility]


def leaderboard(claims: Sequence[Claim]) -> list[Place]:
    """Return a place for each defense, worlds by name, in each the least recognised first."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        groups.setdefault((claim.world, claim.defense), []).append(claim)
    places = [
        Place(max(group, key=lambda claim: claim.value.value), len(group))
        for group in groups.values()
    ]
    return sorted(
        places,
        key=lambda place: (place.claim.world, place.claim.value.value, place.claim.defense),
    )


def cells(place: Place) -> dict[str, str]:
    """Return the line of a place as text."""
    claim = place.claim
    form = ".1%" if claim.utility == "accuracy" else ".2f"
    return {
        "world": claim.world,
        "defense": claim.defense,
        "strongest attack": f"{claim.attack} (of {place.attacks})",
        "recognised": _text(claim.value, ".1%"),
        "prior only": f"{claim.scores['verified, prior only'].value:.1%}"
        if "verified, prior only" in claim.scores
        else "–",
        "utility": f"{claim.utility} {_text(place.utility, form)}",
        "seeds": str(len(claim.seeds)),
        "people": str(claim.people),
        "notes": "; ".join(claim.notes) or "–",
    }


def _text(interval: Interval, form: str) -> str:
    low, high = (format(limit, form) for limit in (interval.low, interval.high))
    return f"{interval.value:{form}} ({low} to {high})"


def markdown(places: Sequence[Place]) -> str:
    """Return the table as Markdown with its caption."""
    rows = [cells(place) for place in places]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", CAPTION, ""])
