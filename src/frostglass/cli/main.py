"""The command line: it calls library functions and holds no logic. Heavy imports happen inside commands, so that help answers at once."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

HELP = """Train image models that cannot be inverted, and prove it by attacking them.

Start with [bold]frostglass demo[/bold]. Exit codes: 0 done, 1 a step failed or an audit proves nothing, 2 bad usage or config."""


class Commands(TyperGroup):
    """All commands run guarded, inside typer, which would otherwise answer for an interrupt and a closed pipe itself."""

    def invoke(self, ctx: Any) -> Any:
        raise typer.Exit(guarded(lambda: super(Commands, self).invoke(ctx)))


app = typer.Typer(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        help="Folder that keeps finished steps; a run that was stopped goes on from it.",
        envvar="FROSTGLASS_STORE",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value for machines.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting of the config, e.g. attack.steps=100; repeatable.",
    ),
]
PriorOption = Annotated[
    str | None,
    typer.Option(
        "--prior",
        metavar="SOURCE",
        help="Use your own generator instead of the config's prior: onnx:FILE, torchscript:FILE or MODULE:FUNCTION.",
    ),
]
LatentOption = Annotated[
    str | None,
    typer.Option(
        "--latent",
        metavar="KIND:SHAPE",
        help="What that generator takes, e.g. normal:512 or uniform:100x1x1.",
    ),
]
RangeOption = Annotated[
    str | None,
    typer.Option(
        "--range",
        metavar="BLACK:WHITE",
        help="What that generator puts out for black and white; -1:1 by default.",
    ),
]
ResizeOption = Annotated[
    bool, typer.Option("--resize", help="Accept pictures of another size from that generator.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for the run's numbers, pictures and report.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; all cores by default.")
]
RedactOption = Annotated[
    bool,
    typer.Option(
        "--redact", help="Blur faces and hide names in the report; the run's own files keep both."
    ),
]
STORE = Path(".frostglass")


@app.command()
def demo(
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    redact: RedactOption = False,
) -> None:
    """Audit an undefended and a defended model on embedded faces: the main job, in minutes."""
    from frostglass.cli.work import demo_settings, run_settings

    run_settings(demo_settings(), store, out, as_json=as_json, threads=threads, redact=redact)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file with one experiment or a grid.")],
    settings: SetOption = None,
    prior: PriorOption = None,
    latent: LatentOption = None,
    span: RangeOption = None,
    resize: ResizeOption = False,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    redact: RedactOption = False,
) -> None:
    """Run an experiment or a grid; run it again to resume."""
    from frostglass.audit.config import read_with_generator
    from frostglass.cli.work import run_settings

    values = read_with_generator(config, settings or (), prior, latent, span, resize=resize)
    run_settings(values, store, out, as_json=as_json, threads=threads, redact=redact)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A TOML file with one experiment or a grid.")],
    settings: SetOption = None,
    prior: PriorOption = None,
    latent: LatentOption = None,
    span: RangeOption = None,
    resize: ResizeOption = False,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of a config at once, and what it would cost; computes nothing."""
    from frostglass.audit.config import read_with_generator
    from frostglass.cli.work import check_settings

    check_settings(
        read_with_generator(config, settings or (), prior, latent, span, resize=resize),
        store,
        as_json=as_json,
    )


@app.command()
def protect(
    config: Annotated[
        Path, typer.Argument(help="A TOML file about a split model: one whose target has a cut.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the two halves, client and server.")
    ],
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="LABEL", help="Which experiment of a grid, by its label."),
    ] = None,
    settings: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Split a model: a client that lets out protected features only, and a server that answers them."""
    from frostglass.audit.config import read_config
    from frostglass.cli.features import protect_settings

    protect_settings(
        read_config(config, settings or ()), store, out, only, as_json=as_json, threads=threads
    )


@app.command()
def release(
    client: Annotated[Path, typer.Argument(help="The client folder that protect wrote.")],
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures.")],
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.")],
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the protection's random numbers.")
    ] = 0,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Protect pictures with a client: write the features that may leave the device. Run it again to resume."""
    from frostglass.cli.features import release_features

    release_features(client, pictures, out, seed=seed, as_json=as_json, threads=threads)


@app.command(name="list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="datasets, models, defenses, priors, attacks, feature_attacks or metrics; all of them if not given."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what exists, or what exists of a kind."""
    from frostglass.cli.work import list_kind

    list_kind(kind, as_json=as_json)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A method's name, e.g. gmi.")],
    as_json: JsonOption = False,
) -> None:
    """Explain a method: what it does, its parameters, its paper and where we differ from it."""
    from frostglass.cli.work import show_method

    show_method(name, as_json=as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[
        Path, typer.Option("--out", help="The HTML file to write; its JSON goes beside it.")
    ] = Path("report.html"),
    redact: RedactOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make one self-contained HTML file, and its JSON, from finished runs."""
    from frostglass.report.build import build_report

    path = build_report(runs, out, redact=redact)
    print(json.dumps({"report": str(path)}) if as_json else path)


@app.command()
def convert(
    kind: Annotated[str, typer.Argument(help="What the weights are of: stylegan2.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A pickle of NVIDIA's; it is read as data, and no code in it is run."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn published weights of a generator into safetensors, without unpickling them."""
    from frostglass.cli.work import convert_weights

    convert_weights(kind, source, out, force=force, as_json=as_json)


@app.command()
def doctor(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Say what this machine can run."""
    from frostglass.cli.work import diagnose

    diagnose(store, as_json=as_json)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(installed("frostglass"))
        raise typer.Exit


def guarded(command: Callable[[], Any]) -> int:
    """Run a command and turn the package's own errors into one line and an exit code; anything else is a bug and keeps its traceback."""
    from frostglass.core.errors import ConfigError, FrostglassError

    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # a reader that is gone is noticed here, and not while Python shuts down
    except FrostglassError as error:
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        lines = [" ".join(problem.splitlines()) for problem in problems]
        lines = [f"{len(lines)} problems", *lines] if len(lines) > 1 else lines
        print("frostglass: " + "\n  ".join(lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("frostglass: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # As for a process that the closed pipe killed, and never 0: the verdict of a run may not have been reached.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def main() -> None:
    """Entry point of the `frostglass` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # formulas and names go to any terminal, as they do on stderr
    if not sys.flags.safe_path:
        sys.path.append(
            ""
        )  # a model of the user's own, module:function, may lie in the current folder
    app()
