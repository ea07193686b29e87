"""Every attack on every model: a square for each pair, which attack is the strongest where, and what that says of hidden gradients."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from frostglass.report.arrange import LABEL_ONLY, Aim, Entry, Study, spoken
from frostglass.report.charts import JOINER, listed, number

FEWEST = 2  # models, and attacks; below that the other tables say it all
TELLING = 0.1  # by how much an attack that needs no honest gradient must exceed the others to be a sign of masked ones


@dataclass(frozen=True)
class Square:
    """What one attack found on one model: `entry` is the strongest of its `audits` there, None if there are none; `strongest` if no other attack found more."""

    entry: Entry | None
    audits: int
    strongest: bool

    @property
    def hollow(self) -> bool:
        return self.entry is not None and bool(self.entry.facts.controls.vacuous)

    @property
    def others(self) -> list[tuple[int, float]]:
        """The judges that were not the strictest, by their number, with their shares."""
        if self.entry is None:
            return []
        scores, strictest = self.entry.facts.scores, self.entry.strictest
        return [
            (place, scores[judge].value)
            for place, judge in enumerate(self.entry.judges, 1)
            if judge != strictest
        ]


@dataclass(frozen=True)
class Matrix:
    """Attacks by their names, each with a square for each model; `guessing` says what each model's priors reach alone, `winners` who is the strongest."""

    models: tuple[Aim, ...]
    rows: dict[str, list[Square]]
    guessing: list[str]
    winners: list[list[str]]

    @property
    def gaps(self) -> bool:
        """Were some attacks not tried on some models?"""
        return any(square.entry is None for squares in self.rows.values() for square in squares)


def matrix(study: Study) -> Matrix | None:
    """All attacks on all models, in the order of the study; nothing where there is only one of either."""
    methods = list(dict.fromkeys(entry.method for entry in study.entries))
    if len(methods) < FEWEST or len(study.aims) < FEWEST:
        return None
    rows = {method: [_square(aim, method) for aim in study.aims] for method in methods}
    return Matrix(
        study.aims,
        rows,
        [_guessing(aim) for aim in study.aims],
        [winners(aim) for aim in study.aims],
    )


def winners(aim: Aim) -> list[str]:
    """The attacks nobody exceeds on a model: one, several that are equal, or none where nobody was recognised."""
    most = aim.strongest.leak.value
    return list(
        dict.fromkeys(entry.method for entry in aim.entries if entry.leak.value == most > 0)
    )


def _square(aim: Aim, method: str) -> Square:
    entries = [entry for entry in aim.entries if entry.method == method]
    return Square(max(entries, key=_leak, default=None), len(entries), method in winners(aim))


def _guessing(aim: Aim) -> str:
    """What the priors reach alone; attacks bring different ones, some of them taught by the model."""
    shares = sorted(entry.facts.prior_only[entry.strictest].value for entry in aim.entries)
    low, high = number(shares[0], "percent"), number(shares[-1], "percent")
    return high if low == high else f"{number(shares[0], 'points')}–{JOINER}{high}"


def attack_notes(study: Study) -> list[str]:
    """The matrix in words: which attack is the strongest on how many models, and where one that needs no honest gradient finds more."""
    sound = [aim for aim in study.aims if not aim.vacuous]
    if matrix(study) is None or not sound:
        return []
    return [*_strongest_notes(sound, vacuous=len(study.aims) - len(sound)), *_masking_notes(sound)]


def _strongest_notes(aims: Sequence[Aim], *, vacuous: int) -> list[str]:
    best = [winners(aim) for aim in aims]
    counts = Counter(method for methods in best for method in methods).most_common()
    notes = []
    if counts:
        (first, most), *others = counts
        models = (
            "the one model"
            if len(aims) == 1
            else f"all {most} models"
            if most == len(aims)
            else f"{most} of {len(aims)} models"
        )
        models += " whose audits are not vacuous" if vacuous else ""
        parts = [
            f"{_quoted(first)} is the strongest attack on {models}",
            *(f"{_quoted(method)} on {times}" for method, times in others),
        ]
        ties = (
            "; where attacks are equally strong, each counts"
            if any(len(methods) > 1 for methods in best)
            else ""
        )
        notes.append(f"{listed(parts)}{ties}.")
    if unbroken := [aim.name for aim, methods in zip(aims, best, strict=True) if not methods]:
        notes.append(
            f"Nobody rebuilt from {listed(unbroken)} was recognised by the strictest judge, whatever the attack."
        )
    return notes


def _masking_notes(aims: Sequence[Aim]) -> list[str]:
    """Only sound audits are compared: a plain attack that fails without any defense is weak, and says nothing of masking."""
    compared = [(aim, *pair) for aim in aims if (pair := _pair(aim))]
    telling = [
        (aim, knowing, plain)
        for aim, knowing, plain in compared
        if round(_leak(knowing) - _leak(plain), 6) > TELLING
    ]
    defended = [_found(*each) for each in telling if each[0].kind != "undefended"]
    without = [_found(*each) for each in telling if each[0].kind == "undefended"]
    limit = f"by more than {number(TELLING, 'points')} points"
    notes = []
    if compared and not telling:
        models = "1 model" if len(compared) == 1 else f"{len(compared)} models"
        notes.append(
            f"An adaptive or label-only attack exceeds the plain ones {limit} on none of the {models} that met both."
        )
    if defended:
        notes.append(
            f"An adaptive or label-only attack exceeds every plain one {limit} on {listed(defended)}: a sign of masked gradients."
        )
    if without:
        begins = (
            "It does so also"
            if defended
            else f"An adaptive or label-only attack exceeds every plain one {limit}"
        )
        notes.append(
            f"{begins} on {listed(without)}, where no defense masks anything: it may be the stronger attack anyway, "
            "and what it finds more on other models is no proof of masking."
        )
    return notes


def _pair(aim: Aim) -> tuple[Entry, Entry] | None:
    """The strongest sound attack that is adaptive or asks for labels alone, and the strongest of the others; None where either is missing."""
    entries = [entry for entry in aim.entries if not entry.facts.controls.vacuous]
    knowing = [entry for entry in entries if entry.adaptive or LABEL_ONLY in entry.attack_kinds]
    plain = [entry for entry in entries if not any(entry is other for other in knowing)]
    return (max(knowing, key=_leak), max(plain, key=_leak)) if knowing and plain else None


def _found(aim: Aim, knowing: Entry, plain: Entry) -> str:
    shares = [
        f"{_quoted(entry.method)} {number(_leak(entry), 'percent')}" for entry in (knowing, plain)
    ]
    return spoken(f"{aim.label} · {' against '.join(shares)}")


def _quoted(method: str) -> str:
    """A name that has commas of its own needs quotes inside a list."""
    return f"“{method}”" if "," in method else method


def _leak(entry: Entry) -> float:
    return entry.leak.value
