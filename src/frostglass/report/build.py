"""A report: one self-contained HTML page, and the JSON it was made from, out of finished runs.

Every number comes from a run's files, which are checked against each other first; nothing is measured here.
"""

import csv
import io
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor, uint8

from frostglass.attacks.base import attacks
from frostglass.checks import problems
from frostglass.errors import DataError, StoreError
from frostglass.experiments.files import full_disk_reported, read_tensors, write_bytes
from frostglass.experiments.grid import RUN_FORMAT
from frostglass.report.charts import LARGEST, SHAPES, Mark, frosted, listed, number, picture, scale, slug, span, toml, track

FILES = ("run.json", "rows.csv", "pictures.safetensors")
SHOWN = 16  # people in the first picture table; the others are folded away
PICTURE_BYTES = 2_000_000  # of all pictures of a page together: it should open on a phone

# The limits at which experiments.controls warns.
JUDGE_ACCURACY, ONLY_ONE, MANIFOLD, TARGET_SUCCESS, GUESSING = 0.9, 0.25, 1.5, 0.5, 0.2

TITLES = {"bido": "BiDO", "calor": "CALoR", "dpsgd": "DP-SGD", "mid": "MID"}
ATTACKERS = {
    "gradients": "an attacker who has its weights and public pictures of other people",
    "scores": "an attacker who may ask it for scores and has public pictures of other people",
    "labels": "an attacker who sees only the labels it answers and has public pictures of other people",
}
LOSS_TYPES = {"CE": {"ce"}, "margin or logit": {"margin", "logit"}, "Poincaré": {"poincare"}}
LABEL_ONLY = "label-only"
MASKED = "which may be masked gradients and not privacy"
CONVENTIONS = {
    "mean": "mean over all pictures and people (KED-MI, BiDO, LOMMA, TL-DMI, PPA, PLG-MI, CALoR)",
    "selected": "only the picture the model likes best (GMI)",
    "any": "a person counts when any picture succeeds (GMI, “acc5”)",
    "first": "only the first picture (BREP-MI)",
    "std_draws": "spread over pictures, as a standard deviation (BiDO)",
    "var_draws": "spread over pictures, as a variance (KED-MI)",
    "std_identities": "spread over people (VMI)",
    "top5": "among the judge's five best guesses, mean",
    "top5_last": "among the five best guesses, last picture only (LOMMA, TL-DMI)",
}


class Measured(BaseModel):
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class HeldOut(BaseModel):
    test: FiniteFloat


class Network(BaseModel):
    model: str
    parameters: int
    accuracy: HeldOut
    key: str


class ControlFacts(BaseModel):
    lift: dict[str, Measured]
    control_lift: dict[str, Measured]
    agreement: FiniteFloat | None
    only_one: FiniteFloat | None
    manifold: FiniteFloat | None
    vacuous: str
    warnings: list[str]


class Exposed(BaseModel):
    identity: str
    recognised: FiniteFloat


class AuditFacts(BaseModel):
    label: str
    seed: int
    defenses: list[dict[str, Any]]
    attack: dict[str, Any]
    prior: dict[str, Any]
    target: Network
    scores: dict[str, Measured]
    prior_only: dict[str, Measured]
    conventions: dict[str, dict[str, FiniteFloat]]
    controls: ControlFacts
    worst: list[Exposed]
    queries: int
    seconds: FiniteFloat
    keys: dict[str, str]


class RunFacts(BaseModel):
    """What a report needs of a run.json."""

    name: str
    settings: dict[str, Any]
    versions: dict[str, str]
    threads: int
    data: dict[str, Any]
    identities: list[str] = Field(min_length=1)
    evaluators: list[Network] = Field(min_length=1)
    audits: list[AuditFacts] = Field(min_length=1)


AimKind = Literal["undefended", "given", "defended"]
Tried = Literal["tried", "vacuous", "missing"]
Verdicts = dict[str, tuple[bool, ...]]  # by identity: does each judge recognise the first candidate?


@dataclass(frozen=True)
class LoadedRun:
    """One run's files, checked against each other: `document` is its run.json, `verdicts` has one entry an audit.

    `given` says that the audited model was brought as weights, so that nothing is known of how it was trained.
    """

    document: dict[str, Any]
    facts: RunFacts
    verdicts: tuple[Verdicts, ...]
    pictures: Mapping[str, Tensor]
    given: bool


