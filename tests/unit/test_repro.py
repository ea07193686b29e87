"""Protocols: every published table with attacks is a grid, and ours are compared with theirs."""

from collections import Counter
from types import SimpleNamespace

import pytest

from commands import error_of, frostglass
from frostglass import published
from frostglass.auditing.expand import expand
from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError, DataError
from frostglass.plan.problems import problems
from frostglass.published.compare import compare
from frostglass.published.grids import _rows, grids, preparation
from frostglass.published.reading import Part
from frostglass.published.scaling import scaled
from frostglass.published.strengths import published_methods, small_methods
from frostglass.report.seeds import SeedRow, Share

RUNNABLE = [table.name for table in published.tables() if table.entry.parts]
NOTHING = [table.name for table in published.tables() if table.entry.nothing]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_row_has_an_audit_at_the_small_scale(name):
    table = published.table(name)
    built = grids(table, "small")
    audited = [row for grid in built for rows in grid.rows.values() for row in rows]
    assert audited
    expected = [row for part in table.entry.parts for row in _rows(table, part)]
    assert sorted(map(str, audited)) == sorted(map(str, expected))
    for grid in built:
        audits = len(expand(grid.settings))
        seeds = len(grid.settings["grid"].get("seed", [0]))
        assert len(grid.rows) * seeds == audits  # nothing is run that no row needs


