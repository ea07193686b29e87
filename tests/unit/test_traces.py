"""What a search records of itself, and that recording changes nothing."""

from dataclasses import replace

import pytest
import torch

from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerSettings, descend
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.kedmi import Kedmi
from frostglass.auditing.steps import _load_reconstructions, _save_reconstructions
from frostglass.core.assets import Assets
from frostglass.core.errors import DataError
from frostglass.store.keys import plain
from worlds import linear_world, prior, target

SHORT = Gmi(steps=12, candidates=3, keep=2, batch=16)


def test_each_step_is_recorded_before_it_is_taken():
    """Half of |z|²: its loss and the norm of its gradient are known."""
    start = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    labels = torch.zeros(2, dtype=torch.long)
    view = linear_world()[0].view(["gradients"])
    result = descend(
        view,
        start,
        labels,
        RowRng.of(0, "tests", labels, torch.arange(2)),
        lambda z, y, rng: (0.5 * z.square().sum(1), 1 / (1 + z.detach().square().sum(1))),
        OptimizerSettings(3, 0.5, "momentum", 0.01, trace=True),
    )
    loss, norm, confidence = result.trace.unbind(2)
    assert loss[:, 0].tolist() == [12.5, 0.5]
    assert norm[:, 0].tolist() == [5, 1]
    assert confidence[:, 0].tolist() == pytest.approx([1 / 26, 1 / 2])
    assert norm[:, 1].tolist() == pytest.approx([2.5, 0.5])  # half a step of gradient z
    assert (loss[:, 1:] < loss[:, :-1]).all()


def test_a_row_that_stops_is_not_recorded_any_more():
    labels, start = torch.zeros(1, dtype=torch.long), torch.ones(1, 2)
    result = descend(
        linear_world()[0].view(["gradients"]),
        start,
        labels,
        RowRng.of(0, "tests", labels, labels),
        lambda z, y, rng: (z.square().sum(1), torch.ones(len(z))),
        OptimizerSettings(40, 0.01, patience=5, trace=True),
    )
    taken = int(result.steps)
    assert taken < 40
    assert result.trace[0, :taken].isfinite().all()
    assert result.trace[0, taken:].isnan().all()


@pytest.mark.parametrize("attack", [SHORT, Kedmi(steps=12, candidates=2, keep=2, batch=16)])
def test_recording_changes_nothing_else_and_names_each_candidate(attack):
    view, assets = target().view(["gradients"]), Assets(prior=prior())
    quiet = invert(attack, view, assets, seed=0)
    loud = invert(replace(attack, trace=True), view, assets, seed=0)
    assert quiet.trace is None
    assert torch.equal(quiet.images, loud.images)
    assert loud.trace.shape == (4, 2, 12, 3)
    assert loud.traced("gradient_norm").gt(0).all()
    with pytest.raises(DataError, match=r"no trace of 'loss' .no search was recorded.: set trace"):
        quiet.traced("loss")


def test_traces_are_stored_with_the_step(tmp_path):
    view, assets = target().view(["gradients"]), Assets(prior=prior())
    result = invert(replace(SHORT, trace=True), view, assets, people=[1, 2], seed=0)
    _save_reconstructions(result, tmp_path)
    (tmp_path / "timing.json").write_text('{"seconds": 1.0}')
    again = _load_reconstructions(tmp_path, torch.device("cpu"))
    assert torch.equal(again.trace, result.trace)


def test_an_attack_without_a_trace_keeps_its_key():
    assert "trace" not in plain(SHORT, "attack", products=False)["gmi"]
    assert plain(replace(SHORT, trace=True), "attack", products=False)["gmi"]["trace"] is True
