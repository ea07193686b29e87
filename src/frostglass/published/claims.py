"""Claims: one JSON file for each defense, attack and world, with all that made its numbers."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from frostglass.auditing.expand import UNDEFENDED, defense_names, expand, flat_grid
from frostglass.core.errors import DataError, StoreError
from frostglass.core.parameters import problems
from frostglass.report.load import Run, read_run
from frostglass.report.seeds import SeedRow, seed_rows, without_seed
from frostglass.store.files import write_bytes
from frostglass.store.keys import digest

MIN_SEEDS = 3
ROUNDING = 1e-9  # of a mean of equal values
# What the numbers of two claims must share to stand in one table; the rest is the attacker's.
WORLD = ("data", "split", "target", "evaluators", "embedder", "judging", "metrics")
HEADLINES = {"model": ("verified, first", "accuracy"), "features": ("verified", "MCC")}


class Interval(BaseModel):
    """A mean over people and seeds with its 95 % interval; a range over seeds for utility."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat

    @model_validator(mode="after")
    def _is_ordered(self) -> "Interval":
        if not self.low - ROUNDING <= self.value <= self.high + ROUNDING:
            raise ValueError(f"expected low <= value <= high, got {self.low}, {self.value}, ...")
        return self


class Claim(BaseModel):
    """What was measured for one defense under one attack in one world.

    Args:
        format: of this file.
        world: name of the config. defense, attack: as in its grid.
        surface: what was attacked.
        config: the settings of the audit without its seed. config_hash, world_hash: of all of
            them, and of those that make numbers comparable.
        headline, utility: which of the `scores` decide.
        seeds, people: over which the scores are means.
        versions: of the code. notes: what a reader must know, such as a vacuous audit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1]
    world: str = Field(min_length=1)
    defense: str = Field(min_length=1)
    attack: str = Field(min_length=1)
    surface: Literal["model", "features"]
    config: dict[str, Any]
    config_hash: str
    world_hash: str
    headline: str
    utility: str
    scores: Mapping[str, Interval] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    people: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    notes: list[str]

    @model_validator(mode="after")
    def _is_consistent(self) -> "Claim":
        for name, found, expected in (
            ("config_hash", self.config_hash, config_hash(self.config)),
            ("world_hash", self.world_hash, world_hash(self.config)),
        ):
            if found != expected:
                raise ValueError(f"{name} is {found}, and its config has {expected}")
        if missing := [name for name in (self.headline, self.utility) if name not in self.scores]:
            raise ValueError(f"scores: expected {missing[0]!r} among them")
        if len(set(self.seeds)) < len(self.seeds) or "seed" in self.config:
            raise ValueError("seeds: expected each once, and none in config")
        return self

    @property
    def value(self) -> Interval:
        """The share of people who are recognised."""
        return self.scores[self.headline]

    @property
    def path(self) -> Path:
        """Where the claim belongs in a folder of claims."""
        return Path(_slug(self.world)) / f"{_slug(self.defense)}--{_slug(self.attack)}.json"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the hash of an audit's settings; its name says nothing about its numbers."""
    return digest({name: value for name, value in config.items() if name != "name"})


def world_hash(config: Mapping[str, Any]) -> str:
    """Return the hash of the settings that make numbers comparable."""
    return digest({name: config.get(name) for name in WORLD})


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "audit"


def read_claim(path: Path) -> Claim:
    """Read and check a claim; raises DataError or StoreError."""
    try:
        return Claim.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        line = problems(error)[0][:200]
        raise DataError(
            f"{path} is no claim ({line}): write it with `frostglass claims add`"
        ) from None


def read_claims(folder: Path) -> list[Claim]:
    """Return all claims of a folder; refuse files that contradict their place or each other."""
    if not folder.is_dir():
        raise StoreError(f"no folder of claims at {folder}: write one with `frostglass claims add`")
    found = []
    worlds: dict[str, str] = {}
    for path in sorted(folder.rglob("*.json")):
        claim = read_claim(path)
        if path.relative_to(folder) != claim.path:
            raise DataError(f"{path} is a claim that belongs at {folder / claim.path}: move it")
        if worlds.setdefault(claim.world, claim.world_hash) != claim.world_hash:
            raise DataError(
                f"{path} is about another world named {claim.world!r} (hash {claim.world_hash}, "
                f"others have {worlds[claim.world]}): rename it"
            )
        found.append(claim)
    if not found:
        raise StoreError(f"{folder} has no claims: write some with `frostglass claims add`")
    return found


