"""Threads, torch and CPU: recorded with each step, outside its key, and compared over a run."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from frostglass.auditing import run as run_module
from frostglass.auditing.run import run_all
from frostglass.store import store as store_module
from frostglass.store.files import Work, read_json, write_json
from frostglass.store.store import Store
from steps import Product, step

HERE = {"threads": 1, "torch": str(torch.__version__), "cpu": "AVX2"}


@pytest.fixture
def under(monkeypatch):
    """Sets the conditions under which steps are made."""

    def set_conditions(**changes: Any) -> None:
        monkeypatch.setattr(store_module, "conditions", lambda: HERE | changes)

    set_conditions()
    return set_conditions


def manifest_of(store: Store, config: Any) -> dict[str, Any]:
    key = store.step(step(), config, seed=0).key
    return read_json(store.root / "target" / key / "manifest.json")


def test_conditions_are_recorded_and_are_not_part_of_the_key(tmp_path):
    torch.set_num_threads(2)
    store = Store(tmp_path)
    two = store.key(step(), None, seed=0)
    assert manifest_of(store, None)["conditions"] == [
        {
            "threads": 2,
            "torch": str(torch.__version__),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
    ]
    torch.set_num_threads(1)
    assert Store(tmp_path).key(step(), None, seed=0) == two


def test_a_run_under_one_set_of_conditions_mixes_nothing(tmp_path, under):
    store = Store(tmp_path)
    for config in (1, 2):
        store.step(step(), config, seed=0)
    assert store.mixed_conditions() == ""
    under(threads=2)
    again = Store(tmp_path)
    again.step(step(), 1, seed=0)
    assert again.mixed_conditions() == "", "what was made earlier is read, not made now"


def test_steps_made_under_other_conditions_are_named(tmp_path, under):
    Store(tmp_path).step(step(), 1, seed=0)
    under(threads=2, cpu="AVX512")
    store = Store(tmp_path)
    for config in (1, 2):
        store.step(step(), config, seed=0)
    assert store.mixed_conditions() == "CPU capability: AVX2, AVX512; threads: 1, 2"


def test_the_number_of_devices_is_recorded_for_steps_that_train(tmp_path, under):
    def make(config: Any, devices: int, **_: Any) -> Product:
        return Product(torch.full((1,), float(devices)))

    training = replace(step(make), trains=True)
    store = Store(tmp_path, devices=2)
    assert store.step(training, 1, seed=0).values.item() == 2
    store.step(step(), 2, seed=0)
    assert store.mixed_conditions() == ""
    store = Store(tmp_path)
    for config in (1, 3):
        store.step(training, config, seed=0)
    assert store.mixed_conditions() == "devices: 1, 2"


def test_a_step_resumed_under_other_conditions_names_both(tmp_path, under):
    def stopping(config: Any, *, work: Work, **_: Any) -> Product:
        if work.load("state") is None:
            work.save("state", {"values": torch.ones(1)})
            raise KeyboardInterrupt
        return Product(torch.zeros(1))

    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.step(step(stopping), None, seed=0)
    under(threads=4)
    product = store.step(step(stopping), None, seed=0)
    manifest = read_json(tmp_path / "target" / product.key / "manifest.json")
    assert manifest["conditions"] == [HERE, HERE | {"threads": 4}]
    assert store.mixed_conditions() == "threads: 1, 4"
    assert set(read_json(tmp_path / "target" / product.key / "timing.json")) == {
        *("attempts", "seconds", "finished")
    }


def test_an_attempt_that_left_no_checkpoint_does_not_count(tmp_path, under):
    def stopping(config: Any, **_: Any) -> Product:
        raise KeyboardInterrupt

    store = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.step(step(stopping), None, seed=0)
    under(threads=4)
    assert manifest_of(store, None)["conditions"] == [HERE | {"threads": 4}]


def test_a_step_of_an_older_version_is_compared_by_its_torch_version(tmp_path, under):
    store = Store(tmp_path)
    manifest = manifest_of(store, None)
    del manifest["conditions"]
    manifest["packages"]["torch"] = "1.0"
    write_json(tmp_path / "target" / manifest["key"] / "manifest.json", manifest)
    store = Store(tmp_path)
    store.step(step(), None, seed=0)
    assert store.mixed_conditions() == ""
    store.step(step(), 2, seed=0)
    assert store.mixed_conditions() == f"torch version: 1.0, {torch.__version__}"


@dataclass(frozen=True)
class Verdict:
    warnings: tuple[str, ...] = ("first",)


@dataclass(frozen=True)
class Named:
    """Stands for an audit, and for its experiment."""

    name: str
    controls: Verdict = Verdict()
    thresholds: None = None
    key: str = "made"

    @property
    def reconstructions(self):
        return self

    rows = reconstructions


def test_a_run_that_mixes_conditions_says_so(tmp_path, monkeypatch, under):
    chosen = [(name, Named(name)) for name in ("one", "two")]
    monkeypatch.setattr(run_module, "experiments", lambda _: chosen)
    monkeypatch.setattr(run_module, "audit", lambda experiment, _: experiment)
    store = Store(tmp_path)
    store.step(step(), 1, seed=0)
    assert [each.controls.warnings for each in run_all({}, store).audits] == [("first",)] * 2
    under(threads=2)
    store.step(step(), 2, seed=0)
    warning = (
        "steps of this run were made under different conditions (threads: 1, 2): its last bits may "
        "not repeat; to make all steps under one, give a new --store"
    )
    warnings = [each.controls.warnings for each in run_all({}, store).audits]
    assert warnings == [("first", warning)] * 2, "one line in the terminal and in the report"
