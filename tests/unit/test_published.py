"""The papers' tables: every one is read, has its source and is what its paper says."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from frostglass import published
from frostglass.cli.app import app
from frostglass.core.errors import ConfigError, DataError
from frostglass.published.metrics import METRICS
from frostglass.published.reading import FOLDER, Cell, parse_cells

# Values of each paper, typed from its tables.
KNOWN = [
    ("bido-table3", {"defense": "BiDO-HSIC", "pretrain": "none"}, "attack_acc1", 4.36),
    ("bido-table1", {"defense": "none"}, "test_acc", 86.21),
    ("tldmi-table7", {"defense": "none"}, "attack_acc1", 69.67),
    ("calor-table1", {"defense": "none", "attack": "IF-GMI"}, "attack_acc5", 88.4),
    ("advlearn-table2", {"setting": "lambda1=1,lambda2=0; attacker mu1=0,mu2=1"}, "mcc", 0.631),
    (
        "crafter-table14",
        {"setting": "lr_z=0.0005,beta=50", "attack": "black-box (decoder)"},
        "eval_acc",
        3.13,
    ),
]


@pytest.mark.parametrize("name", published.names())
def test_every_table_is_read_and_has_its_source(name):
    table = published.table(name)
    assert len(table.cells) == table.entry.cells
    assert "arXiv" in table.source
    assert table.entry.number in table.source
    assert {cell.paper for cell in table.cells} == {name.partition("-")[0]}
    assert table.rows()


def test_every_file_is_a_table():
    files = {each.name for each in FOLDER.joinpath("data").iterdir()}
    assert files == {f"{name}.csv" for name in published.names()}


@pytest.mark.parametrize(("name", "where", "metric", "value"), KNOWN)
def test_known_values(name, where, metric, value):
    (row,) = published.table(name).rows(where)
    assert row.value(metric) == value


def test_doubtful_cells_have_notes():
    notes = published.table("bido-table1").notes
    assert sum(len(cells) for note, cells in notes.items() if "OCR" in note) >= 5
    lost = [cell for cell in published.table("bido-table1").cells if cell.value is None]
    assert lost
    assert all(cell.note for cell in lost)


def changed(name, **values):
    """Return the text of a table with other values in its first line."""
    text = FOLDER.joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    rows[0] |= values
    out = io.StringIO()
    writer = csv.DictWriter(out, list(Cell.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"paper": "calor"}, "line 2: expected paper 'bido', got 'calor'"),
        ({"metric": "test_ac"}, "line 2: metric: did you mean 'test_acc'"),
        ({"value": "many"}, "line 2: test_acc: expected a number"),
        ({"value": ""}, "line 2: test_acc: expected a number, or a note why"),
        ({"value": "186.21"}, "line 2: test_acc: expected 0 to 100 percent, got 186.21"),
        ({"unit": "ratio"}, "line 2: test_acc: expected unit 'percent', got 'ratio'"),
        ({"std": "-1"}, "line 2: std: "),
        ({"std": "nan"}, "line 2: std: "),
        ({"table": ""}, "line 2: table: "),
        ({"metric": "attack_acc1"}, "two cells for bido, Table 1, GMI"),
    ],
)
def test_a_damaged_table_is_refused(values, message):
    entry = published.table("bido-table1").entry
    with pytest.raises(DataError, match="table bido-table1") as caught:
        parse_cells(changed("bido-table1", **values), "bido-table1", "bido", entry)
    assert message in str(caught.value)


def test_missing_lines_and_columns_are_refused():
    entry = published.table("bido-table1").entry
    text = changed("bido-table1")
    with pytest.raises(DataError, match="expected 40 cells, got 39"):
        parse_cells(text.rstrip("\n").rpartition("\n")[0], "bido-table1", "bido", entry)
    with pytest.raises(DataError, match="expected the columns"):
        parse_cells(text.replace("std", "spread", 1), "bido-table1", "bido", entry)


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'bido-table3'"):
        published.table("Bido-Tabel3")


def test_tables_with_nothing_to_run_say_why():
    kinds = {"settings", "time", "study", "robustness", "analysis"}
    for table in published.tables():
        if table.entry.kind in kinds:
            assert table.entry.nothing, table.name
        elif table.entry.kind != "accuracy":
            assert table.entry.parts, table.name


def test_every_metric_is_used():
    used = {cell.metric for table in published.tables() for cell in table.cells}
    assert set(METRICS) <= used


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def test_list_papers():
    result = command("list", "papers")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(published.names())
    assert "bido-table3      [attacks] BiDO Table 3: MID and BiDO against KED-MI" in result.stdout
    assert "papers     advlearn-table1, " in command("list").stdout


@pytest.mark.parametrize("name", published.names())
def test_show_prints_every_table(name):
    result = command("show", name)
    assert result.exit_code == 0
    assert published.table(name).paper.source in result.stdout
    assert ("nothing to run: " in result.stdout) == bool(published.table(name).entry.nothing)


def test_show_as_json():
    facts = json.loads(command("show", "bido-table3", "--json").stdout)
    assert facts["number"] == "Table 3"
    assert len(facts["cells"]) == 32
