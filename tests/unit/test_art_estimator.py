"""Targets as estimators of ART, and back."""

import sys

import numpy as np
import pytest
import torch

from frostglass.core.errors import ConfigError, ModelError
from frostglass.models.art import art_estimator, from_art
from worlds import target as untrained


def target():
    """A network whose batch norms do not look at the batch, as ART predicts."""
    made = untrained()
    made.module.eval()
    return made


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "art.estimators", None)
    with pytest.raises(ConfigError, match=r"`pip install adversarial-robustness-toolbox`"):
        art_estimator(target())


@pytest.fixture
def classification():
    return pytest.importorskip("art.estimators.classification")


def test_there_and_back(classification):
    mine = target()
    images = torch.rand(5, *mine.image_shape)
    estimator = art_estimator(mine)
    with torch.no_grad():
        logits = mine.module(images)
    assert np.allclose(estimator.predict(images.numpy()), logits.numpy(), atol=1e-5)
    back = from_art(estimator, mine.classes)
    assert back.module is mine.module
    assert (back.classes, back.image_shape, back.head) == (
        mine.classes, mine.image_shape, mine.head,
    )  # fmt: skip


def test_the_range_and_the_preprocessing_of_an_estimator_are_kept(classification):
    mine = target()
    mean, std = np.array([10.0, 20.0, 30.0]), np.array([50.0, 60.0, 70.0])
    channels = mine.image_shape[0]
    estimator = classification.PyTorchClassifier(
        mine.module, torch.nn.CrossEntropyLoss(), mine.image_shape, len(mine.classes),
        clip_values=(0.0, 255.0),
        preprocessing=(mean[:channels].reshape(-1, 1, 1), std[:channels].reshape(-1, 1, 1)),
    )  # fmt: skip
    images = torch.rand(3, *mine.image_shape)
    with torch.no_grad():
        ours = from_art(estimator).module(images).numpy()
    assert np.allclose(estimator.predict(images.numpy() * 255), ours, atol=1e-4)


def test_what_an_attack_would_not_face_is_refused(classification):
    mine = target()
    settings = {
        "loss": torch.nn.CrossEntropyLoss(),
        "input_shape": mine.image_shape,
        "nb_classes": 4,
    }
    with pytest.raises(ModelError, match=r"states no clip_values"):
        from_art(classification.PyTorchClassifier(mine.module, **settings))
    from art.defences.preprocessor import SpatialSmoothing

    smooth = SpatialSmoothing(channels_first=True)
    defended = classification.PyTorchClassifier(
        mine.module, **settings, clip_values=(0, 1), preprocessing_defences=[smooth]
    )
    with pytest.raises(ModelError, match=r"defences of ART \(SpatialSmoothing"):
        from_art(defended)
    with pytest.raises(ModelError, match=r"expected a PyTorchClassifier of ART, got Linear"):
        from_art(torch.nn.Linear(2, 2))
