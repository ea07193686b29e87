"""Improved residual networks for faces, for `ir152` and `facenet`, and their published names.

Files of face.evoLVe hold the network without its classifier, under other names, which `read_body`
translates:

| here                      | face.evoLVe                |
|---------------------------|----------------------------|
| `stem.{0,1,2}`            | `input_layer.{0,1,2}`      |
| `units.I.shortcut.{0,1}`  | `body.I.shortcut_layer.{0,1}` |
| `units.I.residual.{0..4}` | `body.I.res_layer.{0..4}`  |
| `norm`                    | `output_layer.0`           |
| `embedding`               | `output_layer.3`           |
| `embedding_norm`          | `output_layer.4`           |
| `head`                    | in no file: initialised    |

`embedding` depends on the image size: of a file for 112 px, a network for 64 px can use only
`stem`, `units` and `norm`.
"""

from collections import OrderedDict

from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive
from frostglass.models.shortcuts import ResidualBlock, scaled

FACE_EVOLVE = {
    "input_layer.": "stem.",
    "body.": "units.",
    ".shortcut_layer.": ".shortcut.",
    ".res_layer.": ".residual.",
    "output_layer.0.": "norm.",
    "output_layer.3.": "embedding.",
    "output_layer.4.": "embedding_norm.",
}


class Unit(ResidualBlock):
    """Batch norm, convolution, PReLU, convolution and batch norm, with a shortcut around them.

    The second convolution has the stride. Nothing is in place: per-sample gradients need that.
    """

    projection = "shortcut"

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = nn.MaxPool2d(1, stride)
        if channels != wide:
            project = nn.Conv2d(channels, wide, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(wide))
        self.residual = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.Conv2d(channels, wide, 3, padding=1, bias=False),
            nn.PReLU(wide),
            nn.Conv2d(wide, wide, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )

    def forward(self, maps: Tensor) -> Tensor:
        if self.shortcut is None:
            return self.residual(maps)
        return scaled(self.shortcut(maps), self.shortcut_scale) + self.residual(maps)


class IR(nn.Sequential):
    """The layers by name, as in the table; for this class `read_body` reads face.evoLVe files."""


def ir(
    name: str, depths: tuple[int, int, int, int], *, classes: int, image_shape: Shape, width: int
) -> IR:
    """Build four stages of `depths` units with `width` x 1, 2, 4, 8 channels, and a linear head.

    Each stage halves the map. The embedding before the head has `width` x 8 values and is linear
    in the flat last map, so its weights depend on the image size.
    """
    check_positive(name, width=width)
    channels, high, wide = image_shape
    stem = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.PReLU(width)
    )
    units: list[Unit] = []
    channels = width
    for number, depth in enumerate(depths):
        for position in range(depth):
            units.append(Unit(channels, width * 2**number, 1 if position else 2))
            channels = width * 2**number
        high, wide = (high + 1) // 2, (wide + 1) // 2
    net = IR(
        OrderedDict(
            stem=stem,
            units=nn.Sequential(*units),
            norm=nn.BatchNorm2d(channels),
            dropout=nn.Dropout(0.5),
            flatten=nn.Flatten(),
            embedding=nn.Linear(channels * high * wide, channels),
            embedding_norm=nn.BatchNorm1d(channels),
            head=nn.Linear(channels, classes),
        )
    )
    for layer in net[:-1].modules():  # as in face.evoLVe, which has no head
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
    return net


def from_face_evolve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of face.evoLVe to the names of this package; other names stay."""
    for theirs, ours in FACE_EVOLVE.items():
        tensors = {name.replace(theirs, ours): value for name, value in tensors.items()}
    return tensors
