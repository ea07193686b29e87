"""The notebooks run, at a tiny scale, and their results show themselves."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
TINY = {
    "audit_your_model": ["people = 3", "images = 8", "epochs = 20", "steps = 2", "pool = 16"],
    "defend_and_compare": ["people = 3", "epochs = 4", "steps = 2", "pool = 16", "rank = 2"],
    "protect_features": [
        "people = 3", "epochs = 1", "public = 20", "attack_epochs = 1", "crafting = 1",
    ],
}  # fmt: skip
AUDITS = ("defend_and_compare", "protect_features")  # with evaluators and controls: not fast
SHOWN = {
    "audit_your_model": {"Images", "Prior", "Reconstructions", "Rows", "Score"},
    "defend_and_compare": {"Run", "Audit"},
    "protect_features": {"Run", "Reconstructions"},
}


@pytest.fixture
def runner():
    spec = importlib.util.spec_from_file_location("run_notebook", NOTEBOOKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(name):
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def run_cell(source, names):
    """Run a cell as a notebook does; return the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_notebook_is_tested():
    assert sorted(TINY) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize(
    "name",
    ["audit_your_model", *(pytest.param(name, marks=pytest.mark.slow) for name in AUDITS)],
)
def test_a_notebook_runs_in_this_process(name, runner, tmp_path, monkeypatch):
    """A kernel takes seconds to start; the slow test below has one."""
    monkeypatch.chdir(tmp_path)
    names, shown = {}, set()
    for cell in cells(name):
        if cell["cell_type"] == "markdown":
            continue
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", []):
            source = runner.changed(source, TINY[name])
        value = run_cell(source, names)
        if hasattr(value, "_repr_html_"):
            assert value._repr_html_().startswith(("<p>", "<table>"))
            shown.add(type(value).__name__)
    assert shown >= SHOWN[name]


@pytest.mark.parametrize("name", TINY)
def test_a_notebook_has_no_results_and_short_lines(name):
    for cell in cells(name):
        assert not cell.get("outputs")
        assert all(len(line.rstrip("\n")) <= 100 for line in cell["source"])


@pytest.mark.parametrize("name", TINY)
def test_a_kernel_without_the_package_is_told_what_to_do(name):
    first = next(cell for cell in cells(name) if cell["cell_type"] == "code")
    code = "import sys; sys.modules['frostglass'] = None\n" + "".join(first["source"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'frostglass[notebooks]'" in done.stderr.splitlines()[-1]


def test_without_the_extra_one_line_says_so(runner, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert runner.main([str(NOTEBOOKS / "audit_your_model.ipynb")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "notebook: running a notebook needs nbformat, nbclient, ipykernel: "
        "pip install 'frostglass[notebooks]'"
    )


@pytest.mark.parametrize("setting", ["nonsense=1", "people"])
def test_a_wrong_setting_is_refused(setting, runner):
    with pytest.raises(runner.NotebookError, match=r"expected NAME=VALUE with a name of .*people"):
        runner.changed("people, images = 1, 2", [setting])


def test_no_such_notebook(runner, capsys):
    assert runner.main(["nowhere.ipynb"]) == 2
    assert "expected a notebook, found no file nowhere.ipynb" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_notebook_runs_in_a_kernel(name, runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = runner.run(NOTEBOOKS / f"{name}.ipynb", TINY[name], tmp_path / "out")
    results = json.loads(written.read_text())
    assert any(
        "text/html" in output.get("data", {})
        for cell in results["cells"]
        for output in cell.get("outputs", [])
    )
