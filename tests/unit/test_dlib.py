"""dlib's face embedding, with a stand-in for dlib: which face is embedded, and at which size."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.evaluators import dlib_faces
from frostglass.evaluators.dlib_faces import SMALLEST, DlibFaces


class Face:
    def __init__(self, size):
        self.size = size

    def area(self):
        return self.size


class Recogniser:
    def __init__(self, path):
        assert Path(path).name == dlib_faces.EMBEDDING

    def compute_face_descriptor(self, array, face):
        return [float(face.size), float(len(array)), *[0.0] * 126]


def detector():
    """Finds a small and a large face in a bright image, and none in a dark one."""
    return lambda array, _: [Face(5), Face(9)] if array.mean() > 100 else []


@pytest.fixture(autouse=True)
def _dlib(monkeypatch):
    stand_in = SimpleNamespace(
        get_frontal_face_detector=detector,
        shape_predictor=lambda path: lambda array, face: face,
        face_recognition_model_v1=Recogniser,
    )
    monkeypatch.setitem(sys.modules, "dlib", stand_in)
    files = [Path(dlib_faces.EMBEDDING), Path(dlib_faces.LANDMARKS)]
    monkeypatch.setattr(dlib_faces, "dlib_files", lambda: files)


def test_the_largest_face_is_embedded_and_small_images_are_enlarged():
    bright, dark = torch.ones(1, 3, 64, 64), torch.zeros(1, 3, 64, 64)
    embeddings = DlibFaces()(torch.cat([bright, dark]))
    assert embeddings.shape == (2, 128)
    assert embeddings[0, :2].tolist() == [9.0, SMALLEST]
    assert embeddings[1].isnan().all()


def test_large_images_keep_their_size_and_grey_ones_become_colour():
    assert DlibFaces()(torch.ones(1, 1, 200, 200))[0, 1] == 200


def test_a_dry_run_detects_nothing():
    assert DlibFaces()(torch.empty(3, 3, 64, 64, device="meta")).shape == (3, 128)


def test_a_missing_dlib_is_told_when_the_evaluator_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "dlib", None)
    with pytest.raises(ConfigError, match=r"dlib cannot be imported .*frostglass\[faces\]"):
        DlibFaces()
