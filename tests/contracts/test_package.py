"""The shape of the package: which way imports go, what is never written, how long things are, and which names are public."""

import ast
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import frostglass
from frostglass.audit.catalogue import KINDS, describe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "frostglass"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}

# A module imports from its own rung or from a lower one. Names that stand together share a rung.
LADDER = (
    ("runtime",),
    ("core",),
    ("store",),
    ("data", "models"),
    ("networks", "priors"),
    ("defenses",),
    ("training",),
    ("attacks",),
    ("metrics",),
    ("audit", "deploy"),
    ("plan",),
    ("report",),
    ("cli",),
)
RUNG = {name: height for height, names in enumerate(LADDER) for name in names}

PUBLIC = [
    "Attack", "Audit", "Defense", "Experiment", "Prior", "Reconstructions", "Score", "Split", "Store", "Target", "ModelView",
    "invert", "make_split", "run", "wrap",
]  # fmt: skip

LONGEST_FILE = 430
LONGEST_FUNCTION = 70


def dotted(path):
    """The module's name, as an import would say it."""
    return ".".join(["frostglass", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def part(name):
    """The part of the package a dotted name lies in: "data" for frostglass.data.faces; "" for the package itself."""
    return f"{name}.".split(".")[1]


def imported(tree):
    """Every module that is imported, anywhere in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def calls(tree):
    """Every call with the words of what is called (torch.load is ["torch", "load"]), its keywords and its line."""
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
    assert [name for name, _ in imported(TREES[PACKAGE / "__init__.py"])] == [
        "importlib",
        "typing.Any",
    ]


PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_nothing_is_pickled(path):
    allowed = (
        {"pickle.UnpicklingError"} if dotted(path) == "frostglass.models.checkpoint" else set()
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
            and dotted(path) != "frostglass.runtime"
        )
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_files_and_functions_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    functions = [
        node
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > LONGEST_FUNCTION] == []


def test_public_names():
    assert frostglass.__all__ == PUBLIC
    assert len(PUBLIC) <= 15
    assert dir(frostglass) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_explains_itself(name):
    found = getattr(frostglass, name)
    assert found.__name__ == name
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert found.__doc__


def test_a_name_that_is_not_public():
    with pytest.raises(
        AttributeError, match="frostglass has no public name 'nonsense'; it has Attack, Audit, "
    ):
        frostglass.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, registry in KINDS.items() for name in registry.names()],
)
def test_a_method_is_named_after_its_file(kind, name):
    folder = {"datasets": "data", "feature_attacks": "attacks/features"}.get(kind, kind)
    assert describe(name)["file"] == f"frostglass.{folder.replace('/', '.')}.{name}"
    assert (PACKAGE / folder / f"{name}.py").is_file()
    assert KINDS[kind].get(name).name == name


def test_a_name_belongs_to_one_kind():
    names = [name for registry in KINDS.values() for name in registry.names()]
    assert sorted(set(names)) == sorted(names)


# A machine's own folder, but not the end of a longer path; and the addresses packages are fetched from. Brackets keep this file out.
MACHINE_PATH = r"(?<![\w.>}*~-])/(work|root|home|Users|mnt)/\w"
REGISTRY_ADDRESS = r"p[y]pi\.|python[h]osted|download\.py[t]orch|ana[c]onda\.org|[-]-(extra-)?index-url|[-]-find-links|arti[f]actory"
FORBIDDEN = re.compile(f"{MACHINE_PATH}|{REGISTRY_ADDRESS}")


def text_files():
    """Every text file that is tracked, or would be with the next commit."""
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