def claims_of(folders: Sequence[Path], *, min_seeds: int = MIN_SEEDS) -> list[Claim]:
    """Return a claim for each audit of finished runs; seeds of one config are joined."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        run = read_run(folder)
        if unfinished := [*run.facts.failed, *run.facts.not_run]:
            raise DataError(
                f"{folder} is unfinished ({len(unfinished)} audits are missing): run the same "
                "command again until it is whole"
            )
        groups.setdefault(digest(_without_seeds(run.document["settings"])), []).append(run)
    claims = []
    for runs in groups.values():
        settings = runs[0].document["settings"]
        configs = {
            without_seed(label, config.get("seed")): config for label, config in expand(settings)
        }
        for row in seed_rows(runs):
            if len(row.seeds) < min_seeds:
                raise DataError(
                    f"audit {row.label!r} has {len(row.seeds)} seeds, expected at least "
                    f"{min_seeds}: give the runs of all seeds, or lower --min-seeds"
                )
            claims.append(_claim(row, configs[row.label], runs[0]))
    return claims


def _without_seeds(settings: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in settings.items() if name != "seed"}
    grid = {name: value for name, value in plain.get("grid", {}).items() if name != "seed"}
    return plain | {"grid": grid}


def _claim(row: SeedRow, values: Mapping[str, Any], run: Run) -> Claim:
    config = {name: value for name, value in values.items() if name not in ("seed", "name")}
    facts = next(
        audit
        for audit in run.document["audits"]
        if without_seed(audit["label"], audit["seed"]) == row.label
    )
    headline, utility = HEADLINES[row.surface]
    return Claim(
        format=1,
        world=_world(run.document, config),
        defense=defense_names(config.get("defenses", []), full=True) or UNDEFENDED,
        attack=facts["case"] or facts["attack"]["name"],
        surface=row.surface,
        config=config,
        config_hash=config_hash(config),
        world_hash=world_hash(config),
        headline=headline,
        utility=utility,
        scores={
            name: Interval(value=share.value, low=share.low, high=share.high)
            for name, share in row.shares.items()
        },
        seeds=list(row.seeds),
        people=row.people,
        versions=run.document["versions"],
        notes=list(row.notes),
    )


def _world(document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of a run, with what its grid varies besides defenses, attacks and seeds."""
    varied = [
        path
        for path in flat_grid(document["settings"].get("grid", {}))
        if path not in ("defenses", "case", "seed")
    ]
    return ", ".join([str(document["name"]), *(f"{path}={_at(config, path)}" for path in varied)])


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[int(part) if isinstance(config, list) else part]
    return config


def write_claims(claims: Sequence[Claim], folder: Path, *, replace: bool = False) -> list[Path]:
    """Write claims to their places, all or none; one of another config needs `replace`."""
    paths = [folder / claim.path for claim in claims]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"two audits would be written to {twice}: give their cases other names")
    present = read_claims(folder) if folder.is_dir() and any(folder.rglob("*.json")) else []
    known = {claim.path: claim for claim in present}
    worlds = {claim.world: claim.world_hash for claim in present}
    for claim in claims:
        old = known.get(claim.path)
        if old is not None and old.config_hash != claim.config_hash and not replace:
            raise DataError(
                f"{folder / claim.path} is of another config (hash {old.config_hash}, this run has "
                f"{claim.config_hash}): give another folder, or --replace"
            )
        if worlds.get(claim.world, claim.world_hash) != claim.world_hash and not replace:
            raise DataError(
                f"{folder} has claims of another world named {claim.world!r} (hash "
                f"{worlds[claim.world]}, this run has {claim.world_hash}): name the config "
                "differently"
            )
    for claim, path in zip(claims, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(claim.model_dump(), indent=1, ensure_ascii=False) + "\n"
        write_bytes(path, text.encode())
    return paths