@pytest.mark.parametrize("name", ["bido-table3", "calor-table15", "crafter-table14"])
def test_a_small_grid_has_no_problems(name):
    for grid in grids(published.table(name), "small")[:1]:
        values = grid.settings["grid"]
        values |= {"defenses": values["defenses"][:2], "case": values["case"][:1]}
        assert problems(experiments(grid.settings)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_small_grid_has_no_problems(name):
    for grid in grids(published.table(name), "small"):
        assert problems(experiments(grid.settings)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_published_grid_can_be_read(name):
    table = published.table(name)
    built = grids(table, "published")
    audited = sum(len(rows) for grid in built for rows in grid.rows.values())
    expected = [row for part in table.entry.parts for row in _rows(table, part)]
    left_out = [row for row in expected if name == "calor-table2" and row.attack == "PLG-MI"]
    assert audited == len(expected) - len(left_out)
    for grid in built:
        assert experiments(grid.settings)
        assert preparation(grid.config)


def test_published_settings_are_those_of_the_configs():
    built = grids(published.table("tldmi-table5"), "published")
    assert [grid.config.stem for grid in built] == ["vgg16-tl", "vgg16-bido"]
    transfer, bido = built
    # The attack is in the first file only, and used with the second too.
    for grid in built:
        assert [case["case"] for case in grid.settings["grid"]["case"]] == ["LOMMA on KED-MI"]
    assert [entry[0]["parameters"] for entry in transfer.settings["grid"]["defenses"][1:]] == [
        13.9e6,
        11.5e6,
    ]
    assert bido.settings["grid"]["defenses"][0][0]["lambda_y"] == 0.5
    assert transfer.settings["target"]["epochs"] == 200


def test_an_attack_that_no_config_has_is_named():
    first, _ = grids(published.table("calor-table2"), "published")
    assert first.missing == ("PLG-MI: no config of this table has this attack",)


@pytest.mark.parametrize(
    ("defense", "setting", "methods"),
    [
        ("none", "theta_C/theta_T=16.8/16.8 M", []),
        ("MID", "lambda=0.02 [(a)]", [{"name": "mid", "weight": 0.02}]),
        (
            "BiDO-COCO",
            "row 2: only +lambda_x term, lambda_x=10",
            [{"name": "bido", "measure": "coco_frobenius", "lambda_x": 10, "lambda_y": 0}],
        ),
        ("TL", "freeze ratio 60 percent", [{"name": "transfer", "ratio": 0.6}]),
        (
            "TL",
            "theta_C/theta_T=13.9/16.8 M",
            [{"name": "transfer", "boundary": "parameters", "parameters": 13.9e6}],
        ),
        (
            "LoR (no confidence adaptation)",
            "activation=ReLU,rank=50",
            [{"name": "calor", "a": 0.0, "rank": 50, "activation": "relu"}],
        ),
        (
            "Crafter-z",
            "lr_z=0.0005,beta=20",
            [{"name": "crafter_z", "variant": "published", "lr": 0.0005, "beta": 1.25}],
        ),
    ],
)
def test_strengths_are_those_of_the_row(defense, setting, methods):
    assert published_methods(defense, setting) == methods


def test_strengths_of_a_small_world():
    strengths = {"ranks": {"30": 8}, "frozen": {"13.9": 0.57}, "unstated": {"LS": "alpha=-0.05"}}
    assert small_methods("CALoR", "rank=30,a=1,b=8", strengths, {})[0]["rank"] == 8
    assert small_methods("TL", "theta_C=13.9M", strengths, {}) == [
        {"name": "transfer", "ratio": 0.57}
    ]
    assert small_methods("LS", "", strengths, {})[0]["alpha"] == -0.05
    with pytest.raises(DataError, match="no entry '31' in"):
        small_methods("CALoR", "rank=31", strengths, {})
    with pytest.raises(DataError, match="no method for the published defense 'Luck'"):
        published_methods("Luck", "")


def seed_row(label, leak, accuracy=0.9, seeds=(0,)):
    shares = {
        "accuracy": Share(accuracy, accuracy, accuracy),
        "top-1, evaluator 1 (resnet)": Share(leak, leak - 0.05, leak + 0.05),
    }
    return SeedRow("model", label, seeds, 5, shares, ())


def comparison_of(shares, name="bido-table3", private="MNIST (digits 0-4)"):
    """Compare the rows of one part with our shares, in the order of the table."""
    table = published.table(name)
    rows = table.rows({"dataset_private": private})
    labels = [str(place) for place in range(len(rows))]
    part = Part(world="digits", configs=["x"])
    grid = SimpleNamespace(
        rows={label: (row,) for label, row in zip(labels, rows, strict=True)}, part=part
    )
    found = [
        seed_row(label, share)
        for label, share in zip(labels, shares, strict=True)
        if share is not None
    ]
    return compare(table, [(grid, found)])


def test_directions_and_order_agree():
    # Published: none 42.52, MID 51.75, BiDO-COCO 7.76, BiDO-HSIC 4.36.
    same = comparison_of([0.4, 0.6, 0.2, 0.05])
    assert same.directions == {"agrees": 3}
    assert same.order == {"agrees": 6}
    assert [line.leak for line in same.lines] == [42.52, 51.75, 7.76, 4.36]
    assert same.lines[0].direction is None


def test_directions_disagree_or_stay_open():
    other = comparison_of([0.4, 0.2, 0.42, 0.8])
    assert [line.direction for line in other.lines] == [None, "disagrees", "open", "disagrees"]
    assert other.order == Counter(disagrees=5, open=1)


def test_a_failed_audit_is_compared_with_nothing():
    some = comparison_of([0.4, None, 0.1, 0.1])
    assert some.lines[1].ours is None
    assert [line.direction for line in some.lines] == [None, None, "agrees", "agrees"]


def test_accuracy_of_one_seed_decides_nothing():
    table = published.table("tldmi-table8")
    rows = {str(place): (row,) for place, row in enumerate(table.rows())}
    grid = SimpleNamespace(rows=rows, part=table.entry.parts[0])

    def order(seeds):
        found = [seed_row(label, 0.5, 0.1 * int(label), seeds) for label in rows]
        return compare(table, [(grid, found)]).order

    assert set(order((0,))) == {"open"}
    assert "open" not in order((0, 1))


def test_what_was_scaled_is_said():
    table = published.table("tldmi-table7")
    (grid,) = grids(table, "small")
    lines = scaled(table, grid)
    assert "data: CelebA (1000 ids) → embedded faces: 40 people x 60 images" in lines
    assert "pre-training: ImageNet1K → none" in lines
    assert "network: VGG16-BN 64x64 → cnn (width 32)" in lines
    assert "image size: 64 px → 32 px" in lines
    assert "BREP-MI, attack max queries: 100,000 → 2,000" in lines
    assert "strength: TL theta_C=13.9M → transfer ratio 0.57" in lines
    assert "seeds: 1" in lines


@pytest.mark.parametrize("name", NOTHING)
def test_tables_with_nothing_to_run(name):
    line = error_of(frostglass("repro", name))
    assert line == f"{name} has nothing to run: {published.table(name).entry.nothing}"


def test_bad_input(tmp_path):
    unknown = error_of(frostglass("repro", "bido-tabel3"))
    assert unknown.startswith("no published table named 'bido-tabel3': did you mean 'bido-table3'?")
    assert "expected small or published" in error_of(
        frostglass("repro", "bido-table3", "--scale", "huge")
    )
    part = error_of(frostglass("repro", "bido-table3", "--part", "3"))
    assert part == "--part: expected 1 to 2, got 3"
    assert "give it with --configs" in error_of(
        frostglass("repro", "bido-table3", "--scale", "published", "--configs", tmp_path)
    )


def test_missing_data_names_its_preparation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = frostglass("repro", "bido-table5", "--scale", "published", "--check")
    line = error_of(result)
    assert "no folder at celeba. CelebA: 1. get Img/img_align_celeba.zip" in line
    assert "to prepare: Images: CelebA as it is published, in the folder celeba" in line
    assert "Weights: torchvision's file of vgg16_bn" in line


def test_several_seeds_of_features_are_several_runs():
    (grid,) = grids(published.table("advlearn-table2"), "small", seeds=2)
    assert [run["seed"] for run in grid.runs] == [0, 1]
    (grid,) = grids(published.table("bido-table4"), "small", seeds=2)
    assert [run["grid"]["seed"] for run in grid.runs] == [[0, 1]]
    with pytest.raises(ConfigError, match="expected small or published"):
        grids(published.table("bido-table4"), "tiny")
