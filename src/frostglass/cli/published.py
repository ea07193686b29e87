"""The commands about published tables and claims, which `app` registers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from frostglass.cli.options import STORE, JsonOption, OutOption, StoreOption, ThreadsOption


def repro(
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="A table, e.g. bido-table3; `list papers`.")
    ],
    scale: Annotated[
        str,
        typer.Option(
            "--scale", help="small: embedded data; published: the paper's, which is yours."
        ),
    ] = "small",
    check: Annotated[
        bool, typer.Option("--check", help="Only report problems, or estimate time and memory.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Trainings of each model.")
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option("--configs", help="Folder of published settings, if not in a source tree."),
    ] = None,
    part: Annotated[
        int | None, typer.Option("--part", min=1, help="One part of the table alone, by number.")
    ] = None,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Reproduce a published table at a stated scale, and print ours beside theirs."""
    from frostglass.cli.repro import repro_table

    options: Any = {"check": check, "seeds": seeds, "configs": configs, "part": part}
    repro_table(name, scale, store, out, **options, as_json=as_json, threads=threads)


claims = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@claims.callback()
def _claims() -> None:
    """Keep results as claims, one file for each defense, attack and world."""


@claims.command()
def add(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, of all seeds.")],
    folder: Annotated[Path, typer.Option("--into", help="Folder of claims.")] = Path("claims"),
    min_seeds: Annotated[
        int, typer.Option("--min-seeds", min=1, help="Refuse audits with fewer seeds.")
    ] = 3,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace claims of another config or world.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a claim for each audit of finished runs: config, hash, numbers, seeds, versions."""
    from frostglass.cli.claims import add_claims

    add_claims(runs, folder, min_seeds=min_seeds, replace=replace, as_json=as_json)


def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Folder of claims.")] = Path("claims"),
    table: Annotated[
        str | None, typer.Option("--table", metavar="FORMAT", help="Print as markdown.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a folder of claims: each defense under the strongest of its attacks."""
    from frostglass.cli.claims import print_leaderboard

    print_leaderboard(folder, table, as_json=as_json)
