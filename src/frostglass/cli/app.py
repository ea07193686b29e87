"""The commands: they call library functions and hold no logic.

Heavy imports happen inside commands, so that help answers at once.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from frostglass.cli.audit import audit
from frostglass.cli.data_commands import data, export
from frostglass.cli.human_study import human_study
from frostglass.cli.main import guarded
from frostglass.cli.options import (
    STORE,
    Config,
    DevicesOption,
    JsonOption,
    LatentOption,
    LogOption,
    NoImagesOption,
    OutOption,
    PriorOption,
    QueryBudgetOption,
    RangeOption,
    RedactOption,
    ResizeOption,
    SetOption,
    StoreOption,
    ThreadsOption,
    TimeBudgetOption,
    TrustOption,
)
from frostglass.cli.published import claims, leaderboard, repro
from frostglass.cli.store_commands import stores
from frostglass.cli.workers import AddressOption, OnOption, Spread, WorkersOption

HELP = """Train image models that cannot be inverted, and prove it by attacking them.

Start with [bold]frostglass demo[/bold]. Exit codes: 0 done, 1 a step failed or an audit proves
nothing, 2 bad usage or config, 3 a time budget ended the run."""


class Commands(TyperGroup):
    """Runs all commands guarded: typer would handle interrupts and closed pipes itself."""

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

app.add_typer(stores, name="store", help="Manage the folder of finished steps.")
app.add_typer(claims, name="claims", help="Keep results as files that can be checked.")
app.add_typer(human_study, name="study", help="Ask people what they see in reconstructions.")
app.add_typer(data, name="data", help="Check datasets on disk.")
app.command()(audit)


@app.command()
def demo(
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
    workers: WorkersOption = None,
    redact: RedactOption = False,
    log: LogOption = None,
) -> None:
    """Audit an undefended and a defended model on embedded faces, in minutes."""
    from frostglass.auditing.config_file import demo_config
    from frostglass.cli.run import run_settings

    spread = Spread(workers, devices=devices)
    options: Any = {"as_json": as_json, "threads": threads, "spread": spread, "redact": redact}
    run_settings(demo_config(), store, out, **options, log=log)


@app.command()
def run(
    config: Config,
    settings: SetOption = None,
    prior: PriorOption = None,
    latent: LatentOption = None,
    span: RangeOption = None,
    resize: ResizeOption = False,
    trust: TrustOption = False,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
    workers: WorkersOption = None,
    on: OnOption = None,
    address: AddressOption = None,
    redact: RedactOption = False,
    no_images: NoImagesOption = False,
    time_budget: TimeBudgetOption = None,
    query_budget: QueryBudgetOption = None,
    log: LogOption = None,
) -> None:
    """Run an experiment or a grid, on a model or on features; run it again to resume."""
    from frostglass.auditing.config_file import read_with_generator
    from frostglass.cli.run import run_settings

    spread = Spread(workers, on, address, devices)
    chosen = [*(settings or ()), *([f"query_budget={query_budget}"] if query_budget else [])]
    values = read_with_generator(config, chosen, prior, latent, span, resize=resize, trust=trust)
    options: Any = {"as_json": as_json, "threads": threads, "spread": spread, "redact": redact}
    options |= {"images": not no_images, "time_budget": time_budget, "log": log}
    run_settings(values, store, out, **options)


@app.command()
def check(
    config: Config,
    settings: SetOption = None,
    prior: PriorOption = None,
    latent: LatentOption = None,
    span: RangeOption = None,
    resize: ResizeOption = False,
    trust: TrustOption = False,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of a config at once, or estimate its time and memory by a dry run."""
    from frostglass.auditing.config_file import read_with_generator
    from frostglass.cli.run import check_settings

    options = {"resize": resize, "trust": trust}
    values = read_with_generator(config, settings or (), prior, latent, span, **options)
    check_settings(values, store, as_json=as_json)


@app.command()
def harden(
    config: Annotated[
        Path, typer.Argument(help="A TOML file with one audit of a model, or of features.")
    ],
    accuracy: Annotated[
        float | None,
        typer.Option("--accuracy", help="The least accuracy you accept of a model, e.g. 0.95."),
    ] = None,
    protect: Annotated[
        bool,
        typer.Option("--protect", help="Tune protections of features that leave a device."),
    ] = False,
    utility: Annotated[
        float | None,
        typer.Option(
            "--utility", help="With --protect: the least utility of the server's answers, e.g. 0.8."
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure", help="That utility, a mean over attributes: mcc (by default) or auc."
        ),
    ] = None,
    defenses: Annotated[
        str | None,
        typer.Option(
            "--defenses",
            metavar="NAMES",
            help="Defenses to tune, alone and in pairs, e.g. calor,bido or adv_learn,crafter.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", help="Time for trials, e.g. 90m, or their number: 30 trials.")
    ] = "2h",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of the final table.")] = 3,
    attacks: Annotated[
        Path | None,
        typer.Option("--attacks", help="A TOML file of tables named case: the final attacks."),
    ] = None,
    settings: SetOption = None,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
    workers: WorkersOption = None,
    on: OnOption = None,
    address: AddressOption = None,
    redact: RedactOption = False,
) -> None:
    """Find the defense that leaks least at a utility you accept; run it again to resume."""
    from frostglass.auditing.config_file import read_config
    from frostglass.cli.harden import Request, harden_settings

    request = Request(accuracy, protect, utility, measure, defenses, budget, seeds, attacks)
    spread = Spread(workers, on, address, devices)
    values = read_config(config, settings or ())
    options: Any = {"as_json": as_json, "threads": threads, "spread": spread, "redact": redact}
    harden_settings(values, store, out, request, **options)