@dataclass(frozen=True)
class Entry:
    """One audit as the page shows it."""

    label: str
    run: LoadedRun
    number: int

    @property
    def facts(self) -> AuditFacts:
        return self.run.facts.audits[self.number]

    @property
    def kind(self) -> AimKind:
        return "defended" if self.facts.defenses else "given" if self.run.given else "undefended"

    @property
    def defense(self) -> str:
        """The defenses by name; two targets may share it."""
        names = [str(defense.get("name")) for defense in self.facts.defenses]
        written = " + ".join(TITLES.get(name, name.replace("_", " ")) for name in names)
        return written or {"given": "given model"}.get(self.kind, self.kind)

    @property
    def name(self) -> str:
        return self.label.split(" · ")[0]

    @property
    def details(self) -> list[str]:
        return self.label.split(" · ")[1:]

    @property
    def judges(self) -> list[str]:
        return [f"top1_{place}" for place in range(1, len(self.run.facts.evaluators) + 1)]

    @property
    def strictest(self) -> str:
        return min(self.judges, key=lambda judge: self.facts.scores[judge].value)

    @property
    def leak(self) -> Measured:
        return self.facts.scores[self.strictest]

    @property
    def rebuilt(self) -> Tensor:
        return self.run.pictures[f"audit.{self.number}"]

    @property
    def marks(self) -> list[Mark]:
        scores, guesses = self.facts.scores, self.facts.prior_only
        return [Mark(scores[j].value, scores[j].low, scores[j].high, guesses[j].value) for j in self.judges]


@dataclass(frozen=True)
class Aim:
    """A model under audit with every attack tried on it; the strongest one counts."""

    name: str
    kind: AimKind
    entries: tuple[Entry, ...]

    @property
    def strongest(self) -> Entry:
        return max(self.entries, key=lambda entry: entry.leak.value)

    @property
    def vacuous(self) -> bool:
        return all(entry.facts.controls.vacuous for entry in self.entries)

    @property
    def accuracy(self) -> float:
        return self.strongest.facts.target.accuracy.test

    @property
    def stalled(self) -> bool:
        """Did the strongest attack fail to convince even the attacked model? Then a low score says little."""
        return self.strongest.facts.scores["target_top1"].value < TARGET_SUCCESS

    @property
    def losses(self) -> dict[str, Tried]:
        """Which kinds of attack were tried: a defense that hides gradients from one kind may not hide them from another."""
        kinds: dict[str, Tried] = dict.fromkeys([*LOSS_TYPES, LABEL_ONLY], "missing")
        for entry in self.entries:
            mine = [kind for kind, names in LOSS_TYPES.items() if entry.facts.attack.get("loss") in names]
            for kind in [*mine, *([LABEL_ONLY] if access(entry) == "labels" else [])]:
                if kinds[kind] != "tried":
                    kinds[kind] = "vacuous" if entry.facts.controls.vacuous else "tried"
        return kinds

    @property
    def untried(self) -> list[str]:
        return [kind for kind, tried in self.losses.items() if tried != "tried"]


@dataclass(frozen=True)
class Study:
    """Audits that may be compared: the same people, the same pictures, the same judges."""

    runs: tuple[LoadedRun, ...]
    entries: tuple[Entry, ...]
    aims: tuple[Aim, ...]
    picture_bytes: int

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(run.facts.name for run in self.runs))

    @property
    def first(self) -> RunFacts:
        return self.runs[0].facts

    @property
    def vacuous(self) -> bool:
        return all(aim.vacuous for aim in self.aims)

    @property
    def candidates(self) -> int:
        """Pictures kept of each person, at most."""
        return max(entry.rebuilt.shape[1] for entry in self.entries)

    @cached_property
    def answer(self) -> dict[str, Any]:
        return answer(self)

    @cached_property
    def tables(self) -> list[list[int]]:
        return picture_tables(self)

    @property
    def shown(self) -> int:
        return sum(map(len, self.tables))

    @property
    def hollow(self) -> dict[str, str]:
        """Why audits are vacuous: each reason once, with the audits it holds for."""
        reasons = {entry.facts.controls.vacuous for entry in self.entries} - {""}
        return {r: listed([e.label for e in self.entries if e.facts.controls.vacuous == r]) for r in sorted(reasons)}

    @property
    def untried(self) -> dict[str, str]:
        """Kinds of attack that are missing, with the models that were not put to them."""
        gaps = dict.fromkeys(listed(aim.untried) for aim in self.aims if aim.kind != "undefended" and aim.untried)
        return {gap: listed([aim.name for aim in self.aims if aim.kind != "undefended" and listed(aim.untried) == gap]) for gap in gaps}


