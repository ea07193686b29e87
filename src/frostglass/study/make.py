"""Make a study of finished runs: draw the people, the items and who sees what."""

import csv
import io
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from frostglass.core.errors import ConfigError, DataError, StoreError
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import full_disk_reported, remove_tree, write_bytes
from frostglass.store.hashing import file_hash
from frostglass.store.manifest import MANIFEST
from frostglass.study.answers import create_answers
from frostglass.study.assign import spread, trials_of
from frostglass.study.folder import (
    ANSWERS,
    FORMAT,
    LINKS,
    PROTOCOLS,
    Design,
    Item,
    Participant,
    Protocol,
    ShownModel,
    StudyFolder,
    write_folder,
)
from frostglass.study.items import CANDIDATES, Gallery, ItemMaker
from frostglass.study.material import Material, read_material

BOTH = "both"
MOST_TRIALS = 150  # of one participant: nobody looks well for longer
CHECK_EACH = 10  # trials for each attention check
FEWEST_CHECKS = 2


@dataclass(frozen=True)
class StudyOptions:
    """What a study asks, and of how many.

    Args:
        participants: links to give out.
        protocol: pairwise, identification or both; with both, each participant has one of them.
        raters: how many participants judge each item.
        people: people of the runs who are shown, drawn at random; all if there are fewer.
        seconds: time for a pairwise comparison.
        only: models to show, by name; all by default.
        attack: the attack whose reconstructions are shown; by default the strongest on each model.
        contact: whom a participant can ask; shown on the page that asks for consent.
        seed: of all draws but ids and links.
    """

    participants: int = 20
    protocol: str = BOTH
    raters: int = 5
    people: int = 20
    seconds: int = 60
    only: tuple[str, ...] = ()
    attack: str = ""
    contact: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"participants": 1, "raters": 1, "people": 1, "seconds": 5}
        problems = [
            f"{name}: expected at least {bound}, got {getattr(self, name)}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if self.protocol not in (*PROTOCOLS, BOTH):
            known = ", ".join((*PROTOCOLS, BOTH))
            problems.append(f"protocol: expected one of {known}, got {self.protocol!r}")
        if problems:
            raise ConfigError(problems)

    @property
    def protocols(self) -> list[Protocol]:
        return [each for each in PROTOCOLS if self.protocol in (each, BOTH)]


def make_study(runs: Sequence[Path], out: Path, options: StudyOptions | None = None) -> StudyFolder:
    """Write a study of finished runs to a new folder, with a link for each participant."""
    out, options = Path(out), options or StudyOptions()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already: a study needs a new folder for its answers")
    material = read_material(runs, only=options.only, attack=options.attack)
    _check_material(material, options)
    maker = ItemMaker(material, Gallery(), generator_for(options.seed, "study", "items"))
    design = design_of(maker, options, [file_hash(Path(run) / MANIFEST) for run in runs])
    # Made aside and renamed: a kill must not leave a study without its links or its answers.
    aside = out.with_name(f"{out.name}.partial")
    with full_disk_reported(out):
        try:
            remove_tree(aside)
            folder = write_folder(aside, design, maker.gallery.images)
            invite(folder)
            if out.exists():
                out.rmdir()
            aside.rename(out)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"cannot write {out} ({error.strerror}): choose another place"
            ) from error
    return replace(folder, path=out)


def _check_material(material: Material, options: StudyOptions) -> None:
    models = [source.label for source in material.sources]
    if "pairwise" in options.protocols and len(models) < 2:
        raise ConfigError(
            f"a pairwise study compares two models, but there is one ({models[0]}): give runs with "
            "at least two, such as two defenses, or --protocol identification"
        )
    everyone, shown = len(material.real), len(material.people)
    least = CANDIDATES + 1 if "identification" in options.protocols else 2
    if everyone < least or not shown:
        raise DataError(
            f"expected at least {least} people, got {everyone}, of whom {shown} have a whole "
            "reconstruction from every model: attack more people"
        )


