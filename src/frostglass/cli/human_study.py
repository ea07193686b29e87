"""The commands about a study with people: `study make`, `links`, `serve` and `results`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from frostglass.cli.options import JsonOption

human_study = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
StudyArgument = Annotated[
    Path, typer.Argument(metavar="STUDY", help="The folder that study make wrote.")
]


@human_study.command()
def make(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for the study and its answers.")],
    participants: Annotated[
        int, typer.Option("--participants", help="How many people get a link.")
    ] = 20,
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol",
            help="pairwise (which of two resembles the person more), identification (whom of four "
            "does it show) or both; each participant has one of them.",
        ),
    ] = "both",
    raters: Annotated[int, typer.Option("--raters", help="Participants who judge each item.")] = 5,
    people: Annotated[
        int, typer.Option("--people", help="People of the runs to show, drawn at random.")
    ] = 20,
    seconds: Annotated[int, typer.Option("--seconds", help="Time for a pairwise comparison.")] = 60,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="MODEL", help="Show this model; repeatable. All by default."
        ),
    ] = None,
    attack: Annotated[
        str,
        typer.Option("--attack", help="Show this attack; by default the strongest on each model."),
    ] = "",
    contact: Annotated[
        str, typer.Option("--contact", help="Whom participants can ask; shown before consent.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Seed of people, items and orders.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a study of finished runs, with a link for each participant."""
    from frostglass.cli.study_tables import print_design
    from frostglass.study.make import StudyOptions, make_study

    options = StudyOptions(
        participants, protocol, raters, people, seconds, tuple(only or ()), attack, contact, seed
    )
    print_design(make_study(runs, out, options), as_json=as_json)


@human_study.command()
def links(
    study: StudyArgument,
    address: Annotated[
        str, typer.Option("--address", help="Where participants reach the server.")
    ] = "http://127.0.0.1:8000",
) -> None:
    """Print the link of each participant: a key to private images, for that person alone."""
    from frostglass.study.folder import read_study
    from frostglass.study.make import study_links

    print("\n".join(study_links(read_study(study), address)))


@human_study.command()
def serve(
    study: StudyArgument,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; this machine alone by default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 picks one.")] = 8000,
) -> None:
    """Serve a study until Ctrl-C; run it again to go on, no answer is lost."""
    from frostglass.study.serve import is_local, serve_study

    def ready(address: str) -> None:
        print(f"study served at {address}; Ctrl-C stops it", file=sys.stderr, flush=True)
        if not is_local(host):
            print(
                "note: other machines can reach it, without encryption: put a proxy with TLS "
                "before it",
                file=sys.stderr,
                flush=True,
            )

    serve_study(study, host, port, ready)


@human_study.command()
def results(
    study: StudyArgument,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="The file of answers, if it is elsewhere."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what people answered, with intervals, agreement and every metric beside it."""
    from frostglass.cli.study_tables import print_results
    from frostglass.study.results import study_results

    found = study_results(study, answers)
    print(json.dumps(found.plain())) if as_json else print_results(found)
