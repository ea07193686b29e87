"""The shape of the package: import order, forbidden calls, sizes of files, public names."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import frostglass
from frostglass.cli.catalogue import KINDS, describe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "frostglass"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}

# A module imports from its own rung or from a lower one. Names in one tuple share a rung.
LADDER = (
    ("runtime",),
    ("core",),
    ("store",),
    ("workers",),
    ("data", "models"),
    ("networks",),
    ("priors",),
    ("defenses",),
    ("training",),
    ("attacks", "evaluators"),
    ("metrics",),
    ("deploy",),
    ("auditing", "robustness"),
    ("analyses",),
    ("plan", "testing"),
    ("report",),
    ("hardening", "published", "study"),
    ("cli",),
    ("__main__",),
)
RUNG = {name: height for height, names in enumerate(LADDER) for name in names}

PUBLIC = [
    "Analysis", "AnalysisMethod", "Assets", "Attack", "Audit", "AuditSize", "Budget", "Client",
    "Dataset", "Defense",
    "Embedder", "Evidence", "Experiment", "FeatureView", "FrostglassError", "Images", "Method",
    "Metric", "ModelView", "Prior", "PriorMethod", "Reconstructions", "Rows", "Run", "Score",
    "Server", "Split", "Store", "Target", "Threat", "Training", "Verifier", "Work", "analyze",
    "audit", "audit_model",
    "build_report", "cut", "enrol", "estimate", "examine", "experiments", "harden", "invert",
    "make_split", "measure", "parameters", "prior_only", "problems", "read_embedder",
    "read_prior", "release_folder", "run_all", "ship", "split_model", "train_target", "wrap",
    "write_prior", "write_run",
]  # fmt: skip

LONGEST_FILE = 400
LONGEST_FUNCTION = 50
LONG_FUNCTIONS = 5  # allowed in the whole package


def dotted(path):
    """Return the module's name as an import spells it."""
    return ".".join(["frostglass", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def part(name):
    """Return the part of the package: "data" for frostglass.data.faces, "" for the package."""
    return f"{name}.".split(".")[1]


def imported(tree):
    """Yield every module that a file imports, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def calls(tree):
    """Yield every call: the words of its name, its keywords, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = (
                re.findall(r"\w+", ast.unparse(node.func))
                if isinstance(node.func, ast.Name | ast.Attribute)
                else []
            )
            yield words, {word.arg: ast.unparse(word.value) for word in node.keywords}, node.lineno


def test_every_part_has_a_rung():
    found = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert found - {"__init__"} == set(RUNG)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path != PACKAGE / "__init__.py"], ids=dotted
)
def test_imports_go_one_way(path):
    mine = RUNG[part(dotted(path))]
    wrong = [
        f"line {line}: {name}"
        for name, line in imported(TREES[path])
        if name.partition(".")[0] == "frostglass" and RUNG.get(part(name), len(LADDER)) > mine
    ]
    assert wrong == [], (
        f"{dotted(path)} is on the rung of {', '.join(LADDER[mine])} and imports from a higher one"
    )


def test_the_package_itself_imports_nothing_heavy():
    code = "import sys, frostglass; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ROOMS = {"datasets": "data", "threats": "robustness"}
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_nothing_is_pickled(path):
    allowed = (
        {"pickle.UnpicklingError"} if dotted(path) == "frostglass.models.weight_files" else set()
    )
    assert [
        f"line {line}: {name}"
        for name, line in imported(TREES[path])
        if name.partition(".")[0] in PICKLES and name not in allowed
    ] == []
    assert [
        f"line {line}: torch.save"
        for words, _, line in calls(TREES[path])
        if words == ["torch", "save"]
    ] == []
    loads = [
        (given, line) for words, given, line in calls(TREES[path]) if words == ["torch", "load"]
    ]
    assert [f"line {line}" for given, line in loads if given.get("weights_only") != "True"] == [], (
        "torch.load needs weights_only=True"
    )
    assert [
        f"line {line}"
        for _, given, line in calls(TREES[path])
        if given.get("allow_pickle", "False") != "False"
    ] == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_weights_are_loaded_strictly(path):
    loads = [
        (given, line)
        for words, given, line in calls(TREES[path])
        if words[-1:] in (["load_state_dict"], ["load_model"])
    ]
    assert [f"line {line}" for given, line in loads if given.get("strict", "True") != "True"] == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_devices_are_never_assumed(path):
    assert [
        f"line {line}"
        for words, _, line in calls(TREES[path])
        if words[-1:] == ["cuda"] and len(words) > 1
    ] == []


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent.name != "cli"], ids=dotted
)
def test_only_the_command_line_prints(path):
    assert [
        f"line {line}"
        for words, _, line in calls(TREES[path])
        if words in (["print"], ["input"], ["sys", "exit"])
    ] == []


DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"}
UNSEEDABLE = {"rand_like", "randn_like", "randint_like", "poisson"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_draw_comes_from_a_global_generator(path):
    tree = TREES[path]
    assert [
        f"line {line}: {name}"
        for name, line in imported(tree)
        if name.partition(".")[0] == "random"
    ] == []
    wrong = [
        f"line {line}: {'.'.join(words)}"
        for words, given, line in calls(tree)
        if (
            words[:1] == ["torch"]
            and ((words[-1] in DRAWS and "generator" not in given) or words[-1] in UNSEEDABLE)
        )
        or words[:2] in (["np", "random"], ["numpy", "random"])
        or (
            words in (["torch", "manual_seed"], ["torch", "seed"])
            and dotted(path) != "frostglass.runtime.seeding"
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def test_functions_stay_short():
    functions = [
        f"{dotted(path)}.{node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert len(functions) <= LONG_FUNCTIONS, functions


def test_nothing_changes_the_environment():
    """Only the command line sets a default, before torch is loaded."""
    pattern = re.compile(r"os\.environ\[[^]]+\]\s*=[^=]|environ\.(update|setdefault|pop)|putenv")
    changed = [dotted(path) for path in MODULES if pattern.search(path.read_text(encoding="utf-8"))]
    assert changed == ["frostglass.runtime.environment"]


def test_public_names():
    assert frostglass.__all__ == PUBLIC
    assert dir(frostglass) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_explains_itself(name):
    found = getattr(frostglass, name)
    assert found.__name__ == name
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert found.__doc__


@pytest.mark.parametrize(
    "kind", ["analyses", "attacks", "datasets", "defenses", "metrics", "priors", "threats"]
)
def test_a_subpackage_exports_its_methods(kind):
    package = importlib.import_module(f"frostglass.{ROOMS.get(kind, kind)}")
    for name in KINDS[kind].names():
        cls = KINDS[kind].get(name)
        assert getattr(package, cls.__name__) is cls
        assert cls.__name__ in package.__all__


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")])
def test_benchmarks_can_be_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(f"benchmarks.{name}")


def test_a_name_that_is_not_public():
    with pytest.raises(
        AttributeError,
        match="frostglass has no public name 'nonsense'; it has Analysis, Ana",
    ):
        frostglass.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, registry in KINDS.items() for name in registry.names()],
)
def test_a_method_is_named_after_its_file(kind, name):
    module = describe(name)["file"]
    assert module.startswith(f"frostglass.{ROOMS.get(kind, kind)}.")
    assert module.rsplit(".", 1)[1] == name
    if KINDS[kind].contract:
        assert KINDS[kind].get(name).name == name


@pytest.mark.parametrize("registry", KINDS.values(), ids=KINDS)
def test_every_file_of_a_room_is_a_method(registry):
    files = [
        path.stem
        for package in registry.packages
        for path in (PACKAGE.parent / package.replace(".", "/")).glob("*.py")
        if not path.stem.startswith("_") and path.stem != "base"
    ]
    assert sorted(files) == registry.names()


def test_a_name_belongs_to_one_kind():
    names = [name for registry in KINDS.values() for name in registry.names()]
    assert sorted(set(names)) == sorted(names)


# A folder of a machine, but not the end of a longer path; and addresses of package registries.
# Brackets keep this file out.
MACHINE_PATH = r"(?<![\w.>}*~-])/(work|root|home|Users|mnt)/\w"
REGISTRY_ADDRESS = (
    r"p[y]pi\.|python[h]osted|download\.py[t]orch|ana[c]onda\.org|[-]-(extra-)?index-url|"
    r"[-]-find-links|arti[f]actory"
)
FORBIDDEN = re.compile(f"{MACHINE_PATH}|{REGISTRY_ADDRESS}")


def text_files():
    """Return every text file that is tracked, or would be with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    paths = {ROOT / name for name in listed.split("\0") if name}
    return [
        path for path in sorted(paths) if path.is_file() and b"\0" not in path.read_bytes()[:8192]
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_no_file_tells_of_the_machine_it_was_written_on():
    files = text_files()
    assert Path(__file__) in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := FORBIDDEN.search(line))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("see " + "/ho" + "me/ann/notes", True),
        ('"' + "/ro" + 'ot/x"', True),
        ("<key>.partial/work/checkpoint", False),
        ("data/home/ann", False),
        ("https://py" + "pi.org/simple", True),
        ("pip install --index" + "-url x", True),
        ("https://semver.org", False),
    ],
)
def test_what_is_looked_for_is_found(text, caught):
    assert bool(FORBIDDEN.search(text)) is caught


def test_every_data_file_is_installed_with_the_package():
    """An editable install finds files that a wheel would leave behind."""
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["frostglass"]
    package = root / "src" / "frostglass"
    files = [
        path.relative_to(package)
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    ]
    assert files
    assert [
        str(path) for path in files if not any(path.match(pattern) for pattern in patterns)
    ] == []