def build_report(runs: Sequence[Path], out: Path, *, redact: bool = False) -> Path:
    """Write one HTML page about finished runs to `out`, and the JSON it was made from beside it.

    With `redact` faces are reduced to a few colours and names to letters before anything is written.
    """
    folders = list(dict.fromkeys(Path(run).resolve() for run in runs))
    out = Path(out)
    if not folders:
        raise DataError("a report needs at least one run folder, got none")
    if out.is_dir() or out.suffix == ".json":
        raise StoreError(f"{out} is no place for a page: give the name of a file, for example report.html")
    numbers = out.with_suffix(".json")
    if {out.resolve(), numbers.resolve()} & {folder / name for folder in folders for name in FILES}:
        raise StoreError(f"{out} and {numbers.name} would overwrite a run's own files: choose another name, for example report.html")
    loaded = [read_run(folder) for folder in folders]
    if redact:
        loaded = without_names_and_faces(loaded)
    studies = group(loaded)
    document = {
        "format": RUN_FORMAT,
        "redacted": redact,
        "answers": [{"runs": study.name, **study.answer} for study in studies],
        "runs": [run.document for run in loaded],
    }
    page = render(studies, redacted=redact)
    with full_disk_reported(out.parent):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(numbers, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
            write_bytes(out, page.encode())
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"cannot write {out} ({error.strerror}): choose another place") from error
    return out


def render(studies: Sequence[Study], *, redacted: bool) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"n": number, "spoken": spoken, "toml": toml, "slug": slug, "quoted": shlex.quote}
    template = environment.from_string(resources.files("frostglass.report").joinpath("template.html").read_text(encoding="utf-8"))
    return template.render(
        studies=studies, redacted=redacted, shapes=SHAPES, conventions=CONVENTIONS, loss_types=[*LOSS_TYPES, LABEL_ONLY],
        checks=checks, cell=cell, picture=picture, track=track, scale=scale, span=span, recognised=recognised,
    )  # fmt: skip


# Reading


def read_run(folder: Path) -> LoadedRun:
    """The files `write_run` wrote, refused unless they fit each other."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder: give the folder of a finished run")
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise StoreError(f"{folder} has no {missing[0]}, so it is not a finished run: give the folder that `frostglass run --out` wrote")
    path = folder / "run.json"
    try:
        # A setting may be infinite, which JSON has no word for; as text it survives, and a score that is not a number is refused below.
        document = json.loads(path.read_bytes(), parse_constant=str)
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}): run again to write it anew") from error
    if not isinstance(document, dict) or document.get("format") != RUN_FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise StoreError(f"{path} has format {json.dumps(found)}, expected {RUN_FORMAT}: run again with this version of frostglass")
    facts = _facts(path, document)
    pictures = _pictures(folder / "pictures.safetensors", facts)
    target, grid = facts.settings.get("target"), facts.settings.get("grid")
    given = bool(isinstance(target, dict) and target.get("weights")) or (isinstance(grid, dict) and "target.weights" in grid)
    return LoadedRun(document, facts, _verdicts(folder / "rows.csv", facts, pictures), pictures, given)


def _facts(path: Path, document: dict[str, Any]) -> RunFacts:
    try:
        facts = RunFacts.model_validate(document)
    except ValidationError as error:
        raise DataError(f"{path} is damaged ({problems(error)[0][:160]}): run again to write it anew") from None
    judges = [f"{kind}_{place}" for place in range(1, len(facts.evaluators) + 1) for kind in ("top1", "top5")]
    for audit in facts.audits:
        if absent := [name for name in ["target_top1", *judges] if name not in audit.scores or name not in audit.prior_only]:
            raise DataError(f"{path} has no {absent[0]} for audit {audit.label!r}: a report needs the accuracy metric")
        if not audit.controls.lift or not (audit.controls.vacuous or audit.controls.control_lift):
            raise DataError(f"{path} has no controls for audit {audit.label!r}, so it cannot be believed: run again")
    return facts


def _pictures(path: Path, facts: RunFacts) -> dict[str, Tensor]:
    pictures, _ = read_tensors(path)
    expected = {"private": 4} | {f"audit.{place}": 5 for place in range(len(facts.audits))}
    for name, dimensions in expected.items():
        if name not in pictures:
            raise DataError(f"{path} has no {name}, which run.json describes: run again to write it anew")
        found = pictures[name]
        if found.dtype != uint8 or found.ndim != dimensions or found.shape[-3] not in (1, 3) or not found.numel():
            raise DataError(f"{path}: {name} is {found.dtype} {tuple(found.shape)}, expected grey or colour pictures as bytes: run again")
    if len(pictures["private"]) != len(facts.identities):
        raise DataError(f"{path} has {len(pictures['private'])} private pictures for {len(facts.identities)} identities: run again")
    return pictures


def _verdicts(path: Path, facts: RunFacts, pictures: Mapping[str, Tensor]) -> tuple[Verdicts, ...]:
    """What each judge says of each person's first candidate, after checking that these rows are the ones the scores were made from."""
    try:
        lines = list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a table ({error}): run again to write it anew") from error
    found, start = [], 0
    for place, audit in enumerate(facts.audits):
        people, candidates = pictures[f"audit.{place}"].shape[:2]
        mine, start = lines[start : start + people * candidates], start + people * candidates
        columns = [[line.get(f"top1_{judge}") for line in mine] for judge in range(1, len(facts.evaluators) + 1)]
        firsts = mine[::candidates]
        names = [line.get("identity") or "" for line in firsts]
        verdicts = dict(zip(names, zip(*([told == "1" for told in column[::candidates]] for column in columns), strict=True), strict=True))
        if (
            len(mine) != people * candidates
            or {(line.get("audit"), line.get("candidate")) for line in firsts} != {(audit.label, "0")}
            or len(set(names) - {""}) != people
            or (place == 0 and names != facts.identities)
            or not all(_makes(audit.scores[f"top1_{judge}"], column) for judge, column in enumerate(columns, 1))
        ):
            raise DataError(f"{path} does not belong to its run.json (audit {audit.label!r}): run again to write both")
        found.append(verdicts)
    if start != len(lines):
        raise DataError(f"{path} has {len(lines)} rows where its run.json explains {start}: run again to write both")
    return tuple(found)