@app.command()
def robustness(
    config: Config,
    settings: SetOption = None,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
) -> None:
    """Measure adversarial examples and backdoors on the models of a config, per defense."""
    from frostglass.auditing.config_file import read_config
    from frostglass.cli.robustness import robustness_settings

    values = read_config(config, settings or ())
    options: Any = {"as_json": as_json, "threads": threads, "devices": devices}
    robustness_settings(values, store, out, **options)


@app.command()
def analyze(
    name: Annotated[str, typer.Argument(help="An analysis, e.g. fisher; `list analyses` has all.")],
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file with one experiment or a grid; toy_world needs none."),
    ] = None,
    settings: SetOption = None,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
) -> None:
    """Explain why models leak: an analysis of a config, as tables and figures.

    Parameters of the analysis are set as analysis.NAME=VALUE.
    """
    from frostglass.cli.analyze import analyze_config

    chosen = settings or ()
    options: Any = {"as_json": as_json, "threads": threads, "devices": devices}
    analyze_config(name, config, chosen, store, out, **options)


@app.command()
def protect(
    config: Annotated[Path, typer.Argument(help="A TOML file about a split model (target.cut).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the halves, client and server.")],
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="LABEL", help="Which experiment of a grid, by its label."),
    ] = None,
    settings: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    devices: DevicesOption = None,
) -> None:
    """Split a model: a client that releases protected features, and a server that uses them."""
    from frostglass.auditing.config_file import read_config
    from frostglass.cli.split import protect_settings

    values = read_config(config, settings or ())
    options: Any = {"as_json": as_json, "threads": threads, "devices": devices}
    protect_settings(values, store, out, only, **options)


@app.command()
def release(
    client: Annotated[Path, typer.Argument(help="The client folder that protect wrote.")],
    images: Annotated[Path, typer.Argument(help="A folder of images.")],
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.")],
    seed: Annotated[int, typer.Option("--seed", help="Seed of the protection's noise.")] = 0,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Write the protected features that a client releases for images; run it again to resume."""
    from frostglass.cli.split import release_features

    release_features(client, images, out, seed=seed, as_json=as_json, threads=threads)


for command in (repro, leaderboard, export):
    app.command()(command)


@app.command(name="list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="datasets, models, defenses, priors, attacks, metrics, threats, analyses or "
            "papers; all by default."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List all methods, plugins included, or those of one kind."""
    from frostglass.cli.show import list_kind

    list_kind(kind, as_json=as_json)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A method, e.g. gmi or MODULE:CLASS, or a table: bido-table3.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Explain a method: parameters, paper and where the code differs; or print a table."""
    from frostglass.cli.show import show_method

    show_method(name, as_json=as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[
        Path, typer.Option("--out", help="The HTML file to write; its JSON goes beside it.")
    ] = Path("report.html"),
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="FORMAT",
            help="Print a table instead, markdown, csv or latex: means over seeds, with intervals.",
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--tables", help="Also write every table of the page here, as CSV, Markdown and LaTeX."
        ),
    ] = None,
    redact: RedactOption = False,
    no_images: NoImagesOption = False,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Where the store of these runs is now, if it was moved."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one self-contained HTML file, and its JSON, from finished runs of either surface."""
    if table is not None:
        from frostglass.report.load import read_run
        from frostglass.report.seeds import seed_table

        print(seed_table([read_run(folder) for folder in runs], table), end="")
        return
    from frostglass.cli.run import report_runs

    look: Any = {"redact": redact, "images": not no_images, "tables": tables}
    report_runs(runs, out, store, as_json=as_json, **look)


@app.command()
def convert(
    kind: Annotated[str, typer.Argument(help="Kind of generator: stylegan2.")],
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A pickle published by NVIDIA; its code is not run."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert published weights of a generator to safetensors, without unpickling them."""
    from frostglass.cli.show import convert_weights

    convert_weights(kind, source, out, force=force, as_json=as_json)


@app.command()
def doctor(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Describe this machine: versions, cores, memory, device and CPU kernels."""
    from frostglass.cli.show import diagnose

    diagnose(store, as_json=as_json)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(installed("frostglass"))
        raise typer.Exit
