"""Every threat keeps the contract, and says what is wrong before anything is computed."""

import pytest

from frostglass.core.errors import ConfigError
from frostglass.robustness import threats
from frostglass.robustness.base import DEFAULTS, Backdoor
from frostglass.testing import check_threat


@pytest.mark.parametrize("name", threats.names())
def test_contract(name):
    check_threat(threats.get(name)())


@pytest.mark.parametrize("name", threats.names())
def test_a_class_that_does_not_exist(name):
    method = threats.get(name)
    more = {} if issubclass(method, Backdoor) else {"targeted": True}
    assert method(target_class=3, **more).problems((3, 16, 16), 4) == []
    assert method(target_class=4, **more).problems((3, 16, 16), 4) == [
        "target_class: expected the number of a class, 0 to 3, got 4: lower it"
    ]
    with pytest.raises(ConfigError, match=r"target_class: expected at least 0, got -1"):
        method(target_class=-1, **more)


def test_all_are_measured_by_default():
    assert {table["name"] for table in DEFAULTS} == set(threats.names())
