"""The command `audit`: an audit of a model that its owner has, without a config."""

from pathlib import Path
from typing import Annotated, Any

import typer

from frostglass.cli.options import (
    STORE,
    JsonOption,
    LatentOption,
    LogOption,
    NoImagesOption,
    OutOption,
    PriorOption,
    RangeOption,
    RedactOption,
    ResizeOption,
    SetOption,
    StoreOption,
    ThreadsOption,
    TimeBudgetOption,
)
from frostglass.cli.workers import Spread, WorkersOption

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A checkpoint (with --arch), a TorchScript or ONNX file, MODULE:FUNCTION, or the "
        "address of an endpoint, https://host/path."
    ),
]
PrivateOption = Annotated[
    Path, typer.Option("--private", help="Images the model was trained on; a folder a person.")
]
PublicOption = Annotated[
    Path | None, typer.Option("--public", help="Images of other people, an attacker's.")
]
ArchOption = Annotated[
    str, typer.Option("--arch", help="The network of a checkpoint, e.g. timm:resnet18.")
]
ClassesOption = Annotated[
    Path | None,
    typer.Option("--classes", help="A file with the people in the order of the outputs."),
]
SizeOption = Annotated[
    int | None, typer.Option("--size", min=16, help="Pixels a side of the model's images.")
]
AccessOption = Annotated[
    str, typer.Option("--access", help="What an attacker has: weights, scores or labels.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="A first look: less of all.")]
ThoroughOption = Annotated[
    bool, typer.Option("--thorough", help="All people, more attacks, longer searches.")
]
TrustModelOption = Annotated[
    bool, typer.Option("--trust", help="Read a TorchScript file, which can run code when read.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before the work.")]
MaxFirstOption = Annotated[
    float | None,
    typer.Option("--max-first", help="Accepted share of people recognised by the first guess."),
]
MaxAnyOption = Annotated[
    float | None,
    typer.Option("--max-any", help="Accepted share of people recognised by any guess."),
]
MinAccuracyOption = Annotated[
    float | None, typer.Option("--min-accuracy", help="Least accuracy that is accepted.")
]


def audit(
    model: ModelArgument,
    private: PrivateOption,
    public: PublicOption = None,
    arch: ArchOption = "",
    classes: ClassesOption = None,
    size: SizeOption = None,
    access: AccessOption = "weights",
    quick: QuickOption = False,
    thorough: ThoroughOption = False,
    trust: TrustModelOption = False,
    yes: YesOption = False,
    settings: SetOption = None,
    prior: PriorOption = None,
    latent: LatentOption = None,
    span: RangeOption = None,
    resize: ResizeOption = False,
    store: StoreOption = STORE,
    out: OutOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
    workers: WorkersOption = None,
    redact: RedactOption = False,
    log: LogOption = None,
    no_images: NoImagesOption = False,
    max_first: MaxFirstOption = None,
    max_any: MaxAnyOption = None,
    min_accuracy: MinAccuracyOption = None,
    time_budget: TimeBudgetOption = None,
) -> None:
    """Audit a model that you have, without a config; run it again to resume."""
    from frostglass.auditing.config_file import generator_settings, parse_settings
    from frostglass.auditing.own_model import OwnModel
    from frostglass.cli.own_model import agree, class_names, effort_of

    own = OwnModel(
        model, private, public, arch, class_names(classes), size,
        access, effort_of(quick, thorough), trust,  # type: ignore[arg-type]
    )  # fmt: skip
    trusted = trust and prior is not None  # else it is said of the model
    generator = generator_settings(prior, latent, span, resize=resize, trust=trusted)
    limits = {"max_first": max_first, "max_any": max_any, "min_accuracy": min_accuracy}
    thresholds = [f"thresholds.{k}={v}" for k, v in limits.items() if v is not None]
    values = parse_settings(own.settings(), [*generator, *thresholds, *(settings or ())])
    agree(values, own, store, threads, yes=yes, quiet=as_json)
    from frostglass.cli.run import run_settings

    options: Any = {"as_json": as_json, "threads": threads, "redact": redact, "log": log}
    options |= {"spread": Spread(workers), "time_budget": time_budget, "images": not no_images}
    run_settings(values, store, out, **options)
