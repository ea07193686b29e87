"""A given model through the command line: refused in one line before anything is trained."""

import json

import pytest
from safetensors.torch import save_file

from commands import SETTINGS, changed, enter, error_of, frostglass
from frostglass.data.faces import Faces
from given_models import fitted

PEOPLE = 12
GIVEN = f"""
name = "given"

[data]
name = "faces"
size = 16
identities = {PEOPLE}
images = 8
public_identities = 30
public_images = 1
{SETTINGS.replace("options = { width = 4 }", "", 1)}"""
LINEAR = ("target.model=given_models:linear", "target.weights=w.safetensors")


@pytest.fixture(scope="module")
def private():
    data = Faces(size=16, identities=PEOPLE, images=8, public_identities=30, public_images=1)
    return data.tables()[0]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = enter(tmp_path, monkeypatch)
    (folder / "given.toml").write_text(GIVEN)
    return folder


def run(*settings):
    result = frostglass("run", "given.toml", *changed(*settings))
    return error_of(result, worked=True), result.progress


def test_exchanged_classes_are_refused_with_the_order_to_set(here, private):
    rows = [0, 1, 5, 3, 4, 9, 6, 7, 8, 2, 10, 11]
    save_file(fitted(private, rows=rows), here / "w.safetensors")
    line, progress = run(*LINEAR)
    assert line.startswith("target: 3 of 12 classes are in another order than stated (")
    order = json.loads(line.partition("set classes = ")[2])
    assert order == [private.names[row] for row in rows]
    # The split was made and the weights were loaded; nothing was trained.
    assert [word.split()[0] for word in progress] == ["split", "split", "target"]
    assert not (here / ".frostglass" / "prior").exists()
    wrong = json.dumps([*order[:-1], "nobody"])
    line, _ = run(*LINEAR, f"target.classes={wrong}")
    assert line.startswith("target: classes: expected the names of the 12 people, each once, in")


def test_probabilities_are_refused(here, private):
    """`check` finds them too: noise tells."""
    save_file(fitted(private), here / "w.safetensors")
    settings = changed("target.model=given_models:with_softmax", "target.weights=w.safetensors")
    for command in ("check", "run"):
        line = error_of(frostglass(command, "given.toml", *settings))
        assert line.endswith("returns probabilities, not logits: remove its softmax")


def test_another_range_is_refused_with_the_setting(here, private):
    save_file(fitted(private, range_=255), here / "w.safetensors")
    line, _ = run(*LINEAR)
    assert line.startswith("target: the model expects other inputs. Set mean = [0, 0, 0], std = [")


def test_an_evaluator_with_the_targets_weights_is_refused(here, private):
    """Under another name, and before anything is trained."""
    save_file(fitted(private), here / "w.safetensors")
    save_file(fitted(private), here / "other.safetensors")
    evaluator = '{ model = "given_models:linear", weights = "other.safetensors" }'
    line, progress = run(*LINEAR, f"evaluators=[{evaluator}]")
    assert line.startswith("evaluators[0]: has the target's weights, and would accept whatever")
    assert {word.split()[0] for word in progress} == {"split", "target"}


def test_an_evaluator_in_another_order_is_refused(here, private):
    save_file(fitted(private, rows=[1, 2, 0, *range(3, PEOPLE)]), here / "other.safetensors")
    evaluator = '{ model = "given_models:linear", weights = "other.safetensors" }'
    line, progress = run(f"evaluators=[{evaluator}]")
    assert line.startswith("evaluators[0]: 3 of 12 classes are in another order")
    assert {word.split()[0] for word in progress} == {"split", "target"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['target.classes=["a", "b"]'], "classes: states the order of the outputs of weights"),
        ([*LINEAR, 'target.classes=["a", "a"]'], "classes: 'a' is given twice: name each once"),
        (
            [*LINEAR, 'target.classes=["a"]', 'target.attributes=["all"]'],
            "classes: names people, and this model predicts attributes",
        ),
    ],
)
def test_an_order_that_cannot_be_meant(settings, message):
    assert message in error_of(frostglass("check", "given.toml", *changed(*settings)))


def test_show_explains_classes():
    assert "the people's names in the order of the outputs" in frostglass("show", "target").out


def test_check_estimates_a_config_with_given_networks(here, private):
    """A dry run has no images to examine; an order that is stated is not an obstacle."""
    save_file(fitted(private), here / "w.safetensors")
    order = json.dumps(private.names)
    settings = changed(*LINEAR, f"target.classes={order}")
    result = frostglass("check", "given.toml", *settings)
    assert result.code == 0, result.err
    assert "loads weights" in result.out