def _makes(score: Measured, column: Sequence[str | None]) -> bool:
    """Is the score the mean of this column of noughts and ones?"""
    return set(column) <= {"0", "1"} and math.isclose(column.count("1") / len(column), score.value, abs_tol=1e-5)


# Redacting


def without_names_and_faces(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    """The same runs with letters for people and a few colours for each face; a person has one letter in all of them."""
    names = dict.fromkeys(name for run in runs for name in [*run.facts.identities, *(n for v in run.verdicts for n in v)])
    cover = {name: f"person {_letters(place)}" for place, name in enumerate(names)}
    hide = _hider(cover)
    result = []
    for run in runs:
        document = _everywhere(hide, run.document)
        for plain, hidden in zip(run.document["audits"], document["audits"], strict=True):
            hidden["attack"] = _hidden_method(hide, plain["attack"])
            hidden["defenses"] = [_hidden_method(hide, defense) for defense in plain["defenses"]]
        for part in ("settings", "data"):
            document[part] = _everywhere(hide, run.document[part], keys=True)
        verdicts = tuple({cover[name]: verdict for name, verdict in some.items()} for some in run.verdicts)
        pictures = {name: frosted(pixels) for name, pixels in run.pictures.items()}
        result.append(LoadedRun(document, RunFacts.model_validate(document), verdicts, pictures, run.given))
    return result


def _hidden_method(hide: Callable[[str], str], method: Mapping[str, Any]) -> dict[str, Any]:
    """Names of methods and losses are this package's words and never people, whatever somebody called a folder."""
    return {key: value if key in ("name", "loss") else _everywhere(hide, value) for key, value in method.items()}


def _letters(place: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letter = chr(ord("A") + place % 26)
    return letter if place < 26 else _letters(place // 26 - 1) + letter


def _hider(cover: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces names in a text: as words of their own, or, for numbers and very short ones, as a whole text or path part."""
    names, patterns = sorted(cover, key=len, reverse=True), []
    for name in names:
        if len(name) < 3 or name.isdigit():
            patterns.append(rf"(?<![^/\\])({re.escape(name)})(?![^/\\])")
        else:
            left, right = (r"(?<![^\W_])" if name[0].isalnum() else "", r"(?![^\W_])" if name[-1].isalnum() else "")
            patterns.append(f"{left}({re.escape(name)}){right}")
    pattern = re.compile("|".join(patterns), re.IGNORECASE)
    # As it is written first: two people's names may differ in nothing but case.
    return lambda text: pattern.sub(lambda hit: cover.get(hit.group()) or cover[names[(hit.lastindex or 0) - 1]], text)


def _everywhere(change: Callable[[str], str], value: Any, *, keys: bool = False) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_everywhere(change, item, keys=keys) for item in value]
    if isinstance(value, dict):
        return {(change(key) if keys else key): _everywhere(change, item, keys=keys) for key, item in value.items()}
    return value


# Arranging


def group(runs: Sequence[LoadedRun]) -> list[Study]:
    """Runs on the same people with the same judges side by side, others apart."""
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        facts = run.facts
        groups.setdefault(json.dumps([facts.data.get("split"), facts.identities, [e.key for e in facts.evaluators]]), []).append(run)
    return [_study(members, PICTURE_BYTES // len(groups)) for members in groups.values()]


def _study(runs: Sequence[LoadedRun], picture_bytes: int) -> Study:
    entries = [Entry("", run, place) for run in runs for place in range(len(run.facts.audits))]
    # Runs may share an audit; it is shown once.
    entries = list({json.dumps([e.facts.keys, e.facts.controls.model_dump()]): e for e in reversed(entries)}.values())[::-1]
    entries.sort(key=lambda entry: ("undefended", "given", "defended").index(entry.kind))
    labels = distinct([entry.defense for entry in entries], [_flat(_choices(e) | _more_choices(e)) for e in entries])
    entries = [replace(entry, label=label) for entry, label in zip(entries, labels, strict=True)]
    aims: dict[str, list[Entry]] = {}
    for entry in entries:
        aims.setdefault(json.dumps([entry.kind, _choices(entry)]), []).append(entry)
    heads = [members[0] for members in aims.values()]
    names = distinct([head.defense for head in heads], [_flat(_choices(head)) for head in heads])
    made = [Aim(spoken(name), members[0].kind, tuple(members)) for name, members in zip(names, aims.values(), strict=True)]
    return Study(tuple(runs), tuple(entries), tuple(made), picture_bytes)


def _choices(entry: Entry) -> dict[str, Any]:
    """What makes a model another model."""
    return {"defense": entry.facts.defenses, "model": entry.facts.target.model}


def _more_choices(entry: Entry) -> dict[str, Any]:
    """What makes an audit of a model another audit."""
    facts = entry.facts
    return {"attack": facts.attack, "seed": facts.seed, "prior": facts.prior, "label": facts.label, "run": entry.run.facts.name}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested values by their dotted path."""
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [_flat(item, f"{path}.{key}" if path else str(key)) for key, item in items]
    return {key: item for part in inner for key, item in part.items()} if isinstance(value, dict | list) else {path: value}


def distinct(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that differ: equal ones get the first setting in which they differ, and so on until none are equal."""
    labels = list(names)
    while repeated := [label for label, times in Counter(labels).items() if times > 1]:
        for label in repeated:
            members = [place for place, other in enumerate(labels) if other == label]
            known = dict.fromkeys(key for place in members for key in facts[place])
            key = next((key for key in known if len({json.dumps(facts[place].get(key)) for place in members}) > 1), None)
            for count, place in enumerate(members, 1):
                labels[place] += f" · {key.rsplit('.', 1)[-1]}={facts[place].get(key, 'none')}" if key else f" · {count}"
    return labels


def spoken(label: str) -> str:
    """A label as part of a sentence: "CALoR · rank=3 · a=1" becomes "CALoR (rank=3, a=1)"."""
    name, *details = label.split(" · ")
    return f"{name} ({', '.join(details)})" if details else name


def access(entry: Entry) -> str:
    """The most an attack touches of the model; "" for an attack this version does not know."""
    name = entry.facts.attack.get("name")
    granted = attacks.get(name).access if name in attacks.names() else ()
    return next((level for level in ATTACKERS if level in granted), "")


# The answer


def answer(study: Study) -> dict[str, Any]:
    """The page's first sentences: `vacuous` says what proves nothing (in red), `sentences` what leaks and what a defense changes."""
    sound = [aim for aim in study.aims if not aim.vacuous]
    hollow = [aim for aim in study.aims if aim.vacuous]
    vacuous = _hollow_sentences(hollow, everything=not sound)
    sentences = []
    if sound:
        bases = [aim for aim in sound if aim.kind == "undefended"]
        lead = max(bases or sound, key=lambda aim: aim.strongest.leak.value)
        sentences = [_leak_sentence(lead), _change_sentence([aim for aim in sound if aim is not lead], lead, bases)]
    return {"vacuous": vacuous, "sentences": sentences}


def _hollow_sentences(aims: Sequence[Aim], *, everything: bool) -> list[str]:
    if not aims:
        return []
    subject = "This audit is VACUOUS" if everything else f"For {listed([aim.name for aim in aims])} this audit is VACUOUS"
    uncontrolled = any(not entry.facts.controls.control_lift for aim in aims for entry in aim.entries)
    reason = (
        "no positive control was run, so a failed attack cannot be told from a good defense"
        if uncontrolled
        else "the attack fails even on a model without any defense, so its failure on any other model proves nothing"
    )
    sentences = [f"{subject}: {reason}.", "A low number means a weak attack here, not a safe model."]
    # A broken model is broken, whatever the controls lack.
    leaks = [aim for aim in aims if min(lift.low for lift in aim.strongest.facts.controls.lift.values()) > GUESSING]
    return sentences + [f"A high number is a leak all the same: {_recognised(aim.strongest)} for {aim.name}." for aim in leaks]


def _leak_sentence(aim: Aim) -> str:
    entry = aim.strongest
    people, candidates = entry.rebuilt.shape[:2]
    judges = len(entry.judges)
    judge = {1: "an independent judge", 2: "the stricter of two independent judges"}.get(
        judges, f"the strictest of {judges} independent judges"
    )
    _, opening, details = aim.name.partition(" (")
    model = f"the model defended with {aim.name}" if aim.kind == "defended" else f"the {aim.kind} model{opening}{details}"
    who = ATTACKERS.get(access(entry), "an attacker with public pictures of other people")
    share, reach = number(entry.leak.value, "percent"), span(entry.leak)
    guess = f"guessing with the same prior: {number(entry.facts.prior_only[entry.strictest].value, 'percent')}"
    if candidates == 1:
        hits = number(round(entry.leak.value * people), "count")
        return (
            f"From {model}, {who} rebuilt {hits} of {number(people, 'count')} people so well that {judge} recognised them "
            f"({share}, interval {reach}{_lenient(entry)}; {guess})."
        )
    return (
        f"From {model}, {who} rebuilt {number(people, 'count')} people, and {judge} recognised the right person in {share} of "
        f"{number(people * candidates, 'count')} pictures (interval {reach}{_lenient(entry)}; {guess})."
    )


def _change_sentence(others: Sequence[Aim], lead: Aim, bases: Sequence[Aim]) -> str:
    """What the defended models change, each against the undefended model of its own architecture."""
    if not bases:
        return _uncompared_sentence(others, lead)
    defended = [aim for aim in others if aim.kind != "undefended"]
    if not defended:
        return "No defended model is part of this report, so it does not say what a defense would change."
    pairs = [(aim, next((base for base in bases if _architecture(base) == _architecture(aim)), lead)) for aim in defended]
    text = "; ".join(_change(aim, base) for aim, base in pairs) if len(pairs) <= 3 else _range(pairs)
    return text[0].upper() + text[1:] + "."


def _change(aim: Aim, base: Aim) -> str:
    entry, verdict = aim.strongest, change(aim, base)
    name, seen, price = aim.name if aim.kind == "defended" else f"the {aim.name}", _recognised(entry), _price(aim, base)
    if verdict == "lowers":
        text = f"{name} lowers this to {seen} and {price}"
    elif verdict == "raises":
        text = f"{name} does not lower it but raises it to {seen} and {price}"
    else:
        why = "the intervals overlap" if entry.leak.high >= base.strongest.leak.low else "not all judges see a difference"
        text = f"{name} does not lower it: {seen}, {why}; it {price}"
    if aim.stalled:
        text += f", but the attack did not take hold there (the model itself accepts {_success(entry)} of the pictures), {MASKED}"
    return text


def change(aim: Aim, base: Aim) -> Literal["lowers", "raises", "leaves"]:
    """A defense lowers leakage only if all judges say so beyond their intervals; it raises it if one does."""
    mine, theirs = aim.strongest.facts.scores, base.strongest.facts.scores
    judges = aim.strongest.judges
    if any(mine[judge].low > theirs[judge].high for judge in judges):
        return "raises"
    return "lowers" if all(mine[judge].high < theirs[judge].low for judge in judges) else "leaves"


def _price(aim: Aim, base: Aim) -> str:
    # The difference of what is printed, so that a reader who subtracts finds the same.
    before, after = round(base.accuracy, 3), round(aim.accuracy, 3)
    shown = f"{number(before, 'points')}\u00a0→\u00a0{number(after, 'percent')}"
    if before == after:
        return f"costs no accuracy on held-out pictures ({shown})"
    points = number(abs(before - after), "points")
    return (
        f"{'costs' if after < before else 'gains'} {points} point{'' if points == '1' else 's'} of accuracy on held-out pictures ({shown})"
    )


def _range(pairs: Sequence[tuple[Aim, Aim]]) -> str:
    leaks = sorted(aim.strongest.leak.value for aim, _ in pairs)
    costs = sorted(round(base.accuracy, 3) - round(aim.accuracy, 3) for aim, base in pairs)
    failing = [aim.name for aim, base in pairs if change(aim, base) != "lowers"]
    stalled = [aim.name for aim, _ in pairs if aim.stalled]
    text = (
        f"with the {len(pairs)} defended models it is between {number(leaks[0], 'percent')} and {number(leaks[-1], 'percent')}, and they cost "
        f"between {number(costs[0], 'points')} and {number(costs[-1], 'points')} points of accuracy on held-out pictures; "
    )
    text += f"{listed(failing)} {'does' if len(failing) == 1 else 'do'} not lower it" if failing else "all of them lower it"
    return text + (f"; the attack did not take hold on {listed(stalled)}, {MASKED}" if stalled else "")


def _uncompared_sentence(others: Sequence[Aim], lead: Aim) -> str:
    """For a report without an undefended model: all that is known of one is the positive control."""
    control = min(lead.strongest.facts.controls.control_lift.values(), key=lambda score: score.low)
    leaks = sorted(aim.strongest.leak.value for aim in others)
    stalled = [aim.name for aim in (lead, *others) if aim.stalled]
    text = ""
    if 0 < len(others) <= 3:
        text = f"for {listed([f'{aim.name} it is {_recognised(aim.strongest)}' for aim in others])}; "
    elif others:
        text = f"for the {len(others)} other models it is between {number(leaks[0], 'percent')} and {number(leaks[-1], 'percent')}; "
    text += (
        f"the same attack on an undefended model scores {number(control.value, 'points')} points above guessing "
        f"(at least {number(control.low, 'points')}), so it works there"
    )
    if stalled:
        text += f", but it did not take hold on {listed(stalled)}, {MASKED}"
    if any(aim.kind == "defended" for aim in (lead, *others)):
        text += "; that model is not part of this report, so the price of defending in accuracy cannot be told"
    return text[0].upper() + text[1:] + "."


def _architecture(aim: Aim) -> str:
    return aim.strongest.facts.target.model


def _success(entry: Entry) -> str:
    return number(entry.facts.scores["target_top1"].value, "percent")


def _recognised(entry: Entry) -> str:
    return f"{number(entry.leak.value, 'percent')} (interval {span(entry.leak)}{_lenient(entry)})"


def _lenient(entry: Entry) -> str:
    """The most generous judge's share, where it is so much higher that the strictest alone would flatter the model."""
    most = max(entry.facts.scores[judge].value for judge in entry.judges)
    who = "the other judge" if len(entry.judges) == 2 else "the most lenient judge"
    return f"; {number(most, 'percent')} by {who}" if most - entry.leak.value > 0.1 else ""


# Tables


Status = Literal["ok", "look", "fail", "void"]


@dataclass(frozen=True)
class Verdict:
    """One cell of the controls' table."""

    text: str
    status: Status
    detail: str = ""


def checks(study: Study) -> list[dict[str, Any]]:
    """Each control with what it means and a verdict for each audit; whatever passes in a vacuous audit is void."""

    def row(name: str, meaning: str, judge: Callable[[Entry], Verdict]) -> dict[str, Any]:
        cells = [(entry, judge(entry)) for entry in study.entries]
        void = [replace(v, status="void") if v.status == "ok" and e.facts.controls.vacuous else v for e, v in cells]
        return {"name": name, "meaning": meaning, "cells": void}

    def positive(entry: Entry) -> Verdict:
        controls = entry.facts.controls
        if not controls.control_lift:
            return Verdict("not run", "fail")
        worst = min(controls.control_lift.values(), key=lambda score: score.low)
        return Verdict(number(worst.value, "gain"), "fail" if controls.vacuous else "ok", f"at least {number(worst.low, 'points')}")

    def guessing(entry: Entry) -> Verdict:
        chance = max(entry.facts.prior_only[judge].value for judge in entry.judges)
        return Verdict(number(chance, "percent"), "look" if chance > GUESSING else "ok")

    def limited(value: float | None, kind: Any, fine: Callable[[float], bool], absent: str) -> Verdict:
        return Verdict(absent, "look") if value is None else Verdict(number(value, kind), "ok" if fine(value) else "look")

    return [
        row(
            "Positive control",
            "The same attack on an undefended model, above guessing. Where it fails there, its failure elsewhere proves nothing.", positive,
        ),
        row("Prior-only", "Random pictures from the attacker's generator, judged the same way. This much is luck.", guessing),
        row(
            "Judges agree", "Share of rebuilt pictures on which the first two judges say the same.",
            lambda e: limited(e.facts.controls.agreement, "percent", lambda v: v >= 1 - ONLY_ONE, "one judge only"),
        ),
        row(
            "Only one accepts", "Pictures that convince just one of the two may be false positives: images that fool a network and no person.",
            lambda e: limited(e.facts.controls.only_one, "percent", lambda v: v <= ONLY_ONE, "one judge only"),
        ),
        row(
            "Still a real picture?",
            "Distance to real public pictures, relative to the generator's own pictures. Far above 1 the attack has left the world of real ones.",
            lambda e: limited(e.facts.controls.manifold, "ratio", lambda v: v <= MANIFOLD, "not measured"),
        ),
        row(
            "Target success", "Does the attacked model itself accept the pictures? If not, the attack did not take hold, which is not privacy. "
            "High here and low for the judges: the model was fooled, the person was not found.",
            lambda e: limited(e.facts.scores["target_top1"].value, "percent", lambda v: v >= TARGET_SUCCESS, ""),
        ),
        *(_judge_check(place, judge, study.vacuous) for place, judge in enumerate(study.first.evaluators, 1)),
    ]  # fmt: skip


def _judge_check(place: int, judge: Network, vacuous: bool) -> dict[str, Any]:
    """A judge's own quality, which is the same for all audits."""
    right = judge.accuracy.test
    status: Status = "look" if right < JUDGE_ACCURACY else "void" if vacuous else "ok"
    meaning = f"Share of held-out private pictures this judge ({judge.model}) names correctly. A weak judge overlooks leaks."
    return {"name": f"Judge {place} itself", "meaning": meaning, "cells": [Verdict(number(right, "percent"), status)]}


def picture_tables(study: Study) -> list[list[int]]:
    """Places of the people shown: a first table, then tables for the rest; chosen by place, never by success."""
    largest = max(math.prod(min(side, LARGEST) if i else side for i, side in enumerate(e.rebuilt.shape[2:])) for e in study.entries)
    # 4/3 for base64, and the table's own text.
    column = (len(study.entries) + 1) * (largest * 4 / 3 + 200)
    people = len(study.first.identities)
    within = spread(people, max(1, min(people, int(study.picture_bytes / column))))
    first = [within[place] for place in spread(len(within), min(SHOWN, len(within)))]
    rest = [place for place in within if place not in set(first)]
    return [first, *(rest[start : start + SHOWN] for start in range(0, len(rest), SHOWN))]


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` places out of `total`, the same distance apart."""
    return [round(step * (total - 1) / max(1, wanted - 1)) for step in range(wanted)]


def cell(entry: Entry, identity: str) -> dict[str, Any] | None:
    """The picture shown for one person in one audit, and the judges' verdicts on it; None for somebody this audit did not attack."""
    verdicts = entry.run.verdicts[entry.number]
    if identity not in verdicts:
        return None
    place = list(verdicts).index(identity)
    return {"picture": picture(entry.rebuilt[place, 0]), "verdicts": verdicts[identity]}


def recognised(verdicts: Sequence[bool]) -> str:
    """Verdicts as words, for readers who cannot see the marks."""
    return ", ".join(f"judge {place} {'recognises' if yes else 'does not recognise'} it" for place, yes in enumerate(verdicts, 1))
