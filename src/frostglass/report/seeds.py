"""One table of audits repeated with several seeds: means, with intervals over people and seeds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frostglass.attacks.base import Surface
from frostglass.auditing.expand import NO_GRID
from frostglass.core.errors import DataError
from frostglass.metrics._stats import interval_over_seeds
from frostglass.metrics._tradeoff import drop_ratio
from frostglass.metrics.base import SHARES
from frostglass.report.load import AuditRows, Run
from frostglass.report.measures import further_names
from frostglass.report.tables import PlainTable, formatted

VARIED = ("seed", "defenses", "attack", "case")  # of a grid: known of each audit
CAPTION = (
    "Mean over people and seeds, with the 95 % interval over both; accuracy with its range over "
    "seeds. Verified: the deciding evaluator takes the reconstruction for the attacked person at a "
    "false-accept rate of 1 % (strict: 0.1 %, or the finest supported). First: by each person's "
    "first candidate; any: by any candidate. Top-1: a classifier of the private people ranks the "
    "person first, which is not recognition."
)
FEATURE_CAPTION = (
    "Mean over people, their attacked images and seeds, with the 95 % interval over people and "
    "seeds; MCC and AUC of the server's answers with their range over seeds. Similarity: cosine of "
    "reconstruction and true image in an embedder trained on other people. Verified: the deciding "
    "evaluator takes the reconstruction for the attacked person at a false-accept rate of 1 % "
    "(strict: 0.1 %, or the finest supported). Top-1: a classifier of the private people ranks the "
    "person first, which is not recognition."
)


@dataclass(frozen=True)
class Share:
    """The mean of a score over people and seeds, and its limits; most scores are shares."""

    value: float
    low: float
    high: float
    form: str = ".1%"

    def __str__(self) -> str:
        low, high = (format(limit, self.form) for limit in (self.low, self.high))
        return f"{self.value:{self.form}} ({low} to {high})"


@dataclass(frozen=True)
class SeedRow:
    """Audits that differ only in their seed; `notes` say what a reader must know."""

    surface: Surface
    label: str
    seeds: tuple[int, ...]
    people: int
    shares: Mapping[str, Share]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Audit:
    """One audit of a run: its part of run.json and its rows."""

    facts: Mapping[str, Any]
    rows: AuditRows

    def values(self, name: str, convention: str = "mean") -> Tensor:
        """Return one value per person: of the first candidate, the best one, or the mean."""
        values = self.rows.columns[name].double()
        return {"first": values[:, 0], "any": values.amax(1), "mean": values.mean(1)}[convention]


def seed_rows(runs: Sequence[Run]) -> list[SeedRow]:
    """Return a row for each set of audits that differ only in their seed.

    Which other defenses and cases their runs have does not matter.
    """
    groups: dict[_Key, list[_Audit]] = {}
    for run in runs:
        for key, audit in _audits(run):
            groups.setdefault(key, []).append(audit)
    titles = [key.label for key in groups]
    return [
        _row(
            key.label if titles.count(key.label) == 1 else f"{key.name}: {key.label}",
            audits,
            [
                other
                for own, others in groups.items()
                if own.settings == key.settings
                for other in others
            ],
        )
        for key, audits in groups.items()
    ]


class _Key(NamedTuple):
    """What audits have in common that differ only in their seed.

    `settings` are those of the run, without what varies in its grid; `method` is what applies to
    this audit of that.
    """

    settings: str
    method: str
    label: str

    @property
    def name(self) -> str:
        return str(json.loads(self.settings).get("name", "run"))


def _audits(run: Run) -> Iterator[tuple[_Key, _Audit]]:
    """Yield each audit of a run, with what it has in common with those of other seeds."""
    settings = {name: each for name, each in run.document["settings"].items() if name != "seed"}
    grid = settings.pop("grid", {})
    settings["grid"] = {name: each for name, each in grid.items() if name not in VARIED}
    cases = {case.get("case"): case for case in grid.get("case", ())}
    for facts, rows in zip(run.document["audits"], run.rows, strict=True):
        case = cases.get(facts.get("case"), [*cases.values()])
        method = [case, facts.get("attack"), facts.get("defenses")]
        label = without_seed(facts["label"], facts["seed"])
        common, own = (json.dumps(each, sort_keys=True) for each in (settings, method))
        yield _Key(common, own, label), _Audit(facts, rows)


def without_seed(label: str, seed: int | None) -> str:
    """Return the label of an audit in a grid without its seed."""
    return ", ".join(part for part in label.split(", ") if part != f"seed={seed}") or NO_GRID


def _row(label: str, audits: Sequence[_Audit], others: Sequence[_Audit]) -> SeedRow:
    audits = sorted(audits, key=lambda audit: audit.facts["seed"])
    seeds = tuple(audit.facts["seed"] for audit in audits)
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise DataError(f"audit {label!r} has seed {twice} twice: give each run once")
    if len({audit.rows.names for audit in audits}) > 1:
        raise DataError(f"the seeds of audit {label!r} attack different people: run them again")
    surface = audits[0].facts["surface"]
    shares = (_model_shares if surface == "model" else _feature_shares)(audits)
    shares |= _further(audits, surface)
    if surface == "model":
        shares |= _gain(audits, others)
    return SeedRow(surface, label, seeds, len(audits[0].rows.names), shares, _notes(audits))


def _model_shares(audits: Sequence[_Audit]) -> dict[str, Share]:
    deciding = _deciding(audits)
    return {
        "accuracy": _range([audit.facts["target"]["accuracy"]["test"] for audit in audits]),
        "verified, first": _share(audits, deciding, "first"),
        "verified, any": _share(audits, deciding, "any"),
        "strict, first": _share(audits, _strict(deciding), "first"),
        **_top1(audits),
        "verified, prior only": _baseline(audits, deciding),
    }


def _feature_shares(audits: Sequence[_Audit]) -> dict[str, Share]:
    """Return means over the attacked images of each person: they are no guesses at one image."""
    deciding, similarity = _deciding(audits), ["similarity"] * len(audits)
    utilities = {
        name: _range([audit.facts["utility"][f"mean_{name.lower()}"] for audit in audits])
        for name in ("MCC", "AUC")
    }
    return {
        **{name: replace(share, form=".2f") for name, share in utilities.items()},
        "similarity": replace(_share(audits, similarity), form=".2f"),
        "verified": _share(audits, deciding),
        "strict": _share(audits, _strict(deciding)),
        **_top1(audits),
        "verified, prior only": _baseline(audits, deciding),
    }


def _further(audits: Sequence[_Audit], surface: str) -> dict[str, Share]:
    """Return what configs asked for besides; of a value of the whole set, the range over seeds."""
    columns = further_names(audits[0].rows.columns, surface)
    shares = {name: _share(audits, [name] * len(audits)) for name in columns}
    for name in audits[0].facts.get("summaries", {}):
        if all(name in audit.facts.get("summaries", {}) for audit in audits):
            shares[name] = _range([audit.facts["summaries"][name]["value"] for audit in audits])
    forms = {name: ".1%" if name.startswith(SHARES) else ".3g" for name in shares}
    return {name: replace(share, form=forms[name]) for name, share in shares.items()}


def _gain(audits: Sequence[_Audit], others: Sequence[_Audit]) -> dict[str, Share]:
    """Return ΔAttAcc / ΔAcc against the same attack on the undefended models of the same seeds."""
    pairs = []
    for audit in (audit for audit in audits if audit.facts.get("defenses")):
        same = (
            other
            for other in others
            if not other.facts.get("defenses")
            and not other.facts["training"]["recipe"].get("weights")
            and other.rows.names == audit.rows.names
            and all(other.facts[key] == audit.facts[key] for key in ("attack", "seed", "case"))
        )
        if plain := next(same, None):
            pairs.append((plain, audit))
    if len(pairs) < len(audits):
        return {}
    undefended, own = (
        torch.stack([each.values("top1_1") for each in side]) for side in zip(*pairs, strict=True)
    )
    before, after = (
        sum(each.facts["target"]["accuracy"]["test"] for each in side) / len(side)
        for side in zip(*pairs, strict=True)
    )
    ratio = drop_ratio(undefended, own, before, after)
    return {} if ratio is None else {"Δ top-1 / Δ accuracy": Share(*ratio, form=".2f")}


def _deciding(audits: Sequence[_Audit]) -> list[str]:
    """Return the column of the evaluator whose verification decides, of each audit.

    The headline of an audit of features is another: similarity.
    """
    places = [[each["decides"] for each in audit.facts["evaluators"]] for audit in audits]
    return [f"verified_{1 + decides.index(True)}" for decides in places]


def _strict(deciding: Sequence[str]) -> list[str]:
    return [name.replace("verified", "strict") for name in deciding]


def _top1(audits: Sequence[_Audit]) -> dict[str, Share]:
    names = sorted(name for name in audits[0].rows.columns if name.startswith("top1_"))
    return {_title(audits[0], name): _share(audits, [name] * len(audits)) for name in names}


def _title(audit: _Audit, name: str) -> str:
    """Name a column of top-1 by its evaluator; two may have the same architecture."""
    number = int(name.rpartition("_")[2])
    return f"top-1, evaluator {number} ({audit.facts['evaluators'][number - 1]['model']})"


def _share(audits: Sequence[_Audit], names: Sequence[str], convention: str = "mean") -> Share:
    pairs = zip(audits, names, strict=True)
    values = torch.stack([audit.values(name, convention) for audit, name in pairs])
    return Share(values.mean().item(), *interval_over_seeds(values))


def _baseline(audits: Sequence[_Audit], names: Sequence[str]) -> Share:
    """Return the same for draws of the prior, averaged over candidates."""
    pairs = zip(audits, names, strict=True)
    values = torch.tensor([audit.facts["prior_only"][name]["by_identity"] for audit, name in pairs])
    return Share(values.mean().item(), *interval_over_seeds(values))


def _range(values: Sequence[float]) -> Share:
    return Share(sum(values) / len(values), min(values), max(values))


def _notes(audits: Sequence[_Audit]) -> tuple[str, ...]:
    """Say for which seeds an audit proves nothing, or shows that classifiers are fooled."""
    controls = [audit.facts["controls"] for audit in audits]
    counts = {
        "vacuous": sum(bool(each["vacuous"]) for each in controls),
        "classifiers fooled": sum(each["fooled"] for each in controls),
    }
    return tuple(
        text if count == len(audits) else f"{text} with {count} of {len(audits)} seeds"
        for text, count in counts.items()
        if count
    )


def seed_table(runs: Sequence[Run], form: str) -> str:
    """Return the table as Markdown or LaTeX with a caption, or as CSV with columns for limits."""
    rows = seed_rows(runs)
    if len({row.surface for row in rows}) > 1:
        raise DataError("expected audits of models, or of features, got both: make a table of each")
    columns = list(dict.fromkeys(name for row in rows for name in row.shares))
    return formatted((_numbers if form == "csv" else _texts)(rows, columns), form)


def _texts(rows: Sequence[SeedRow], columns: Sequence[str]) -> PlainTable:
    lines = []
    for row in rows:
        cells = [str(row.shares[name]) if name in row.shares else "–" for name in columns]
        seeds = ", ".join(map(str, row.seeds))
        lines.append([row.label, *cells, seeds, str(row.people), "; ".join(row.notes) or "–"])
    caption = CAPTION if rows[0].surface == "model" else FEATURE_CAPTION
    return PlainTable("Seeds", ["audit", *columns, "seeds", "people", "notes"], lines, caption)


def _numbers(rows: Sequence[SeedRow], columns: Sequence[str]) -> PlainTable:
    limits = [f"{name}{suffix}" for name in columns for suffix in ("", " low", " high")]
    lines = []
    for row in rows:
        values: list[str] = []
        for name in columns:
            share = row.shares.get(name)
            numbers = (share.value, share.low, share.high) if share else ("", "", "")
            values += [f"{number:.6g}" if number != "" else "" for number in numbers]
        seeds = " ".join(map(str, row.seeds))
        lines.append([row.label, *values, seeds, str(row.people), "; ".join(row.notes)])
    return PlainTable("Seeds", ["audit", *limits, "seeds", "people", "notes"], lines)
