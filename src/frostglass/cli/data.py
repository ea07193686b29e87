"""The commands `data verify`, `data steps` and `export`."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from frostglass.data._verify import preparation_steps, published_dataset, verify
from frostglass.report.export import export_run


def verify_folder(name: str, folder: Path, *, quick: bool, as_json: bool) -> None:
    """Print what was found; exit 1 if something is missing or differs."""
    result = verify(name, folder, hashes=not quick)
    title = published_dataset(name).title
    if as_json:
        findings = [asdict(finding) for finding in result.findings]
        facts = {"dataset": name, "folder": str(result.root), "complete": result.complete}
        print(json.dumps(facts | {"findings": findings, "steps": result.steps}))
    else:
        for finding in result.findings:
            print(f"{finding.state:<9} {finding.part}: {finding.text}")
        bad = sum(finding.bad for finding in result.findings)
        print(
            f"{title} in {result.root} is complete"
            if result.complete
            else f"{title} in {result.root} is not as published: {bad} of "
            f"{len(result.findings)} findings. How to prepare it:"
        )
        if not result.complete:
            _print(result.steps)
    if not result.complete:
        raise typer.Exit(1)


def print_steps(name: str, *, as_json: bool) -> None:
    steps = preparation_steps(name)
    if as_json:
        print(json.dumps({"dataset": name, "steps": steps}))
    else:
        _print(steps)


def _print(steps: list[str]) -> None:
    for number, step in enumerate(steps, 1):
        print(f"{number}. {step}")


def export_model(
    run: Path, out: Path, only: str | None, store: Path | None, *, redact: bool, as_json: bool
) -> None:
    """Write the model of a run to a folder, and say where it is."""
    facts = export_run(run, out, only=only, store=store, redact=redact)
    print(json.dumps(facts) if as_json else facts["folder"])
