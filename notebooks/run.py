"""Run a notebook and write it with its results: python notebooks/run.py FILE --set people=8.

Needs `pip install 'frostglass[notebooks]'`. The notebooks in the repository have no results: those
would show faces, differ on every machine, and hide what changed in a diff.
"""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("nbformat", "nbclient", "ipykernel")
SECONDS = 3600  # for one cell


class NotebookError(Exception):
    """One line for the user: what was expected, what came, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a notebook; return the exit code."""
    parser = argparse.ArgumentParser(description="Run a notebook, and write it with its results.")
    parser.add_argument("file", type=Path, help="A notebook, such as audit_your_model.ipynb.")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="Change a number of it."
    )
    parser.add_argument("--out", type=Path, default=Path("build/notebooks"), help="Folder.")
    chosen = parser.parse_args(arguments)
    try:
        written = run(chosen.file, chosen.set, chosen.out)
    except NotebookError as error:
        print(f"notebook: {error}", file=sys.stderr)
        return 2
    print(written)
    return 0


def run(file: Path, settings: Sequence[str], out: Path) -> Path:
    """Run the cells of a notebook in a kernel of this environment."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise NotebookError(
            f"running a notebook needs {', '.join(missing)}: pip install 'frostglass[notebooks]'"
        )
    import nbclient
    import nbformat

    if not file.is_file():
        raise NotebookError(f"expected a notebook, found no file {file}")
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = changed(cell.source, settings)
    print(f"{file.name}: {len(notebook.cells)} cells", file=sys.stderr)
    folder = {"metadata": {"path": str(Path.cwd())}}
    try:
        nbclient.NotebookClient(notebook, timeout=SECONDS, resources=folder).execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise NotebookError(f"{file.name} failed: {error.ename}: {error.evalue}") from None
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out / file.name)
    return out / file.name


def changed(source: str, settings: Sequence[str]) -> str:
    """Return the cell of parameters with other values; unknown names are refused."""
    known = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    for setting in settings:
        name, equals, _ = setting.partition("=")
        if not equals or name.strip() not in known:
            raise NotebookError(
                f"expected NAME=VALUE with a name of {', '.join(sorted(known))}; got {setting!r}"
            )
    return "\n".join([source, *settings])


if __name__ == "__main__":
    sys.exit(main())
