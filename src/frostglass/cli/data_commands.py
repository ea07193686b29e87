"""The commands `data verify`, `data steps` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from frostglass.cli.options import JsonOption

data = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
Name = Annotated[str, typer.Argument(help="A published dataset, e.g. celeba.")]


@data.command(name="verify")
def verify_data(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="The folder with its files.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Count only: compare no hashes, which read whole files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare a dataset on disk with its published counts and hashes; exit 1 if it differs."""
    from frostglass.cli.data import verify_folder

    verify_folder(name, folder, quick=quick, as_json=as_json)


@data.command()
def steps(name: Name, as_json: JsonOption = False) -> None:
    """Print how to prepare a dataset; nothing is downloaded."""
    from frostglass.cli.data import print_steps

    print_steps(name, as_json=as_json)


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the model and its card.")],
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="LABEL", help="Which model of a grid, by an audit's label."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="The run's store, if it was moved.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Number the classes: their names are people's.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's model as a folder for a hub: weights and a card with the audit's numbers."""
    from frostglass.cli.data import export_model

    export_model(run, out, only, store, redact=redact, as_json=as_json)
