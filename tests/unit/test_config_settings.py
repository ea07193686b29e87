"""Settings of the command line: single values, and TOML files of them."""

import pytest

import shipped
from frostglass.auditing.config_file import parse_settings, read_config
from frostglass.auditing.experiment import experiments

ROOT = shipped.CONFIGS
WORLD = str(ROOT / "worlds" / "harder.toml")


def test_a_file_changes_what_it_names_and_replaces_methods_as_a_whole(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[data]\nimages = 4\n[prior]\nname = "wgan"\n[grid]\nseed = [1, 2]\n')
    config = {
        "data": {"name": "faces", "images": 9, "size": 32},
        "prior": {"name": "pretrained", "weights": "faces32"},
        "grid": {"defenses": [[]]},
    }
    changed = parse_settings(config, ["data.size=16", str(own), "data.images=5"])
    assert changed == {
        "data": {"name": "faces", "images": 5, "size": 16},
        "prior": {"name": "wgan"},
        "grid": {"defenses": [[]], "seed": [1, 2]},
    }


@pytest.mark.parametrize(
    "name",
    [
        *("attacks", "defenses", "newer-attacks", "newer-defenses", "skip-connections", "answers"),
        *("protections", "trained-protections", "crafter-z", "predictions"),
    ],
)
def test_the_harder_world_fits_other_configs(name):
    """And it is the one that faces/harder.toml has without it."""
    _, harder = experiments(read_config(ROOT / "faces" / "harder.toml"))[0]
    made = experiments(read_config(ROOT / "faces" / f"{name}.toml", [WORLD]))
    assert made
    for _, exp in made:
        assert exp.data.identities == harder.data.identities == 300
        assert exp.data.images == harder.data.images
        assert exp.split == harder.split
        assert exp.target.epochs == harder.target.epochs
        assert exp.judging.identities == harder.judging.identities
