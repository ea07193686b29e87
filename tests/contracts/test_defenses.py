"""Every registered defense keeps the same promises."""

import pytest

from frostglass.defenses.base import defenses
from frostglass.training import Training, train_target
from worlds import NoWork, same_weights, split

# Small enough for the four classes and few epochs of a test.
SMALL = {"calor": {"rank": 2, "switch": 0.5}}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3)


@pytest.fixture(params=defenses.names())
def defense(request):
    return defenses.get(request.param)


def train(*chosen):
    return train_target(CONFIG, split(), chosen, seed=0, work=NoWork())


def test_strength_zero_is_the_undefended_run_bit_for_bit(defense):
    plain, off = train(), train(defense(**defense.off))
    assert same_weights(plain.module, off.module)
    assert plain.info == off.info
    assert defense(**defense.off).replaces() == frozenset()


def test_at_strength_it_trains_and_changes_the_result(defense):
    made = train(defense(**SMALL.get(defense.name, {})))
    assert not same_weights(train().module, made.module)
    assert all(value == value for row in made.info["history"] for value in row.values())  # no NaN


def test_its_page_names_its_paper_and_its_parameters(defense):
    text = defense.__doc__
    assert "Paper:" in text
    assert "Differs:" in text
    for name in defense.__dataclass_fields__:
        assert f"{name}:" in text, f"{name} is not explained"
