"""Measures of attacks on features, each against a slow and obvious reference."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.core.types import Images, Reconstructions, Target
from frostglass.metrics._emd import LARGEST, emd, pii_terms
from frostglass.metrics._lda import lda_chance, lda_score
from frostglass.metrics._utility import auc, mcc, utility
from frostglass.metrics.accuracy import Accuracy
from frostglass.metrics.base import Evidence, measure
from frostglass.metrics.face import Face, feature_similarity, reference_similarities
from frostglass.metrics.likeness import Likeness, likeness
from frostglass.metrics.recognition import Recognition
from frostglass.networks.embedding import embed, public_centre
from worlds import images, split, target

PEOPLE, PICTURES, TRIES = 3, 2, 2


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def bytes_of(*shape, seed=0):
    """Random 8-bit pictures in [0, 1]."""
    return torch.randint(0, 256, shape, generator=rng(seed), dtype=torch.uint8).float() / 255


def evidence(rebuilt=None, victims=None, *, found=None, judges=None, model=None, embedder=None):
    """Three people, two pictures of each, two tries for each picture."""
    rebuilt = bytes_of(PEOPLE, PICTURES * TRIES, 3, 16, 16, seed=1) if rebuilt is None else rebuilt
    rows = rebuilt.shape[:2]
    found = found or Reconstructions(
        rebuilt,
        torch.arange(rows[0]),
        torch.zeros(*rows, 1),
        torch.zeros(rows),
        queries=0,
        seconds=0,
    )
    judges = [target(seed=1)] if judges is None else judges
    return Evidence(found, model or target(), judges, split(), victims=victims, embedder=embedder)


def victims(channels=3):
    return bytes_of(PEOPLE, PICTURES, channels, 16, 16, seed=2)


def smooth(count=4, channels=3, side=32, seed=3):
    """Pictures with structure, as 8-bit values."""
    rough = torch.rand(count, channels, 5, 5, generator=rng(seed))
    return (
        nn.functional.interpolate(rough, (side, side), mode="bicubic")
        .clamp(0, 1)
        .mul(255)
        .round()
        .div(255)
    )


# Which true picture belongs to which candidate.


def test_each_candidate_is_compared_with_its_own_picture():
    true = victims()
    originals = evidence(victims=true).originals
    slow = torch.stack(
        [true[i, k // TRIES] for i in range(PEOPLE) for k in range(PICTURES * TRIES)]
    )
    assert torch.equal(originals, slow)


def test_originals_that_cannot_be_told_are_refused():
    with pytest.raises(
        ConfigError, match="no victims' pictures to compare with: only an attack on features"
    ):
        _ = evidence().originals
    with pytest.raises(
        RunError, match="3 people with 3 pictures each cannot be behind 3 people with 4 candidates"
    ):
        _ = evidence(victims=bytes_of(3, 3, 3, 16, 16)).originals
    with pytest.raises(RunError, match="2 people with 2 pictures each cannot be behind 3 people"):
        _ = evidence(victims=bytes_of(2, 2, 3, 16, 16)).originals


def test_sorted_candidates_are_refused():
    rebuilt = bytes_of(PEOPLE, 4, 3, 16, 16)
    found = Reconstructions(
        rebuilt,
        torch.arange(3),
        torch.zeros(3, 4, 1),
        torch.zeros(3, 4),
        queries=0,
        seconds=0,
        draws=torch.arange(4).expand(3, 4),
    )
    with pytest.raises(RunError, match="sorted by the target's liking"):
        _ = evidence(victims=victims(), found=found).originals


# Likeness.


def slow_ssim(one, other, side):
    """One picture (C, H, W), by the definition: every window that lies inside, one after the other."""
    reach = np.arange(side) - side // 2
    weights = np.exp(-(reach[:, None] ** 2 + reach[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    found = []
    for x, y in zip(one, other, strict=True):
        for top, left in itertools.product(
            range(x.shape[0] - side + 1), range(x.shape[1] - side + 1)
        ):
            a, b = x[top : top + side, left : left + side], y[top : top + side, left : left + side]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb, cov = (
                (weights * (a - ma) ** 2).sum(),
                (weights * (b - mb) ** 2).sum(),
                (weights * (a - ma) * (b - mb)).sum(),
            )
            found.append(
                (2 * ma * mb + 1e-4)
                * (2 * cov + 9e-4)
                / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
            )
    return np.mean(found)


@pytest.mark.parametrize(
    ("channels", "side", "window"), [(3, 16, 11), (1, 20, 11), (3, 10, 9), (1, 8, 7)]
)
def test_ssim_and_psnr_against_slow_references(channels, side, window):
    one, other = bytes_of(3, channels, side, side, seed=4), smooth(3, channels, side)
    mixed = 0.7 * other + 0.3 * one
    found = likeness(mixed, other)
    for row in range(3):
        a, b = mixed[row].double().numpy(), other[row].double().numpy()
        assert found["ssim"][row].item() == pytest.approx(slow_ssim(a, b, window), abs=1e-5)
        error = np.mean((a - b) ** 2)
        assert found["mse"][row].item() == pytest.approx(error, rel=1e-5)
        assert found["psnr"][row].item() == pytest.approx(10 * math.log10(1 / error), abs=1e-4)


def test_likeness_of_known_pairs():
    black, white = torch.zeros(1, 1, 16, 16), torch.ones(1, 1, 16, 16)
    far = likeness(black, white)
    assert far["mse"].item() == 1
    assert far["psnr"].item() == 0
    assert far["ssim"].item() == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-3)
    step = torch.full((1, 1, 16, 16), 0.5)
    assert likeness(step, step + 0.1)["psnr"].item() == pytest.approx(20, abs=1e-4)


@pytest.mark.parametrize(("channels", "side"), [(3, 16), (1, 16), (3, 32), (1, 64), (1, 8)])
def test_a_copy_is_as_like_as_can_be_and_noise_is_not(channels, side):
    true = smooth(channels=channels, side=side)
    copy, noise = likeness(true, true), likeness(bytes_of(*true.shape, seed=5), true)
    blurred = likeness(nn.functional.avg_pool2d(true, 3, 1, 1, count_include_pad=False), true)
    assert (copy["psnr"] == 100).all()
    assert (copy["mse"] == 0).all()
    assert torch.allclose(
        torch.stack([copy["ssim"], copy["fsim"]]), torch.ones(2, len(true)), atol=1e-5
    )
    for name in ("ssim", "psnr", "fsim"):
        assert (copy[name] > blurred[name]).all()
        assert (blurred[name] > noise[name] + 0.02).all()


def test_fsim_sees_colour_where_there_is_some():
    """The same luminance in other colours: FSIM alone would call the two the same."""
    true = smooth() * 0.5 + 0.25
    shift = torch.tensor([0.2, -0.2 * 0.299 / 0.587, 0])[None, :, None, None]
    assert likeness(true + shift, true)["fsim"].max() < 0.999
    grey_pair = [
        (images * torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]).sum(1, keepdim=True)
        for images in (true + shift, true)
    ]
    assert likeness(*grey_pair)["fsim"].min() > 0.9999


@pytest.mark.parametrize("channels", [1, 3])
def test_likeness_columns_are_by_person_and_candidate(channels):
    true = victims(channels)
    rebuilt = true.repeat_interleave(TRIES, 1).clone()
    rebuilt[1, 3] = 1 - rebuilt[1, 3]
    rows = measure([Likeness()], evidence(rebuilt, true))
    assert list(rows.columns) == ["ssim", "psnr", "fsim", "mse"]
    expected = torch.zeros(PEOPLE, PICTURES * TRIES)
    expected[1, 3] = (1 - 2 * true[1, 1]).square().mean()
    assert torch.allclose(rows.columns["mse"], expected, atol=1e-6)
    assert ((rows.columns["psnr"] == 100) == (expected == 0)).all()
    assert rows.score("mse").values == pytest.approx((0, expected[1, 3].item() / 4, 0))


def test_rebuilt_pictures_are_compared_as_8_bit_ones():
    true = victims()
    nearly = (true.repeat_interleave(TRIES, 1) + 0.4 / 255).clamp(max=1)
    assert (Likeness().columns(evidence(nearly, true))["mse"] == 0).all()


def test_chunks_change_nothing(monkeypatch):
    whole = Likeness().columns(evidence(victims=victims()))
    monkeypatch.setattr("frostglass.metrics.likeness.CHUNK", 5)
    parts = Likeness().columns(evidence(victims=victims()))
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5) for name in whole)


def test_pictures_that_cannot_be_compared_are_refused():
    with pytest.raises(RunError, match=r"got \(2, 3, 16, 16\) and \(2, 3, 8, 8\)"):
        likeness(bytes_of(2, 3, 16, 16), bytes_of(2, 3, 8, 8))
    with pytest.raises(RunError, match="grey or colour pictures"):
        likeness(bytes_of(2, 2, 16, 16), bytes_of(2, 2, 16, 16))
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(RunError, match=r"expected pictures in \[0, 1\]"):
            likeness(torch.full((1, 1, 16, 16), wrong), torch.zeros(1, 1, 16, 16))


# Faces.


def pixels_embedder():
    """A network whose penultimate features are four chosen pixels."""
    network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(4, 2))
    return Target(network, ("a", "b"), (1, 16, 16), head="2", key="pixels")


def grey(*blocks):
    """Pictures of four flat blocks."""
    return (
        torch.tensor(blocks)
        .reshape(-1, 1, 2, 2)
        .repeat_interleave(8, 2)
        .repeat_interleave(8, 3)
        .float()
    )


def pictures_of(values, labels):
    pixels = grey(*values).mul(255).round().byte()
    return Images(
        pixels, torch.tensor(labels), tuple(map(str, range(9))), tuple(map(str, range(len(labels))))
    )


def test_face_similarity_by_hand():
    embedder = pixels_embedder()
    true = grey([1.0, 0, 0, 0], [0, 1.0, 0, 0]).reshape(1, 2, 1, 16, 16)
    rebuilt = grey([0.2, 0, 0, 0], [0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]).reshape(
        1, 4, 1, 16, 16
    )
    shown = evidence(rebuilt, true, embedder=embedder)
    black = pictures_of([[0, 0, 0, 0]], [0])  # the origin, so that cosines are those of the blocks
    found = measure([Face()], replace(shown, split=replace(shown.split, public=black))).columns[
        "face_similarity"
    ]
    assert torch.allclose(found, torch.tensor([[1.0, 0, 1, 0]]), atol=1e-6)


def test_face_similarity_is_seen_from_the_public_mean():
    embedder = target(seed=1)
    true = victims()
    shown = evidence(victims=true, embedder=embedder)
    centre = public_centre(embedder, shown.split.public)
    slow = torch.tensor(
        [
            [
                (
                    embed(embedder, shown.pictures[i * 4 + k][None], centre)[0]
                    @ embed(embedder, true[i, k // 2][None], centre)[0]
                ).item()
                for k in range(4)
            ]
            for i in range(3)
        ]
    )
    found = Face().columns(shown)["face_similarity"]
    assert torch.allclose(found, slow, atol=1e-5)
    copy = Face().columns(evidence(true.repeat_interleave(2, 1), true, embedder=embedder))[
        "face_similarity"
    ]
    assert torch.allclose(copy, torch.ones(3, 4), atol=1e-5)
    assert found.max() < 0.999


def test_face_needs_an_embedder_and_victims():
    with pytest.raises(ConfigError, match=r"none is given: pass embedder=\.\.\."):
        Face().columns(evidence(victims=victims()))
    with pytest.raises(ConfigError, match="no victims' pictures"):
        Face().columns(evidence(embedder=target()))


def test_reference_similarities_against_all_pairs():
    embedder, data, public = target(seed=1), images(23, 4, seed=7), images(12, 5, seed=9)
    found = reference_similarities(embedder, data, public)
    vectors = embed(embedder, data.floats(), public_centre(embedder, public)).double()
    cosine, who = vectors @ vectors.T, data.labels.tolist()
    same, different = {}, {}
    for i, j in itertools.permutations(range(23), 2):
        (same if who[i] == who[j] else different).setdefault((who[i], who[j]), []).append(
            cosine[i, j].item()
        )
    assert found["same_person"] == pytest.approx(
        np.mean([np.mean(pairs) for pairs in same.values()]), abs=1e-6
    )
    assert found["different_people"] == pytest.approx(
        np.mean([np.mean(pairs) for pairs in different.values()]), abs=1e-6
    )
    assert (found["people"], found["with_several"]) == (4, 4)
    assert (
        found["same_person"] > found["different_people"] + 0.3
    )  # the bands of worlds.images tell people apart


def test_somebody_with_one_photo_counts_among_different_people_only():
    public = pictures_of([[0, 0, 0, 0]], [0])
    data = pictures_of([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]], [0, 0, 1])
    found = reference_similarities(pixels_embedder(), data, public)
    assert found == {
        "same_person": pytest.approx(1),
        "different_people": pytest.approx(0),
        "people": 2,
        "with_several": 1,
    }


def test_people_who_give_no_scale_are_refused():
    public = pictures_of([[0, 0, 0, 0]], [0])
    with pytest.raises(DataError, match="2 pictures of 2 people have no two photos"):
        reference_similarities(
            pixels_embedder(), pictures_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, 1]), public
        )
    with pytest.raises(DataError, match="2 pictures of 1 people"):
        reference_similarities(
            pixels_embedder(), pictures_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, 0]), public
        )
    with pytest.raises(DataError, match="got 1 of 2 of nobody in particular"):
        reference_similarities(
            pixels_embedder(), pictures_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, -1]), public
        )


def test_feature_similarity_by_hand():
    guesses = torch.tensor([[[2.0, 0], [0, 1], [1, 1], [-3, 0]]])
    true = torch.tensor([[[1.0, 0], [0, 0.5]]])
    assert torch.allclose(feature_similarity(guesses, true), torch.tensor([[1, 0, 0.5**0.5, 0]]))
    for latents, known in (
        (guesses[0], true),
        (guesses, true[:, :, :1]),
        (guesses[:, :3], true),
        (guesses.expand(2, -1, -1), true),
    ):
        with pytest.raises(
            DataError, match="only the latents of an attack that guesses embeddings"
        ):
            feature_similarity(latents, known)


# Recognition.


def test_recognition_is_accuracy_without_the_target():
    shown = evidence(judges=[target(classes=9, seed=1), target(classes=9, seed=2)])
    all_columns, judged = Accuracy().columns(shown), Recognition().columns(shown)
    assert list(all_columns) == [
        "target_top1",
        "target_confidence",
        "top1_1",
        "top5_1",
        "top1_2",
        "top5_2",
    ]
    assert list(judged) == ["top1_1", "top5_1", "top1_2", "top5_2"]
    assert all(torch.equal(judged[name], all_columns[name]) for name in judged)
    for number, k in itertools.product((1, 2), (1, 5)):
        logits = shown.evaluator_outputs[number - 1][0]
        slow = [
            [float(sum(logits[i * 4 + c] > logits[i * 4 + c, i]) < k) for c in range(4)]
            for i in range(3)
        ]
        assert judged[f"top{k}_{number}"].tolist() == slow
    assert not torch.equal(judged["top1_1"], judged["top5_1"])


def test_a_target_of_attributes_is_not_asked_who_somebody_is():
    attributes = replace(target(), attributes=True)
    assert "top1_1" in measure([Recognition()], evidence(model=attributes)).columns
    with pytest.raises(ConfigError, match="this one tells attributes: use recognition"):
        Accuracy().columns(evidence(model=attributes))
    with pytest.raises(ConfigError, match="recognition needs at least one evaluator"):
        Recognition().columns(evidence(judges=[]))


# Utility.


def answered(pictures=60, attributes=5, seed=0):
    """Answers, and logits that know something of them, with ties."""
    answers = (
        torch.rand(pictures, attributes, generator=rng(seed)) < torch.linspace(0.2, 0.8, attributes)
    ).float()
    logits = (answers - 0.5) * 1.5 + torch.randn(pictures, attributes, generator=rng(seed + 1))
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
    assert (found["attributes"], found["counted"], found["pictures"]) == (5, 4, 60)
    assert found["mean_auc"] == pytest.approx(auc(logits, answers)[keep].mean().item())
    assert found["mean_mcc"] == pytest.approx(mcc(logits, answers)[keep].mean().item())
    assert found["accuracy"] == pytest.approx(
        ((logits > 0) == (answers > 0)).double().mean().item()
    )
    with pytest.raises(
        DataError, match="each of 5 attributes has the same answer for all 60 pictures"
    ):
        utility(logits, torch.ones_like(answers))


def test_intervals_draw_people_with_all_their_pictures():
    """The same people drawn again, their pictures copied one by one."""
    from frostglass.runtime.seeding import generator_for

    logits, answers = answered(24, 3, seed=8)
    labels = torch.tensor([7] * 9 + [2] * 6 + [5] * 5 + [3] * 4)
    answers[:, 2] = labels == 2  # so that some draws of people have one answer only
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


def test_intervals_are_over_people_and_not_over_pictures():
    """Five pictures that are copies of one tell no more than that one."""
    logits, answers = answered(20, 4)
    once = utility(logits, answers, torch.arange(20))
    copied = utility(
        logits.repeat_interleave(5, 0),
        answers.repeat_interleave(5, 0),
        torch.arange(20).repeat_interleave(5),
    )
    assert {name: copied[name] for name in once if name != "pictures"} == pytest.approx(
        {name: value for name, value in once.items() if name != "pictures"}
    )


def test_a_target_that_is_always_right_is_not_certain():
    answers = torch.tensor([[0.0, 1], [1, 0]] * 15)
    found = utility(answers - 0.5, answers, torch.arange(30))
    assert (found["mean_mcc"], found["mean_auc"], found["accuracy"]) == (1, 1, 1)
    assert (found["accuracy_low"], found["accuracy_high"]) == (pytest.approx(0.884, abs=1e-3), 1)


def test_answers_that_cannot_be_judged_are_refused():
    logits, answers = answered()
    with pytest.raises(DataError, match=r"got \(60, 5\) and \(60, 4\)"):
        mcc(logits, answers[:, :4])
    with pytest.raises(DataError, match="answers of 0 and 1"):
        auc(logits, answers * 2)
    with pytest.raises(
        DataError, match=r"one person for each of 60 pictures, got labels of shape \(59,\)"
    ):
        utility(logits, answers, torch.arange(59))
    logits[0, 0] = torch.nan
    with pytest.raises(RunError, match="1 logits are not finite"):
        utility(logits, answers)


# LDA.


def test_lda_score_against_the_scatter_matrices():
    groups = torch.tensor([4, 4, 4, 1, 1, 9, 9, 9, 9, 2])
    vectors = torch.randn(10, 6, generator=rng(), dtype=torch.double) + groups[:, None] / 3
    mean = vectors.mean(0)
    between, within = torch.zeros(6, 6, dtype=torch.double), torch.zeros(6, 6, dtype=torch.double)
    for group in groups.unique():
        some = vectors[groups == group]
        shift = some.mean(0) - mean
        between += len(some) * torch.outer(shift, shift)
        within += sum(torch.outer(v - some.mean(0), v - some.mean(0)) for v in some)
    assert lda_score(vectors, groups) == pytest.approx((between.trace() / within.trace()).item())
    assert lda_score(vectors * 100 + 7, groups) == pytest.approx(lda_score(vectors, groups))


def test_lda_score_by_hand_is_between_over_within():
    """People at ±3, each ±1 around: 4·9 / 4·1."""
    assert lda_score(
        torch.tensor([[2.0], [4], [-2], [-4]]), torch.tensor([0, 0, 1, 1])
    ) == pytest.approx(9)


def test_lots_give_what_chance_says():
    groups = torch.arange(40) // 4
    vectors = torch.randn(40, 200, generator=rng())
    drawn = [
        lda_score(vectors, groups[torch.randperm(40, generator=rng(seed))]) for seed in range(200)
    ]
    assert lda_chance(groups) == 9 / 30
    assert np.mean(drawn) == pytest.approx(9 / 30, rel=0.01)


def test_no_lda_score_without_spread():
    with pytest.raises(
        DataError, match="3 embeddings of 3 people have no spread between and within"
    ):
        lda_score(torch.rand(3, 2), torch.arange(3))
    with pytest.raises(DataError, match="3 embeddings of 1 people"):
        lda_score(torch.rand(3, 2), torch.zeros(3))
    with pytest.raises(DataError, match=r"got \(3, 2\) and \(2,\)"):
        lda_score(torch.rand(3, 2), torch.zeros(2))
    with pytest.raises(RunError, match="embeddings of each person do not differ"):
        lda_score(torch.tensor([[0.1, 0.7], [0.3, 0.2]]).repeat(3, 1), torch.tensor([0, 1] * 3))
    with pytest.raises(RunError, match="or some are not finite"):
        lda_score(torch.tensor([[0.1], [torch.nan], [0.3]]), torch.tensor([0, 0, 1]))
    with pytest.raises(DataError, match="no spread within"):
        lda_chance(torch.arange(3))


# The earth mover's distance.


def test_emd_is_the_best_of_all_pairings():
    a, b = torch.rand(5, 2, 3, generator=rng(0)), torch.rand(5, 2, 3, generator=rng(1))
    slow = min(
        np.mean([(a[i] - b[j]).norm().item() for i, j in enumerate(order)])
        for order in itertools.permutations(range(5))
    )
    assert emd(a, b) == pytest.approx(slow, rel=1e-6)


def test_emd_of_numbers_is_known():
    """In one dimension, sorted against sorted; a shift moves everything by itself."""
    from scipy.stats import wasserstein_distance

    a, b = torch.randn(12, 1, generator=rng(0)), torch.randn(8, 1, generator=rng(1)) + 1
    assert emd(a, b) == pytest.approx(
        wasserstein_distance(a[:, 0].numpy(), b[:, 0].numpy()), rel=1e-6
    )  # 12 and 8 are repeated to 24
    assert emd(a, a + 2.5) == pytest.approx(2.5, rel=1e-6)


def test_emd_does_not_ask_for_order():
    a = torch.rand(40, 3, 16, 16, generator=rng())
    assert emd(a, a[torch.randperm(40, generator=rng(1))]) == 0
    assert emd(a, a.repeat(2, 1, 1, 1)) == 0


def test_sets_that_cannot_be_matched_are_refused():
    with pytest.raises(
        DataError, match=f"sets of 1999 and 3 need 5997 pairs, and at most {LARGEST}"
    ):
        emd(torch.zeros(1999, 1), torch.zeros(3, 1))
    with pytest.raises(DataError, match=r"one shape, got \(2, 3\) and \(2, 4\)"):
        emd(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(DataError, match=r"got \(0, 3\)"):
        emd(torch.zeros(0, 3), torch.zeros(2, 3))
    with pytest.raises(RunError, match="not finite"):
        emd(torch.full((2, 3), torch.inf), torch.zeros(2, 3))


def test_a_blur_towards_the_mean_comes_out_below_the_floor():
    """√d against √(2d) in many dimensions: a small index is no proof."""
    draws, other = (torch.randn(40, 400, generator=rng(seed)) for seed in range(2))
    found = pii_terms(0.1 * other, other, draws, torch.randn(40, 400, generator=rng(2)))
    assert found["rebuilt"] < 0.8 * found["floor"]


def test_the_privacy_index_stands_between_its_floor_and_the_true_pictures():
    draws, other, hidden = (torch.randn(60, 4, generator=rng(seed)) for seed in range(3))
    true = torch.randn(60, 4, generator=rng(3)) * 0.2 + 3
    failed, perfect = pii_terms(hidden, true, draws, other), pii_terms(true, true, draws, other)
    assert failed["floor"] == perfect["floor"] == emd(draws, other) > 0
    assert failed["rebuilt"] == pytest.approx(failed["floor"], rel=0.2)
    assert perfect["rebuilt"] == perfect["originals"] == emd(true, draws) > 3 * failed["rebuilt"]
    with pytest.raises(DataError, match="got 59 rebuilt, 60 originals, 60 draws, 60 other_draws"):
        pii_terms(hidden[:59], true, draws, other)
