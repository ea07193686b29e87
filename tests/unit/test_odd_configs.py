"""Configs of the wrong shape: each is refused in one line, whatever is in it."""

import pytest

from commands import enter, error_of, frostglass

GENERATOR = ("--prior", "onnx:gen.onnx", "--latent", "normal:6")
NO_TABLE = "grid: expected a table of non-empty lists"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


def refused(here, text, *options):
    (here / "odd.toml").write_text(text)
    return error_of(frostglass("check", "odd.toml", *options))


@pytest.mark.parametrize("options", [(), GENERATOR])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('grid = "x"', NO_TABLE),
        ("grid = 3", NO_TABLE),
        ("grid = [1]", NO_TABLE),
        ("[[grid]]\nseed = [1]", NO_TABLE),
        ("[grid]\ncase = 3", NO_TABLE),
        ('[grid]\ncase = "x"', NO_TABLE),
        ("[grid]\ncase = []", NO_TABLE),
        ("[grid]\ncase = [3]", "grid.case: expected tables with a name"),
        ("[grid]\ncase = [{ case = 3 }]", "grid.case: expected tables with a name"),
    ],
)
def test_a_grid_of_another_shape(here, text, message, options):
    assert message in refused(here, text, *options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target]\nself = 3", "target.self: no such parameter"),
        ('[attack]\nname = "gmi"\nself = 3', "attack.self: no such parameter"),
        (
            '[attack]\nname = "gmi"\nvariant = "margin"\ncls = 3',
            "attack.cls: no such parameter",
        ),
        ('[attack]\nname = ".own:Attack"', "cannot be imported (a relative name)"),
        (f"seed = {'9' * 5000}", "odd.toml is not valid TOML: "),
        (f"name = {'[' * 2000}{']' * 2000}", "odd.toml is not valid TOML: "),
    ],
)
def test_names_and_values_that_python_cannot_take(here, text, message):
    assert message in refused(here, text)


def test_settings_of_the_command_line_that_are_no_toml(here):
    value = "[" * 2000
    assert "seed: expected a int, got '[[" in error_of(
        frostglass("check", "toy.toml", "--set", f"seed={value}")
    )
    message = "evaluators.²: expected a list index below 2"
    assert message in error_of(frostglass("check", "toy.toml", "--set", "evaluators.²=3"))


def test_attacks_of_a_hardening_that_are_no_tables(here):
    (here / "attacks.toml").write_text("case = [3]")
    options = ("--accuracy", "0.5", "--attacks", "attacks.toml")
    message = "attacks[0]: expected a table, got 3"
    assert message in error_of(frostglass("harden", "toy.toml", *options))
