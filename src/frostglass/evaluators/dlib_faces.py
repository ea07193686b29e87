"""dlib's face embedding, from the extra `faces`: detection, alignment, 128 numbers per face."""

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.errors import ConfigError

EMBEDDING = "dlib_face_recognition_resnet_model_v1.dat"
LANDMARKS = "shape_predictor_5_face_landmarks.dat"
SMALLEST = 160  # pixels a side; the detector finds faces of 80 pixels and more
INSTALL = "install it with `pip install 'frostglass[faces]'`"


def dlib_files() -> list[Path]:
    """List the two files of weights; the package that holds them is not imported."""
    found = find_spec("face_recognition_models")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"dlib: the package face_recognition_models is missing: {INSTALL}")
    folder = Path(found.submodule_search_locations[0]) / "models"
    return [folder / EMBEDDING, folder / LANDMARKS]


def _dlib() -> Any:
    try:
        import dlib
    except ImportError as error:
        raise ConfigError(f"dlib cannot be imported ({error}): {INSTALL}") from error
    return dlib


class DlibFaces(nn.Module):
    """Maps images in [0, 1] to embeddings (N, 128); NaN where no face is found."""

    def __init__(self) -> None:
        super().__init__()
        dlib_files()
        self._library = _dlib()
        self.register_buffer("place", torch.zeros(()))  # follows the device, as weights would

    @cached_property
    def _models(self) -> tuple[Any, Any, Any]:
        dlib = self._library
        embedding, landmarks = map(str, dlib_files())
        return (
            dlib.get_frontal_face_detector(),
            dlib.shape_predictor(landmarks),
            dlib.face_recognition_model_v1(embedding),
        )

    def forward(self, images: Tensor) -> Tensor:
        if images.is_meta:
            return torch.empty(len(images), 128, device=images.device)
        if images.shape[-1] < SMALLEST:
            size = (SMALLEST, SMALLEST)
            images = F.interpolate(images, size=size, mode="bicubic", align_corners=False)
        pixels = images.clamp(0, 1).mul(255).round().byte().expand(-1, 3, -1, -1)
        arrays = pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        return torch.stack([self._embedding(array) for array in arrays]).to(images.device)

    def _embedding(self, array: np.ndarray) -> Tensor:
        detect, align, embed = self._models
        faces = detect(array, 1)
        if not faces:
            return torch.full((128,), torch.nan)
        largest = max(faces, key=lambda face: face.area())
        return torch.tensor(list(embed.compute_face_descriptor(array, align(array, largest))))
