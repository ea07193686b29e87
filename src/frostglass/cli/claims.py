"""The commands `claims add` and `leaderboard`: call the library, print."""

import json
from pathlib import Path

from frostglass.cli.tables import print_table
from frostglass.core.errors import ConfigError
from frostglass.published.claims import claims_of, read_claims, write_claims
from frostglass.published.leaderboard import CAPTION, cells, leaderboard, markdown


def add_claims(
    runs: list[Path], folder: Path, *, min_seeds: int, replace: bool, as_json: bool
) -> None:
    """Write a claim for each audit of finished runs."""
    paths = write_claims(claims_of(runs, min_seeds=min_seeds), folder, replace=replace)
    print(json.dumps([str(path) for path in paths]) if as_json else "\n".join(map(str, paths)))


def print_leaderboard(folder: Path, table: str | None, *, as_json: bool) -> None:
    """Print the claims of a folder as a table."""
    if table not in (None, "markdown"):
        raise ConfigError(f"--table: expected markdown, got {table!r}")
    places = leaderboard(read_claims(folder))
    if as_json:
        rows = [
            place.claim.model_dump(exclude={"config"}) | {"attacks": place.attacks}
            for place in places
        ]
        print(json.dumps(rows))
    elif table:
        print(markdown(places), end="")
    else:
        left = ["world", "defense", "strongest attack", "notes"]
        print_table(f"claims in {folder}", [cells(place) for place in places], left=left)
        print(CAPTION)
