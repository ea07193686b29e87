"""Methods from outside: an installed package, its entry points, and the importable contracts."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from commands import FACES, ONE_EPOCH
from frostglass import testing
from frostglass.attacks import Decoder, Gmi, Known, Latent, Unlearn
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.registry import Registry
from frostglass.data import Digits, Faces
from frostglass.defenses import Calor
from frostglass.defenses.base import Defense
from frostglass.metrics import Accuracy, Face, Likeness, Manifold
from frostglass.priors import Wgan

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
CONFIG = f"""
name = "plugin"
defenses = [{{ name = "logit_penalty", weight = 0.1 }}]
attack = {{ name = "random_search", iterations = 3 }}
{FACES}{ONE_EPOCH}
[prior]
name = "wgan"
steps = 2
critic_steps = 1
width = 4
batch = 8
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example plugin into a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PLUGIN, folder / "source")
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([*pip, "install", *options, source], check=True)
    return folder


def frostglass(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frostglass", *map(str, words)],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed / "site")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_installed_method_is_listed_and_explained(installed: Path) -> None:
    rows = json.loads(frostglass(installed, "list", "--json").stdout)
    kinds = {row["name"]: row["kind"] for row in rows}
    assert (kinds["logit_penalty"], kinds["random_search"]) == ("defenses", "attacks")
    text = frostglass(installed, "show", "random_search").stdout
    assert "iterations = 50" in text
    assert "batches of 64 draws" in text


@pytest.mark.slow
def test_an_installed_method_runs_and_is_estimated(installed: Path) -> None:
    (installed / "plugin.toml").write_text(CONFIG)
    check = frostglass(installed, "check", "plugin.toml", "--json")
    assert check.returncode == 0, check.stderr
    (attack,) = [row for row in json.loads(check.stdout)["steps"] if row["step"] == "attack"][:1]
    assert "3 × 64 draws" in attack["work"]
    assert attack["seconds"] > 0
    run = frostglass(installed, "run", "plugin.toml", "--json")
    assert run.returncode == 1, run.stderr  # vacuous: one epoch teaches nothing
    (audit,) = json.loads(run.stdout)["audits"]
    assert audit["attack"] == {"name": "random_search", "iterations": 3}
    assert audit["queries"] == 3 * 64


def test_a_class_is_used_without_an_entry_point(installed: Path) -> None:
    (installed / "path.toml").write_text(
        CONFIG.replace('"random_search"', '"frostglass_noise.random_search:RandomSearch"')
    )
    check = frostglass(installed, "check", "path.toml", "--json")
    assert check.returncode == 0, check.stderr


def test_the_plugin_keeps_the_contracts(installed: Path) -> None:
    code = (
        "from frostglass.testing import check_attack, check_defense\n"
        "from frostglass_noise.logit_penalty import LogitPenalty\n"
        "from frostglass_noise.random_search import RandomSearch\n"
        "check_attack(RandomSearch(iterations=2)); check_defense(LogitPenalty(weight=0.1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(installed / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "attack",
    [
        Gmi(steps=3, candidates=2, keep=1),
        Known(base={"name": "gmi", "steps": 2}, attribute="even", candidates=2, keep=1),
        Unlearn(base={"name": "gmi", "steps": 2}, rounds=2, searches=1, keep=2, tuning=2),
        Decoder(epochs=1, width=4),
        Latent(steps=2, tries=2),
    ],
    ids=lambda attack: attack.name,
)
def test_built_in_attacks_keep_the_contract(attack: Any) -> None:
    testing.check_attack(attack)


def test_other_built_in_methods_keep_their_contracts() -> None:
    testing.check_defense(Calor(rank=2, switch=0.5))
    testing.check_prior(Wgan(steps=2, critic_steps=1, width=4, batch=8, latent=6))
    testing.check_dataset(Digits(size=16))
    testing.check_dataset(Faces(size=16, identities=2, images=3, public_identities=2))
    for metric in (Accuracy(), Face(), Likeness(), Manifold()):
        testing.check_metric(metric)


RUNS = itertools.count(1)


@parameters
class Unrepeatable(Gmi):
    """An attack that remembers how often it ran."""

    def run(self, view: Any, assets: Any, people: Any, *, seed: int, work: Any) -> Any:
        result = super().run(view, assets, people, seed=seed, work=work)
        return replace(result, images=torch.full_like(result.images, 1 / next(RUNS)))


@parameters
class NeverDisabled(Calor):
    """A defense whose disabled parameters still defend."""

    disabled: ClassVar[Mapping[str, Any]] = {"rank": 2}


def test_broken_promises_are_named() -> None:
    with pytest.raises(AssertionError, match="a seed must repeat the result"):
        testing.check_attack(Unrepeatable(steps=2, candidates=1, keep=1))
    with pytest.raises(AssertionError, match="must equal the undefended run"):
        testing.check_defense(NeverDisabled(rank=2, switch=0.5))


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("gone", "no.such.module:Gone", "frostglass.defenses")
    monkeypatch.setattr("frostglass.core.registry.entry_points", lambda group: [entry])
    registry = Registry("defense", contract=Defense)
    with pytest.raises(ConfigError, match=r"the installed defense 'gone' .* cannot be imported"):
        registry.names()
