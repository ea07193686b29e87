"""Analyses as a framework: registry, contract, files of a run folder, command and drawing."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict

import pytest

from commands import error_of, frostglass
from frostglass import Analysis, AnalysisMethod, analyze, parameters
from frostglass.analyses._files import read_analyses, write_analysis
from frostglass.analyses._result import Axis, Curve, Figure, Table
from frostglass.analyses.base import analyses, unfit
from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError, DataError, RunError, StoreError
from frostglass.report.build import build_report
from frostglass.report.figures import plot_of, standalone
from pages import Page
from run_folders import BROKEN, make_run

ONE = Figure("One <figure>", Axis("x"), Axis("y", percent=True), (Curve("a", (1, 2), (0.1, 0.2)),))
FOUND = Analysis((Table("table", ("name", "value"), (("a", 1.5), ("b", None))),), (ONE,), ("note",))


@parameters
class Constant(AnalysisMethod):
    """An analysis from outside."""

    value: float = 1.0
    surfaces = frozenset()

    def run(self, context):
        return Analysis((Table("t", ("v",), ((self.value,),)),), (ONE,))


def test_an_analysis_from_outside_runs_by_path_and_in_python(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_analyses", sys.modules[__name__])
    assert analyze(Constant(value=2.0)).tables[0].rows == ((2.0,),)
    done = frostglass(
        "analyze", "own_analyses:Constant", "--set", "analysis.value=3", "--json",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert printed["tables"][0]["rows"] == [[3.0]]
    assert [record.analysis.tables[0].rows for record in read_analyses(tmp_path / "run")] == [
        ((3.0,),)
    ]


def test_a_class_without_run_is_refused():
    class Empty(AnalysisMethod):
        """Nothing."""

    with pytest.raises(ConfigError, match="analysis Empty lacks run"):
        analyses.register(Empty, "empty")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("c", (1.0, 2.0), (1.0,)), "2 x, 1 y"),
        (lambda: Curve("c", (), ()), "0 x, 0 y"),
        (lambda: Curve("c", (1.0,), (float("nan"),)), "1 values are not finite"),
        (lambda: Curve("c", (1.0,), (1.0,), low=(0.0,)), "1 low and 0 high"),
        (lambda: Table("t", ("a", "b"), ((1,),)), "expected 2 cells a row, got 1"),
        (lambda: Table("t", ("a",), ((float("inf"),),)), "not finite"),
        (lambda: Figure("f", Axis("x"), Axis("y"), ()), "at least one curve"),
        (
            lambda: Figure("f", Axis("x", log=True), Axis("y"), (Curve("c", (0.0,), (1.0,)),)),
            "a log scale needs values above 0, got 0.0",
        ),
    ],
)
def test_numbers_that_cannot_be_shown_are_refused(make, message):
    with pytest.raises(RunError, match=message):
        make()


def test_written_and_read_again(tmp_path):
    write_analysis(FOUND, Constant(), {"seed": 1}, tmp_path)
    (record,) = read_analyses(tmp_path)
    assert record.analysis == FOUND
    assert record.method["value"] == 1.0
    assert record.settings == {"seed": 1}


def test_edited_files_are_refused(tmp_path):
    file = write_analysis(FOUND, Constant(), {}, tmp_path)
    good = file.read_text()
    file.write_text(good.replace("1.5", "1.4"))
    with pytest.raises(StoreError, match="its hash differs"):
        read_analyses(tmp_path)
    with pytest.raises(StoreError, match="its hash differs"):
        write_analysis(FOUND, Constant(value=2.0), {}, tmp_path)  # would seal the edit


def test_a_file_of_other_types_is_refused(tmp_path):
    from frostglass.store.manifest import seal

    file = write_analysis(FOUND, Constant(), {}, tmp_path)
    document = json.loads(file.read_text())
    document["analysis"]["figures"][0]["curves"][0]["x"] = ["far", 2]
    file.write_text(json.dumps(document))
    seal(file.parent, [file.name])
    with pytest.raises(DataError, match="run the analysis again"):
        read_analyses(tmp_path)


def test_the_report_shows_the_analyses_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run", [BROKEN])
    plain = build_report([folder], tmp_path / "plain.html").read_text()
    assert "Analysis" not in plain
    write_analysis(FOUND, Constant(), {}, folder)
    page = build_report([folder], tmp_path / "page.html").read_text()
    Page(tmp_path / "page.html")
    assert "One &lt;figure&gt;" in page
    assert page.count('class="plot wide"') == plain.count('class="plot wide"') + 1
    shown = json.loads((tmp_path / "page.json").read_text())["analyses"]
    assert shown[0]["analysis"] == json.loads(json.dumps(asdict(FOUND)))


def test_a_redacted_report_has_no_settings_of_analyses(tmp_path):
    folder = make_run(tmp_path / "run", [BROKEN])
    write_analysis(FOUND, Constant(), {"target": {"classes": ["Ann Other"]}}, folder)
    build_report([folder], tmp_path / "page.html", redact=True)
    assert "Ann Other" not in (tmp_path / "page.json").read_text()


def test_a_figure_stands_alone_as_xml():
    root = ET.fromstring(standalone(ONE))
    texts = [part.text for part in root.iter() if part.tag.endswith("text")]
    assert "One <figure>" in texts
    assert "a" in texts


def test_points_keep_their_order_and_log_scales_their_ratios():
    path = Curve("path", (3.0, 1.0, 2.0), (1.0, 10.0, 100.0))
    plot = plot_of(Figure("f", Axis("x"), Axis("y", log=True), (path,)))
    assert [point.x for point in plot.series[0].points] == [3.0, 1.0, 2.0]
    assert [point.y for point in plot.series[0].points] == pytest.approx([0, 1, 2])
    assert plot.upward.title == "log₁₀ of y"


def test_large_values_have_ticks():
    plot = plot_of(Figure("f", Axis("x"), Axis("y"), (Curve("c", (0.0, 3e9), (-1e-5, 2e-5)),)))
    for axis in (plot.across, plot.upward):
        assert 2 <= len(list(axis.ticks(9))) <= 10


def test_crowded_figures_have_a_legend():
    many = Curve("many", tuple(map(float, range(99))), (0.5,) * 99, joined=False)
    drawn = standalone(Figure("f", Axis("x"), Axis("y"), (many,)))
    assert "polyline" not in drawn
    assert ">many</text>" in drawn


def test_a_config_of_the_other_surface_is_refused():
    features = {"target": {"cut": "stage1", "attributes": ["all"]}}
    chosen = [experiment for _, experiment in experiments(features)]
    (problem,) = unfit(analyses.get("fisher")(), chosen)
    assert "fisher analyses model, and this config exposes features: remove target.cut" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fischer"], "no analysis named 'fischer': did you mean 'fisher'?"),
        (["fisher"], "fisher analyses experiments, got no config"),
        (["toy_world", "--set", "seed=1"], "toy_world uses no config"),
        (["toy_world", "--set", "analysis.step=0"], "step: expected more than 0, got 0"),
        (["toy_world", "--set", "analysis=3"], "expected a table of parameters"),
        (["toy_world", "--set", "analysis.pace=1"], "pace: no such parameter"),
        (["fisher", "none.toml"], "cannot read none.toml"),
    ],
)
def test_bad_usage_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(frostglass("analyze", *arguments))
