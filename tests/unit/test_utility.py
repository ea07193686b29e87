"""MCC, AUC and accuracy of attributes, with intervals over people."""

import numpy as np
import pytest
import torch

from evidence import (
    rng,
)
from frostglass.core.errors import DataError, RunError
from frostglass.metrics._utility import auc, mcc, utility


def answered(images=60, attributes=5, seed=0):
    """Answers, and logits that know something of them, with ties."""
    answers = (
        torch.rand(images, attributes, generator=rng(seed)) < torch.linspace(0.2, 0.8, attributes)
    ).float()
    logits = (answers - 0.5) * 1.5 + torch.randn(images, attributes, generator=rng(seed + 1))
    return (logits * 4).round() / 4 + 0.05, answers


def test_mcc_and_auc_are_those_of_scikit_learn():
    from sklearn.metrics import matthews_corrcoef, roc_auc_score

    logits, answers = answered()
    logits[:, 3] = logits[:, 3].abs() + 0.1  # always yes
    columns = range(answers.shape[1])
    assert mcc(logits, answers).tolist() == pytest.approx(
        [matthews_corrcoef(answers[:, a] > 0, logits[:, a] > 0) for a in columns], abs=1e-12
    )
    assert mcc(logits, answers)[3] == 0
    assert auc(logits, answers).tolist() == pytest.approx(
        [roc_auc_score(answers[:, a], logits[:, a]) for a in columns], abs=1e-12
    )
    assert len(logits[:, 0].unique()) < len(logits)  # there were ties


def test_auc_counts_pairs():
    logits, answers = answered(30, 2, seed=5)
    for a in range(2):
        pairs = [
            (x > y) + (x == y) / 2
            for x in logits[answers[:, a] == 1, a].tolist()
            for y in logits[answers[:, a] == 0, a].tolist()
        ]
        assert auc(logits, answers)[a].item() == pytest.approx(np.mean(pairs), abs=1e-12)


def test_one_answer_only():
    logits, answers = answered()
    answers[:, 1] = 1
    assert auc(logits, answers).isnan().tolist() == [False, True, False, False, False]
    assert mcc(logits, answers)[1] == 0
    found = utility(logits, answers)
    keep = [0, 2, 3, 4]
    assert (found["attributes"], found["counted"], found["images"]) == (5, 4, 60)
    assert found["mean_auc"] == pytest.approx(auc(logits, answers)[keep].mean().item())
    assert found["mean_mcc"] == pytest.approx(mcc(logits, answers)[keep].mean().item())
    assert found["accuracy"] == pytest.approx(
        ((logits > 0) == (answers > 0)).double().mean().item()
    )
    with pytest.raises(
        DataError, match="each of 5 attributes has the same answer for all 60 images"
    ):
        utility(logits, torch.ones_like(answers))


def test_intervals_draw_people_with_all_their_images():
    """Slow reference: people are resampled and their images copied one by one."""
    from frostglass.runtime.seeding import generator_for

    logits, answers = answered(24, 3, seed=8)
    labels = torch.tensor([7] * 9 + [2] * 6 + [5] * 5 + [3] * 4)
    answers[:, 2] = labels == 2  # so that some resamples have one answer only
    found = utility(logits, answers, labels, resamples=40, seed=3)
    drawn = torch.randint(4, (40, 4), generator=generator_for(3, "bootstrap", 4))
    slow = {"mean_mcc": [], "mean_auc": [], "accuracy": []}
    for people in drawn:
        index = torch.cat([(labels == labels.unique()[who]).nonzero()[:, 0] for who in people])
        slow["mean_mcc"].append(mcc(logits[index], answers[index]).mean().item())
        slow["mean_auc"].append(auc(logits[index], answers[index]).nanmean().item())
        slow["accuracy"].append(
            ((logits[index] > 0) == (answers[index] > 0)).double().mean().item()
        )
    for name, values in slow.items():
        assert [found[f"{name}_low"], found[f"{name}_high"]] == pytest.approx(
            np.quantile(values, [0.025, 0.975]).tolist(), abs=1e-9
        )
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
    assert found["people"] == 4


def test_chunks_of_resamples_change_nothing(monkeypatch):
    logits, answers = answered(24, 3)
    labels = torch.arange(24) // 4
    whole = utility(logits, answers, labels, resamples=50)
    monkeypatch.setattr("frostglass.metrics._utility.CHUNK", 24 * 7)
    assert utility(logits, answers, labels, resamples=50) == pytest.approx(whole, abs=1e-12)


def test_intervals_are_over_people_and_not_over_images():
    """Five copies of an image are no more evidence than one."""
    logits, answers = answered(20, 4)
    once = utility(logits, answers, torch.arange(20))
    copied = utility(
        logits.repeat_interleave(5, 0),
        answers.repeat_interleave(5, 0),
        torch.arange(20).repeat_interleave(5),
    )
    assert {name: copied[name] for name in once if name != "images"} == pytest.approx(
        {name: value for name, value in once.items() if name != "images"}
    )


def test_a_target_that_is_always_right_is_not_certain():
    answers = torch.tensor([[0.0, 1], [1, 0]] * 15)
    found = utility(answers - 0.5, answers, torch.arange(30))
    assert (found["mean_mcc"], found["mean_auc"], found["accuracy"]) == (1, 1, 1)
    assert (found["accuracy_low"], found["accuracy_high"]) == (pytest.approx(0.884, abs=1e-3), 1)


def test_invalid_answers_are_refused():
    logits, answers = answered()
    with pytest.raises(DataError, match=r"got \(60, 5\) and \(60, 4\)"):
        mcc(logits, answers[:, :4])
    with pytest.raises(DataError, match="answers of 0 and 1"):
        auc(logits, answers * 2)
    with pytest.raises(
        DataError, match=r"one person for each of 60 images, got labels of shape \(59,\)"
    ):
        utility(logits, answers, torch.arange(59))
    logits[0, 0] = torch.nan
    with pytest.raises(RunError, match="1 logits are not finite"):
        utility(logits, answers)
