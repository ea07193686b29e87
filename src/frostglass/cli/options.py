"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="A TOML file with one experiment or a grid.")]
StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        help="Folder of finished steps; a stopped run resumes from it.",
        envvar="FROSTGLASS_STORE",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting of the config, e.g. attack.steps=100, or all that a TOML file has; "
        "repeatable.",
    ),
]
PriorOption = Annotated[
    str | None,
    typer.Option(
        "--prior",
        metavar="SOURCE",
        help="Use your own generator instead of the config's prior: onnx:FILE, torchscript:FILE "
        "or MODULE:FUNCTION.",
    ),
]
LatentOption = Annotated[
    str | None,
    typer.Option(
        "--latent",
        metavar="KIND:SHAPE",
        help="That generator's input, e.g. normal:512 or uniform:100x1x1.",
    ),
]
RangeOption = Annotated[
    str | None,
    typer.Option(
        "--range",
        metavar="BLACK:WHITE",
        help="That generator's output for black and white; -1:1 by default.",
    ),
]
ResizeOption = Annotated[
    bool, typer.Option("--resize", help="Accept images of another size from that generator.")
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="Read a TorchScript generator, which can run code when read."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for the run's numbers, images and report.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads; all cores by default.")
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        help="Processes that train each network together, with a GPU each if there are GPUs; "
        "FROSTGLASS_DEVICES or 1 by default.",
    ),
]
RedactOption = Annotated[
    bool,
    typer.Option("--redact", help="Blur faces and hide names in the report; run files keep both."),
]
NoImagesOption = Annotated[
    bool,
    typer.Option("--no-images", help="Leave every image out of the report; run files keep them."),
]
TimeBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        metavar="TIME",
        help="Compute nothing more after this time, e.g. 30m; report what is finished.",
    ),
]
QueryBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--query-budget", min=1, help="Images an attack may show to the target, per person."
    ),
]
LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="KIND:PLACE",
        help="Send values to tensorboard:DIR, mlflow:DIR or wandb:DIR; FROSTGLASS_LOG by default.",
    ),
]
STORE = Path(".frostglass")
