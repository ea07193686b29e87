"""The commands about a store: `store show`, `store clean` and `store purge`."""

import typer

from frostglass.cli.options import STORE, JsonOption, StoreOption

stores = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@stores.command(name="show")
def show_steps(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List what a store holds, and the unfinished steps of stopped runs."""
    from frostglass.cli.stores import show_store

    show_store(store, as_json=as_json)


@stores.command()
def clean(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Remove unfinished steps of stopped runs, which could be resumed; finished ones stay."""
    from frostglass.cli.stores import clean_store

    clean_store(store, as_json=as_json)


@stores.command()
def purge(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Remove private images, their features and reconstructions; runs compute them again."""
    from frostglass.cli.stores import purge_store

    purge_store(store, as_json=as_json)
