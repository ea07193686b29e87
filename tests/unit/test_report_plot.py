"""Utility against leakage."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from frostglass.report.arrange import group
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.plot import MARKS, draw
from frostglass.report.study import Study
from frostglass.report.tradeoff import tradeoff
from pages import Page, assert_own_script, plain
from run_folders import BIDO, BROKEN, CALOR, DEFENDED, FAILED, bido, make_run, many_models, study_of


class Drawing(HTMLParser):
    """The points of a plot, its names with their boxes, and its lines by class."""

    def __init__(self, drawn: str):
        super().__init__()
        self.points: list[dict[str, Any]] = []
        self.names: list[dict[str, Any]] = []
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.title = ""
        self._open: list[str] = []
        self.feed(drawn)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        kind = (values.get("class") or "").split(" ")[0]
        if kind == "point":
            x, y = map(float, re.findall(r"[\d.]+", values["transform"]))
            self.points.append({"x": x, "y": y, "class": values["class"], "title": "", "shape": ""})
        elif kind == "name":
            self.names.append({**values, "text": ""})
        elif tag == "path" and not kind:
            self.points[-1]["shape"] = values["d"]
        elif kind:
            self.lines.setdefault(kind, []).append(values)
        self._open.append(tag if kind != "name" else "name")

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open[-1] == "name":
            self.names[-1]["text"] += data
        elif self._open[-1] == "title" and self.points:
            self.points[-1]["title"] += data
        elif self._open[-1] == "title":
            self.title += data

    @property
    def boxes(self) -> list[tuple[float, float, float, float]]:
        """Left, top, right and bottom of the names, in letters of seven pixels."""
        boxes = []
        for name in self.names:
            wide, x, y = 7 * len(name["text"]), float(name["x"]), float(name["y"])
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[name["text-anchor"]]
            boxes.append((left, y - 10, left + wide, y))
        return boxes


def plot_of(study: Study) -> str:
    plot = tradeoff(study)
    assert plot is not None
    return draw(plot)


def test_a_plot_has_a_point_for_each_model_where_its_numbers_are(tmp_path):
    audits = [
        {**BROKEN, "loss": "ce", "hits": (10, 10)},
        BROKEN,
        {**DEFENDED, "accuracy": 0.962},
        {**bido(), "accuracy": 0.972, "hits": (0, 0), "baseline": 3},
    ]
    drawn = plot_of(study_of(tmp_path, audits))
    drawing = Drawing(drawn)
    assert [(point["class"], plain(point["title"])) for point in drawing.points] == [
        (
            "point c0",
            "undefended: accuracy 98.2 %, recognised 95 % (85–100 %), top-1 100 % and 95 %",
        ),
        ("point c1", "CALoR: accuracy 96.2 %, recognised 35 % (15–55.1 %), top-1 40 % and 35 %"),
        ("point c2", "BiDO: accuracy 97.2 %, recognised 0 % (0–16.8 %), top-1 0 %"),
    ]
    base, calor, last = drawing.points
    # Half way between the two in accuracy, and 60 of 95 parts of the way down.
    assert last["x"] == pytest.approx((base["x"] + calor["x"]) / 2, abs=0.11)
    assert (calor["y"] - base["y"]) / (last["y"] - base["y"]) == pytest.approx(60 / 95, abs=0.002)
    assert [float(re.findall(r"[\d.]+", line["d"])[0]) for line in drawing.lines["reach"]] == [
        p["x"] for p in drawing.points
    ]
    low, high = map(
        float, re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)", drawing.lines["reach"][1]["d"]).groups()
    )
    assert high < calor["y"] < low
    # Guessing reaches one of 20, three in another audit; thin lines cross at the undefended model.
    guesses = [float(line["y1"]) for line in drawing.lines["guess"]]
    assert (last["y"] - guesses[0]) / (last["y"] - base["y"]) == pytest.approx(5 / 95, abs=0.002)
    assert (last["y"] - guesses[1]) / (last["y"] - base["y"]) == pytest.approx(15 / 95, abs=0.002)
    assert len(guesses) == 2
    assert "5–15 %" in plain(drawn)
    (guide,) = drawing.lines["guide"]
    assert f"M62 {base['y']:.1f}H" in guide["d"]
    assert f"M{base['x']:.1f} 16V" in guide["d"]
    assert plain(drawing.title).startswith(
        "Accuracy on held-out images and share recognised of 3 models. undefended: accuracy 98.2 %"
    )
    assert "route" not in drawing.lines


def test_strengths_of_a_defense_are_joined_in_order_of_accuracy(tmp_path):
    drawing = Drawing(plot_of(study_of(tmp_path, many_models())))
    assert len(drawing.points) == 25
    assert [name["text"] for name in drawing.names] == [
        "undefended",
        "MID",
        "BiDO hsic nocco",
        "BiDO coco frobenius",
        "LS",
        "TL",
        "CALoR tanh",
        "DP-SGD",
        "CALoR relu",
    ]
    routes = [
        [tuple(map(float, pair.split(","))) for pair in line["points"].split()]
        for line in drawing.lines["route"]
    ]
    assert [len(route) for route in routes] == [3] * 8
    assert all(route == sorted(route) for route in routes)
    assert {pair for route in routes for pair in route} == {
        (point["x"], point["y"]) for point in drawing.points[1:]
    }
    looks = [(point["class"], point["shape"]) for point in drawing.points]
    assert len(set(looks)) == 9
    assert len({shape for _, shape in looks}) == 9
    assert len({colour for colour, _ in looks}) == 9
    assert len(set(MARKS)) == len(MARKS) == 11
    assert len(drawing.lines["guess"]) == 1


def test_names_on_a_plot_cover_neither_each_other_nor_points(tmp_path):
    drawing = Drawing(plot_of(study_of(tmp_path, many_models())))
    boxes = drawing.boxes
    marks = [
        (point["x"] - 5, point["y"] - 5, point["x"] + 5, point["y"] + 5) for point in drawing.points
    ]

    def overlap(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
        return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]

    assert [
        (i, j)
        for i, one in enumerate(boxes)
        for j, two in enumerate(boxes)
        if i < j and overlap(one, two)
    ] == []
    assert [
        (i, j) for i, one in enumerate(boxes) for j, mark in enumerate(marks) if overlap(one, mark)
    ] == []
    assert all(
        left >= 62 and right <= 748 and top >= 0 and bottom <= 446
        for left, top, right, bottom in boxes
    )


def test_a_plot_is_zoomed_to_the_accuracies(tmp_path):
    same = [{**BROKEN, "accuracy": 1.0}, {**DEFENDED, "accuracy": 1.0}, {**bido(), "accuracy": 1.0}]
    ticks = re.compile(r'y="466" text-anchor="middle">([\d.]+)')
    assert ticks.findall(plot_of(study_of(tmp_path, same))) == [
        "99",
        "99.2",
        "99.4",
        "99.6",
        "99.8",
        "100",
    ]
    wide = [
        {**audit, "accuracy": accuracy}
        for audit, accuracy in zip(same, (0.95, 0.2, 0.6), strict=True)
    ]
    assert ticks.findall(plot_of(study_of(tmp_path / "wide", wide))) == [
        "20",
        "30",
        "40",
        "50",
        "60",
        "70",
        "80",
        "90",
    ]


def test_vacuous_models_are_hollow_on_a_plot(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, **FAILED}, bido()])
    drawing = Drawing(plot_of(group([read_run(run)])[0]))
    assert [point["class"] for point in drawing.points] == [
        "point c0",
        "point c1 hollow",
        "point c2",
    ]
    assert drawing.points[1]["title"].startswith("CALoR (vacuous): ")
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "Hollow points are vacuous and prove nothing." in page.text
    void = make_run(
        tmp_path / "void", [FAILED, {**FAILED, "defenses": CALOR}, {**FAILED, "defenses": BIDO}]
    )
    page = Page(build_report([void], tmp_path / "void.html"))
    assert "Right and low is best" not in page.text
    assert "low points mean a weak attack, not a private model" in page.text


def test_two_models_need_no_plot(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    assert tradeoff(group([read_run(run)])[0]) is None
    assert (
        "Accuracy and leakage of each model"
        not in Page(build_report([run], tmp_path / "report.html")).tables
    )
    more = make_run(tmp_path / "more", [BROKEN, DEFENDED, bido()])
    assert (
        "Accuracy and leakage of each model"
        in Page(build_report([more], tmp_path / "more.html")).tables
    )


def test_a_plot_escapes_names_and_keeps_its_bytes(tmp_path):
    evil = '<script>alert(1)</script>&"'
    run = make_run(
        tmp_path / "run",
        [
            {**BROKEN, "recipe": {"start": evil}},
            BROKEN,
            bido(),
            {**DEFENDED, "recipe": {"start": evil}},
        ],
    )
    first, second = (plot_of(group([read_run(run)])[0]) for _ in range(2))
    assert str(first) == str(second)
    assert "<script" not in first
    assert first.count("&lt;script&gt;") >= 2
    assert Drawing(first).names[0]["text"].endswith(evil)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert_own_script(page)
    assert evil in page.text