def design_of(maker: ItemMaker, options: StudyOptions, runs: Sequence[str]) -> Design:
    """Draw the people, the items and who sees what."""
    material = maker.material
    rng = generator_for(options.seed, "study", "people")
    order = torch.randperm(len(material.people), generator=rng).tolist()
    people = sorted(material.people[place] for place in order[: options.people])
    makers = {"pairwise": maker.pairwise, "identification": maker.identification}
    asked = {each: makers[each](people) for each in options.protocols}
    items, participants = _participants(maker, people, asked, options)
    return Design(
        format=FORMAT,
        name=material.name,
        seed=options.seed,
        seconds=options.seconds,
        raters=options.raters,
        contact=options.contact,
        runs=list(dict.fromkeys(runs)),
        models=[
            ShownModel(label=each.label, attack=each.attack, vacuous=each.vacuous)
            for each in material.sources
        ],
        reconstructions=maker.reconstructions(people),
        items=items,
        participants=participants,
    )


def _participants(
    maker: ItemMaker,
    people: Sequence[int],
    asked: Mapping[Protocol, Sequence[Item]],
    options: StudyOptions,
) -> tuple[list[Item], list[Participant]]:
    """Return all items, checks included, and what each participant sees of them."""
    rng = generator_for(options.seed, "study", "participants")
    items: list[Item] = []
    participants: list[Participant] = []
    for protocol, count in _shares(asked, options).items():
        own = asked[protocol]
        loads = spread(own, count, options.raters, rng)
        heaviest = max(map(len, loads))
        if heaviest > MOST_TRIALS:
            raise ConfigError(
                f"{len(own)} {protocol} items, each judged by {options.raters} of {count} "
                f"participants, are {heaviest} for one, more than {MOST_TRIALS}: raise "
                "--participants, lower --people or --raters, or choose models with --only"
            )
        each = max(FEWEST_CHECKS, round(heaviest / CHECK_EACH))
        start, first_check = len(items), len(items) + len(own)
        items += [*own, *maker.checks(protocol, people, each * count)]
        for who, load in enumerate(loads):
            checks = range(first_check + each * who, first_check + each * (who + 1))
            trials = trials_of([start + number for number in load], checks, items, rng)
            # Random, not drawn from the seed, which may be published.
            name = f"p{secrets.token_hex(5)}"
            participants.append(Participant(id=name, protocol=protocol, trials=trials))
    return items, participants


def _shares(asked: Mapping[Protocol, Sequence[Item]], options: StudyOptions) -> dict[Protocol, int]:
    """Divide participants among protocols by their numbers of items."""
    least = options.raters * len(asked)
    if options.participants < least:
        raise ConfigError(
            f"--participants: expected at least {least}, because {options.raters} different people "
            f"judge each item of {len(asked)} protocols, got {options.participants}: raise it, or "
            "lower --raters"
        )
    total, left = sum(map(len, asked.values())), options.participants
    shares: dict[Protocol, int] = {}
    for place, (protocol, items) in enumerate(asked.items(), 1):
        others = options.raters * (len(asked) - place)
        wanted = round(options.participants * len(items) / total)
        shares[protocol] = left if not others else min(max(wanted, options.raters), left - others)
        left -= shares[protocol]
    return shares


def invite(folder: StudyFolder) -> None:
    """Write a link for each participant, and the empty answers."""
    tokens = {each.id: secrets.token_urlsafe(24) for each in folder.design.participants}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["participant", "protocol", "link"])
    for each in folder.design.participants:
        table.writerow([each.id, each.protocol, f"/p/{tokens[each.id]}"])
    write_bytes(folder.path / LINKS, text.getvalue().encode())
    create_answers(folder.path / ANSWERS, folder.id, tokens)


def study_links(folder: StudyFolder, address: str) -> list[str]:
    """Return the link of each participant, at the address where the study is served."""
    path = folder.path / LINKS
    if not path.is_file():
        raise StoreError(f"{path} is missing, and links cannot be made again: make a new study")
    text = path.read_bytes().decode(errors="replace")
    links = [row.get("link") or "" for row in csv.DictReader(io.StringIO(text))]
    if not links or not all(link.startswith("/p/") for link in links):
        raise StoreError(f"{path} is damaged, and links cannot be made again: make a new study")
    return [f"{address.rstrip('/')}{link}" for link in links]
