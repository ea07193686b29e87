"""Results in a notebook: one short line, and HTML with a verdict, a table and images."""

from dataclasses import replace

import pytest
import torch

from frostglass.analyses._result import Analysis, Table
from frostglass.auditing.controls import Controls
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.products import ModelExposure
from frostglass.auditing.results import Audit, Trial
from frostglass.auditing.run import Run
from frostglass.core.display import image_grid, table
from frostglass.core.types import Reconstructions
from frostglass.metrics.base import Rows, Score
from frostglass.testing import tiny_prior, tiny_split, tiny_target


def reconstructions(people: int = 3, candidates: int = 2) -> Reconstructions:
    images = torch.rand(people, candidates, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    shape = (people, candidates)
    return Reconstructions(
        images, torch.arange(people), torch.zeros(*shape, 4), torch.ones(shape), 1234, 5.0
    )


def audit(vacuous: str = "") -> Audit:
    result = reconstructions()
    rows = Rows(labels=result.labels, columns={"top1_1": torch.ones(3, 2)})
    score = Score.of("top1_1", torch.ones(3))
    controls = Controls(
        deciding="top1_1",
        headline=(score,),
        excluded=(),
        lift=(score,),
        control_lift=(),
        margin=0.1,
        p_value=None,
        people_needed=None,
        agreement=None,
        fooled=False,
        manifold=None,
        references=None,
        vacuous=vacuous,
        warnings=(),
    )
    trial = Trial(ModelExposure(tiny_target()), tiny_prior(), result, result, rows, rows)
    return Audit(
        split=tiny_split(), evaluators=(), verifiers=(), embedder=None, trial=trial, control=None,
        experiment=Experiment.parse({}), controls=controls,
    )  # fmt: skip


def run() -> Run:
    vacuous = audit("nothing <b>works</b>")
    return Run("toy", {}, ("a", "b"), (audit(), vacuous), failed=("c: <i>broken</i>",))


def analysis() -> Analysis:
    table = Table("Ranks <1>", ("layer", "rank"), (("head", 3.14159265), ("body", None)))
    return Analysis((table,), (), ("a note",))


VIEW = tiny_target().view(["scores"])


@pytest.mark.parametrize(
    "value",
    [
        audit(),
        run(),
        analysis(),
        reconstructions(),
        tiny_target(),
        tiny_prior(),
        tiny_split(),
        tiny_split().train,
        VIEW,
        Score.of("top1_1", torch.ones(3)),
        Rows(labels=torch.arange(3), columns={"top1_1": torch.ones(3, 2)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_is_one_short_line(value: object) -> None:
    assert "\n" not in repr(value)
    assert len(repr(value)) < 200


def test_html_has_the_verdict_the_scores_and_the_images() -> None:
    html = audit("nothing <b>works</b>")._repr_html_()
    assert "VACUOUS" in html
    assert "<b>works" not in html
    assert "top1_1" in html
    assert 'src="data:image/png;base64,' in html
    assert "believable" in audit()._repr_html_()
    assert "3 people × 2 images" in reconstructions()._repr_html_()


def test_a_run_is_a_table_of_its_audits() -> None:
    html = run()._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>believable</td>" in html
    assert "VACUOUS: nothing &lt;b&gt;works" in html
    assert "<td>100.0 %</td>" in html
    assert "c: &lt;i&gt;broken" in html
    assert repr(run()) == "Run(toy: 2 audits, 1 failed)"


def test_an_analysis_shows_its_tables() -> None:
    html = analysis()._repr_html_()
    assert "Ranks &lt;1&gt;" in html
    assert "<td>3.142</td>" in html
    assert "<td>body</td><td></td>" in html
    assert "a note" in html


@pytest.mark.parametrize("value", [tiny_split().train, tiny_prior()], ids=["images", "prior"])
def test_images_and_priors_show_themselves(value) -> None:
    assert value._repr_html_().startswith(f"<p>{value!r}</p><img alt=")


def test_a_prior_that_needs_a_class_shows_no_image() -> None:
    assert "<img" not in replace(tiny_prior(), condition="label")._repr_html_()


def test_a_grid_has_a_row_per_person() -> None:
    result = reconstructions()
    grid = result.grid()
    assert grid.size == (2 * 8, 3 * 8)
    assert result.grid(people=1).size == (2 * 8, 8)
    corner = torch.tensor(grid.getpixel((8, 16))) / 255
    assert torch.allclose(corner, result.images[2, 1, :, 0, 0], atol=1 / 255)


def test_grey_images_and_squares() -> None:
    assert image_grid(torch.zeros(5, 1, 4, 4)).size == (12, 8)
    assert image_grid(torch.zeros(5, 1, 4, 4)).mode == "L"


def test_a_table_escapes_its_values() -> None:
    assert table(["a"], [["<script>"]]) == (
        "<table><tr><th>a</th></tr><tr><td>&lt;script&gt;</td></tr></table>"
    )


def test_counts_of_unfinished_searches() -> None:
    result = replace(reconstructions(), broken=torch.eye(3, 2).bool())
    assert (result.count("broken"), result.count("partial")) == (2, 0)
