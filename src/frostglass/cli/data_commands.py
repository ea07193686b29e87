"""The commands about datasets: `data verify` and `data steps`."""

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
