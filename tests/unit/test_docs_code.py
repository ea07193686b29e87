"""Every block of code in the docs: Python runs, commands parse, configs are valid."""

import re
import shlex
import tomllib

import pytest
import typer

from docs_pages import PAGES, ROOT, blocks, pages, split
from docs_world import NOT_RUN, SLOW, SMALLER, given
from frostglass.auditing.experiment import experiments
from frostglass.cli.app import app
from frostglass.cli.catalogue import KINDS
from frostglass.hardening.cases import given_cases

COMMANDS = typer.main.get_command(app)
SPAN = re.compile(r"`(?:python -m )?(frostglass [^`]+)`", re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _name(page):
    return str(page.relative_to(ROOT))


PYTHON = [
    pytest.param(page, id=_name(page), marks=[pytest.mark.slow] if _name(page) in SLOW else [])
    for page in PAGES
    if blocks(page, "python")
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the reader's own, with the methods of the docs and the plugin in it."""
    package = tmp_path / "my_package"
    package.mkdir()
    methods = blocks(ROOT / "docs" / "extend.md", "python")[:4]
    (package / "my_module.py").write_text("\n\n".join(block.text for block in methods))
    mine = blocks(ROOT / "docs" / "tutorial-researcher.md", "python")[0]
    (tmp_path / "my_methods.py").write_text(mine.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin" / "src")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page, folder):
    """The blocks of a page run one after the other, in a small world of the reader's."""
    smaller = SMALLER.get(_name(page), {})
    code = [block for block in blocks(page, "python") if not any(w in block.text for w in NOT_RUN)]
    unused = [words for words in smaller if not any(words in block.text for block in code)]
    assert not unused, f"tests/docs_world.py: {page.name} has no {unused}"
    names = given(folder, _name(page)) | {"__name__": "docs"}
    if page.parent.name == "plugin":
        from frostglass_noise.logit_penalty import LogitPenalty
        from frostglass_noise.random_search import RandomSearch

        names |= {"RandomSearch": RandomSearch, "LogitPenalty": LogitPenalty}
    for block in code:
        text = block.text
        for words, fewer in smaller.items():
            text = text.replace(words, fewer)
        exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)


def lines(text):
    """Return the commands of a shell block, continued lines joined, comments left out."""
    joined = text.replace("\\\n", " ")
    words = [line.removeprefix("$ ").strip() for line in joined.splitlines()]
    return [line for line in words if line and not line.startswith("#")]


def parse(words):
    """Parse a command as typer does, without running it; returns nothing, raises a usage error."""
    command, context, rest = COMMANDS, None, words
    while True:
        context = command.make_context(rest[0] if rest else "", list(rest), parent=context)
        if not hasattr(command, "commands"):
            return
        name, *rest = [*context._protected_args, *context.args]
        assert name in command.commands, f"no command {name!r}: {sorted(command.commands)}"
        command = command.commands[name]


@pages()
def test_commands_parse_and_their_files_exist(page):
    extras = PROJECT["optional-dependencies"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(page, "sh"):
        for line in lines(block.text):
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "-m"]:
                words = words[2:]
            if words[0] == "frostglass" and len(words) > 1:
                parse(words[1:])
                configs = [word for word in words if word.startswith("configs/")]
                assert all((ROOT / config).is_file() for config in configs), line
            elif words[0] == "make":
                assert set(words[1:]) <= set(targets), line
            elif words[:2] == ["pip", "install"]:
                named = re.findall(r"frostglass\[([\w,]+)\]", line)
                assert all(extra in extras for one in named for extra in one.split(",")), line


@pages()
def test_options_named_in_prose_exist(page):
    """A command in a code span is often shortened, so only its name and options are checked."""
    text = "\n".join(line for _, line in split(page)[0])
    for span in SPAN.findall(text):
        words = span.replace("\\|", "|").split()[1:]
        command = COMMANDS
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            assert words[0] in command.commands, f"{span}: no command {words[0]!r}"
            command = command.commands[words.pop(0)]
        known = {option for one in command.params for option in one.opts}
        given_options = {word.rstrip(".,;]").lstrip("[") for word in words}
        unknown = {word for word in given_options if word.startswith("--")} - known
        assert not unknown, f"`{span}`: no option {sorted(unknown)}"


def _by_class(text):
    """Name the plugin's methods by their classes: it is not installed here."""
    return text.replace('"logit_penalty"', '"frostglass_noise.logit_penalty:LogitPenalty"').replace(
        '"random_search"', '"frostglass_noise.random_search:RandomSearch"'
    )


@pages()
def test_configs_are_valid(page, folder):
    for block in blocks(page, "toml"):
        where = f"{page.name}, line {block.line}"
        settings = tomllib.loads(_by_class(block.text))
        if "project" in settings:
            groups = settings["project"]["entry-points"]
            assert {group.partition(".")[2] for group in groups} <= set(KINDS), where
        elif "case" in settings:
            for case in given_cases(settings["case"], "prior"):
                assert experiments({key: case[key] for key in case if key != "case"}), where
        else:
            assert experiments({"data": {"name": "faces"}, **settings}), where


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "Missing parameter: config"),
        ("run a.toml --sett x=1", "No such option"),
        ("audit m.pt --public x", "Missing parameter: private"),
        ("store shw", "no command 'shw'"),
    ],
)
def test_a_wrong_command_is_noticed(line, message):
    with pytest.raises(Exception, match=message):
        parse(line.split())
