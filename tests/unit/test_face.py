"""Face similarity and top-1, each against a slow reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evidence import (
    IMAGES,
    PEOPLE,
    TRIES,
    evidence,
    rng,
    victims,
)
from frostglass.core.errors import ConfigError, DataError
from frostglass.core.types import Images, Target
from frostglass.metrics.accuracy import Accuracy
from frostglass.metrics.base import measure
from frostglass.metrics.face import Face, feature_similarity, reference_similarities
from frostglass.metrics.top1 import Top1
from frostglass.networks.embedding import embed, public_centre
from worlds import images, target


def pixels_embedder():
    """A network whose penultimate features are four chosen pixels."""
    network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(4, 2))
    return Target(network, ("a", "b"), (1, 16, 16), head="2", key="pixels")


def grey(*blocks):
    """Images of four flat blocks."""
    return (
        torch.tensor(blocks)
        .reshape(-1, 1, 2, 2)
        .repeat_interleave(8, 2)
        .repeat_interleave(8, 3)
        .float()
    )


def images_of(values, labels):
    pixels = grey(*values).mul(255).round().byte()
    return Images(
        pixels, torch.tensor(labels), tuple(map(str, range(9))), tuple(map(str, range(len(labels))))
    )


def test_face_similarity_by_hand():
    embedder = pixels_embedder()
    true = grey([1.0, 0, 0, 0], [0, 1.0, 0, 0]).reshape(1, 2, 1, 16, 16)
    reconstructed = grey([0.2, 0, 0, 0], [0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]).reshape(
        1, 4, 1, 16, 16
    )
    shown = evidence(reconstructed, true, embedder=embedder)
    black = images_of([[0, 0, 0, 0]], [0])  # the origin, so that cosines are those of the blocks
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
                    embed(embedder, shown.images[i * 4 + k][None], centre)[0]
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


def test_similarity_is_that_of_faces_unless_the_attack_embeds():
    embedder, true = target(seed=1), victims()
    shown = evidence(victims=true, embedder=embedder)
    columns = Face().columns(shown)
    assert list(columns) == ["face_similarity", "similarity"]
    assert torch.equal(columns["similarity"], columns["face_similarity"])
    centre = public_centre(embedder, shown.split.public)
    embeddings = embed(embedder, true.flatten(0, 1), centre).unflatten(0, (PEOPLE, IMAGES))
    latents = torch.randn(PEOPLE, IMAGES * TRIES, embeddings.shape[2], generator=rng(4))
    guesses = replace(shown.reconstructions, latents=latents)
    embedded = Face().columns(replace(shown, reconstructions=guesses, embeds=True))
    assert torch.equal(embedded["face_similarity"], columns["face_similarity"])
    assert torch.equal(embedded["similarity"], feature_similarity(latents, embeddings))


def test_without_true_images_a_face_is_compared_with_the_training_images():
    embedder = target(seed=1)
    ranked = torch.arange(4).flip(0).expand(PEOPLE, 4)  # a model audit sorts its candidates
    shown = evidence(embedder=embedder)
    shown = replace(shown, reconstructions=replace(shown.reconstructions, draws=ranked))
    train, centre = shown.split.train, public_centre(embedder, shown.split.public)
    columns = Face().columns(shown)
    for person in range(PEOPLE):
        known = embed(embedder, train.floats(train.labels == person), centre)
        for candidate in range(4):
            image = embed(embedder, shown.images[person * 4 + candidate][None], centre)
            slow = (known @ image[0]).mean().item()
            assert columns["face_similarity"][person, candidate].item() == pytest.approx(
                slow, abs=1e-5
            )
    assert torch.equal(columns["similarity"], columns["face_similarity"])


def test_face_needs_an_embedder():
    with pytest.raises(ConfigError, match=r"got none: pass embedder=\.\.\."):
        Face().columns(evidence(victims=victims()))


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
    )  # the bands of worlds.images separate people


def test_a_person_with_one_photo_counts_only_among_different_people():
    public = images_of([[0, 0, 0, 0]], [0])
    data = images_of([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]], [0, 0, 1])
    found = reference_similarities(pixels_embedder(), data, public)
    assert found == {
        "same_person": pytest.approx(1),
        "different_people": pytest.approx(0),
        "people": 2,
        "with_several": 1,
    }


def test_people_who_give_no_scale_are_refused():
    public = images_of([[0, 0, 0, 0]], [0])
    with pytest.raises(DataError, match=r"expected at least 2 people, .* got 2 images of 2 people"):
        reference_similarities(
            pixels_embedder(), images_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, 1]), public
        )
    with pytest.raises(DataError, match="2 images of 1 people"):
        reference_similarities(
            pixels_embedder(), images_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, 0]), public
        )
    with pytest.raises(DataError, match="got 2 images, 1 without a label"):
        reference_similarities(
            pixels_embedder(), images_of([[1, 0, 0, 0], [0, 1, 0, 0]], [0, -1]), public
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
            DataError, match="only the latents of an attack that reconstructs embeddings"
        ):
            feature_similarity(latents, known)


def test_top1_is_accuracy_without_the_target():
    shown = evidence(evaluators=[target(classes=9, seed=1), target(classes=9, seed=2)])
    all_columns, recognised = Accuracy().columns(shown), Top1().columns(shown)
    assert list(all_columns) == [
        "target_top1",
        "target_confidence",
        "top1_1",
        "top5_1",
        "top1_2",
        "top5_2",
    ]
    assert list(recognised) == ["top1_1", "top5_1", "top1_2", "top5_2"]
    assert all(torch.equal(recognised[name], all_columns[name]) for name in recognised)
    for number, k in itertools.product((1, 2), (1, 5)):
        logits = shown.evaluator_outputs[number - 1][0]
        slow = [
            [float(sum(logits[i * 4 + c] > logits[i * 4 + c, i]) < k) for c in range(4)]
            for i in range(3)
        ]
        assert recognised[f"top{k}_{number}"].tolist() == slow
    assert not torch.equal(recognised["top1_1"], recognised["top5_1"])


def test_accuracy_needs_a_target_that_classifies_people():
    attributes = replace(target(), attributes=True)
    assert "top1_1" in measure([Top1()], evidence(model=attributes)).columns
    with pytest.raises(ConfigError, match=r"got one that classifies attributes. Use top1"):
        Accuracy().columns(evidence(model=attributes))
    with pytest.raises(ConfigError, match="top1 needs at least one evaluator"):
        Top1().columns(evidence(evaluators=[]))
