"""The commands `list` and `show`."""

import json

import pytest

from commands import enter, error_of, frostglass
from frostglass.cli.catalogue import KINDS
from frostglass.published.reading import names

KNOWN = {
    "analyses": {"fisher", "toy_world"},
    "datasets": {"faces", "digits", "mnist", "folder"},
    "models": {"lenet", "cnn", "resnet"},
    "defenses": {"label_smoothing", "calor"},
    "priors": {"wgan", "pretrained"},
    "attacks": {"gmi", "decoder", "latent"},
    "metrics": {"accuracy", "distance", "manifold"},
    "threats": {"fgsm", "badnets"},
}
NAMES = sorted(name for registry in KINDS.values() for name in registry.names())
OWN_ATTACK = '''
from frostglass.attacks.base import Attack
from frostglass.core.parameters import parameters


@parameters
class Guess(Attack):
    """Returns grey images.

    Args:
        shade: how bright they are.
    """

    shade: float = 0.5
    access = ()
    kept = 1

    def run(self, view, assets, people, *, seed, work): ...


class Half(Attack):
    """Lacks everything."""
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return enter(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_list_of_a_kind_as_json_and_text(kind):
    rows = json.loads(frostglass("list", kind, "--json").out)
    assert {row["name"] for row in rows} >= KNOWN[kind]
    assert all(row["summary"] and row["kind"] == kind for row in rows)
    text = frostglass("list", kind).out.splitlines()
    assert [line.split()[0] for line in text][: len(rows)] == [row["name"] for row in rows]


def test_list_of_attacks_shows_both_surfaces():
    rows = json.loads(frostglass("list", "attacks", "--json").out)
    surfaces = {row["name"]: row["surface"] for row in rows}
    assert (surfaces["gmi"], surfaces["decoder"]) == ("model", "features")
    assert set(surfaces.values()) == {"model", "features"}
    for line, row in zip(frostglass("list", "attacks").out.splitlines(), rows, strict=True):
        assert line.split() == [row["name"], f"[{row['surface']}]", *row["summary"].split()]


def test_list_without_a_kind_gives_an_overview():
    done = frostglass("list")
    *lines, advice = done.out.splitlines()
    assert done.code == 0
    assert advice == "what each is: frostglass list KIND; one in full: frostglass show NAME"
    known = {kind: registry.names() for kind, registry in KINDS.items()} | {"papers": list(names())}
    assert {line.split()[0]: line.split(maxsplit=1)[1].split(", ") for line in lines} == known
    rows = json.loads(frostglass("list", "--json").out)
    assert [(row["kind"], row["name"]) for row in rows] == [
        (kind, name) for kind, each in known.items() for name in each
    ]


@pytest.mark.parametrize(
    ("kind", "hint"), [("atacks", "did you mean 'attacks'?"), ("zzz", "known: analyses, attacks")]
)
def test_list_of_an_unknown_kind(kind, hint):
    line = error_of(frostglass("list", kind))
    assert f"no kind named '{kind}'" in line
    assert hint in line


@pytest.mark.parametrize("name", NAMES)
def test_show_explains_a_method(name):
    done = frostglass("show", name)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(frostglass("show", name, "--json").out)
    assert done.out.startswith(f"{name} ({facts['kind']}, {facts['file']})\n\n{facts['text']}")
    for parameter in facts["parameters"]:
        default = parameter["default"]
        value = " = (" if isinstance(default, list) else f" = {default!r}"
        assert any(
            line.startswith(f"  {parameter['name']}")
            and ("required" if parameter["required"] else value) in line
            for line in done.out.splitlines()
        )
    words = " ".join(done.out.split())
    assert all(meaning in words for meaning in facts["meanings"].values())


def test_show_explains_a_parameter_once():
    """A remark of a subclass follows what its base says."""
    shown = frostglass("show", "unlearn").out
    assert shown.count("\n  searches = 3  (int)\n") == 1
    assert "searches of a group, side by side. a round is such a group.\n" in shown
    assert not any(line.startswith("searches:") for line in shown.splitlines())


def test_show_of_a_class_by_its_path(here):
    (here / "shown_attack.py").write_text(OWN_ATTACK)
    done = frostglass("show", "shown_attack:Guess")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("shown_attack:Guess (attack, shown_attack)\n\nReturns grey images.")
    assert "  shade = 0.5  (float)\n      how bright they are.\n" in done.out
    built_in = frostglass("show", "frostglass.attacks.model.gmi:Gmi").out
    assert built_in.partition("\n")[2] == frostglass("show", "gmi").out.partition("\n")[2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Guess", "'nowhere:Guess' cannot be imported (No module named 'nowhere')"),
        ("shown_attack:Missing", "has no attribute 'Missing'"),
        ("shown_attack:Half", "attack Half lacks access, kept, run"),
        ("json:dumps", "'json:dumps' is no method: expected a class that inherits from"),
    ],
)
def test_show_of_a_path_that_is_no_method(here, path, message):
    (here / "shown_attack.py").write_text(OWN_ATTACK)
    assert message in error_of(frostglass("show", path))


def test_show_of_an_unknown_name():
    assert "nothing is named 'gmmi': did you mean 'gmi'?" in error_of(frostglass("show", "gmmi"))
